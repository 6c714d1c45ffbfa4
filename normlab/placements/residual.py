"""ResiDual: a post-norm stream that the sub-layers read, and beside it the bare sum of all that they wrote.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from normlab.placements.base import MakeNorm, Placement, register_placement
from normlab.placements.streams import Streams, Twice
from normlab.placements.wiring import Branch, Sequential


@dataclass(kw_only=True, slots=True)
class ResiDual(Placement):
    """f = F(x), x <- N(x + f), y <- y + f; both begin at the embeddings, and the head gets x + N(y).

    The gradient reaches every sub-layer by way of y without passing a norm but the last. Statistics of the stream
    are those of x. The authors' code can scale y, which the last norm undoes but for its eps; nothing is scaled here.
    """

    formula: ClassVar[str] = "f = F(x); x = N(x + f); y = y + f"
    opens: ClassVar[str] = "y = x"
    closes: ClassVar[str] = "x = x + N(y)"
    source: ClassVar[str] = "Xie et al. 2023, arXiv:2304.14802 (ResiDual)"
    pitfalls: ClassVar[tuple[str, ...]] = ("x-transformers still documents resi_dual=True, whose code is gone.",)
    init: ClassVar[str] = "xavier"  # that of post-norm; the authors' code leaves fairseq's as it is

    name: str = "resi_dual"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """The two sub-layers, one after the other."""
        return Sequential(Join(width, make_norm), Join(width, make_norm))

    def open(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """Both streams begin at the embeddings."""
        return Twice()

    def close(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """The head's input, from both."""
        return Meet(width, make_norm)


class Join(nn.Module):
    """How one sub-layer writes to both streams."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width)

    def forward(self, streams: Streams, sublayer: Branch) -> Streams:
        """The streams after the sub-layer."""
        x_BTD, y_BTD = streams
        branch_BTD = sublayer(x_BTD)
        return self.norm(x_BTD + branch_BTD), y_BTD + branch_BTD


class Meet(nn.Module):
    """x + N(y)."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width)

    def forward(self, streams: Streams) -> Tensor:
        """The head's input."""
        x_BTD, y_BTD = streams
        return x_BTD + self.norm(y_BTD)


register_placement(ResiDual())
