"""Gradient-preserving activation scaling: pre-norm whose stream is scaled after each addition, its gradient not.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.placements.base import MakeNorm, Placement, register_placement
from normlab.placements.wiring import Branch


@dataclass(kw_only=True, slots=True)
class GPAS(Placement):
    """Pre-norm with x <- x - silu(g) stop(x) after each of the block's two additions.

    Forwards the stream is multiplied by 1 - silu(g), backwards by 1: stop(x) is x without a gradient. One number g
    for each block, shared by its two sub-layers as in the authors' code; it starts at 0, where the placement is
    `pre`. A norm on the stream before the head.
    """

    formula: ClassVar[str] = (
        "x = x + A(N(x)); x = x - silu(gate) * stop(x); x = x + M(N(x)); x = x - silu(gate) * stop(x)"
    )
    closes: ClassVar[str] = "x = N(x)"
    source: ClassVar[str] = "Chen et al. 2025, arXiv:2506.22049 (Pre + GPAS; one gate a block as in dandingsky/GPAS)"
    parameters: ClassVar[str] = "L"
    equals: ClassVar[str] = "pre where every gate is 0, as they start"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "Its authors start embeddings with deviation sqrt(2 / 5) in all variants; of pre at 350M parameters they note "
        "perplexity 20.49 with 0.02, where LayerNorm Scaling's table, made with the larger, has 19.58.",
        "At 1B and 7B parameters they clip the gates' gradients at 0.01, which is not done here.",
    )
    init: ClassVar[str] = "gpt2"
    starts: ClassVar[Mapping[str, str]] = {"wiring.gate": "0"}

    name: str = "gpas"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """Pre-norm, and the block's gate."""
        return Gated(width, make_norm)

    def close(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """The final norm."""
        return make_norm(width)


class Gated(nn.Module):
    """The wiring of `GPAS`."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.attn_norm = make_norm(width)
        self.mlp_norm = make_norm(width)
        self.gate = nn.Parameter(torch.zeros(()))

    def scaled(self, x_BTD: Tensor) -> Tensor:
        """(1 - silu(g)) x, with the gradient of x."""
        return x_BTD - F.silu(self.gate) * x_BTD.detach()

    def forward(self, x_BTD: Tensor, attn: Branch, mlp: Branch) -> Tensor:
        """The stream after the block."""
        x_BTD = self.scaled(x_BTD + attn(self.attn_norm(x_BTD)))
        return self.scaled(x_BTD + mlp(self.mlp_norm(x_BTD)))


register_placement(GPAS())
