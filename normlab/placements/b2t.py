"""B2T: post-norm with a connection that skips every norm of the block except the last.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from normlab.placements.base import MakeNorm, Placement, register_placement
from normlab.placements.wiring import Branch


@dataclass(kw_only=True, slots=True)
class BottomToTop(Placement):
    """h = N(x + A(x)), x <- N(x + h + M(h)): the input of the block is added again before its last norm.

    There is no norm before the head, because the last block ends in one.
    """

    formula: ClassVar[str] = "h = N(x + A(x)); x = N(x + h + M(h))"
    source: ClassVar[str] = "Takase et al. 2022, arXiv:2206.00330 (B2T connection)"
    init: ClassVar[str] = "xavier_scaled"

    name: str = "b2t"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the wiring of one block."""
        return B2TWiring(width, make_norm)


class B2TWiring(nn.Module):
    """The wiring of `BottomToTop`."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.attn_norm = make_norm(width)
        self.mlp_norm = make_norm(width)

    def forward(self, x_BTD: Tensor, attn: Branch, mlp: Branch) -> Tensor:
        """Return the stream after the block."""
        h_BTD = self.attn_norm(x_BTD + attn(x_BTD))
        return self.mlp_norm(x_BTD + h_BTD + mlp(h_BTD))


register_placement(BottomToTop())
