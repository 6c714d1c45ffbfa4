"""Gradient-preserving activation scaling: pre-norm that scales the stream after each addition, but not its gradient.

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

    The forward pass multiplies the stream by 1 - silu(g), the backward pass by 1: stop(x) is x without a gradient.
    Each block has one number g, shared by its two sub-layers as in the authors' code. It starts at 0, where the
    placement equals `pre`. There is a norm before the head.
    """

    formula: ClassVar[str] = (
        "x = x + A(N(x)); x = x - silu(gate) * stop(x); x = x + M(N(x)); x = x - silu(gate) * stop(x)"
    )
    head_formula: ClassVar[str] = "x = N(x)"
    source: ClassVar[str] = "Chen et al. 2025, arXiv:2506.22049 (Pre + GPAS; one gate a block as in dandingsky/GPAS)"
    parameters: ClassVar[str] = "L"
    equals: ClassVar[str] = "pre where every gate is 0, as they start"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "Its authors start embeddings with deviation sqrt(2 / 5) in all variants; of pre at 350M parameters they note "
        "perplexity 20.49 with 0.02, where LayerNorm Scaling's table, made with the larger, has 19.58.",
        "At 1B and 7B parameters they clip the gates' gradients at 0.01, which is not done here.",
    )
    init: ClassVar[str] = "gpt2"
    initial_values: ClassVar[Mapping[str, str]] = {"wiring.gate": "0"}

    name: str = "gpas"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the wiring of one block."""
        return GPASWiring(width, make_norm)

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the norm before the head."""
        return make_norm(width)


class GPASWiring(nn.Module):
    """The wiring of `GPAS`."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.attn_norm = make_norm(width)
        self.mlp_norm = make_norm(width)
        self.gate = nn.Parameter(torch.zeros(()))

    def scale(self, x_BTD: Tensor) -> Tensor:
        """(1 - silu(g)) x, with the gradient of x."""
        return x_BTD - F.silu(self.gate) * x_BTD.detach()

    def forward(self, x_BTD: Tensor, attn: Branch, mlp: Branch) -> Tensor:
        """Return the stream after the block."""
        x_BTD = self.scale(x_BTD + attn(self.attn_norm(x_BTD)))
        return self.scale(x_BTD + mlp(self.mlp_norm(x_BTD)))


register_placement(GPAS())
