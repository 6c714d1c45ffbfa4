"""Learned factors on the stream and on the embeddings before each block: nanochat's lambdas.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from normlab.placements.base import MakeNorm, Placement, register_placement
from normlab.placements.streams import Streams, twice
from normlab.placements.wiring import Branch


def falling(first: float, last: float, layer: int, depth: int) -> float:
    """From `first` at block 1 to `last` at block L, linearly; `first` where there is but one."""
    return first + (last - first) * (layer - 1) / max(depth - 1, 1)


@dataclass(kw_only=True, slots=True)
class X0Lambdas(Placement):
    """x <- r x + z x0 before each block, then pre-norm; x0 is the normed embeddings.

    Two learned numbers a block: r starts at 1.15 in the first block and 1.05 in the last, z at 0.20 and 0.05,
    linearly between them. A norm on the embeddings and one on the stream before the head. Of nanochat it is this
    alone: no value embeddings, no smearing, no mid-layer subtracted at the end, no cap on the logits; the two
    numbers have the run's learning rate, and the matrices start by a rule of GPT-2's, where nanochat's two that
    write to the stream start at zero.
    """

    formula: ClassVar[str] = "x = r * x + z * x0; x = x + A(N(x)); x = x + M(N(x))"
    opens: ClassVar[str] = "x = N(x); x0 = x"
    closes: ClassVar[str] = "x = N(x)"
    source: ClassVar[str] = "Karpathy, nanochat (karpathy/nanochat, nanochat/gpt.py at 92d63d4)"
    parameters: ClassVar[str] = "2 * L"
    equals: ClassVar[str] = "pre with placement.embedding_norm=true where r = 1 and z = 0"
    init: ClassVar[str] = "gpt2_scaled"
    starts: ClassVar[Mapping[str, str]] = {
        "wiring.r": "1.15 - 0.10 * (l - 1) / max(L - 1, 1)",
        "wiring.z": "0.20 - 0.15 * (l - 1) / max(L - 1, 1)",
    }

    name: str = "x0_lambdas"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """Pre-norm, behind the block's two numbers."""
        return Mixed(layer + 1, depth, width, make_norm)

    def open(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """The normed embeddings, as stream and as what is kept."""
        return Kept(width, make_norm)

    def close(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """The final norm, of the stream alone."""
        return Last(width, make_norm)


class Mixed(nn.Module):
    """The wiring of `X0Lambdas`, of block `layer` (counted from 1)."""

    def __init__(self, layer: int, depth: int, width: int, make_norm: MakeNorm):
        super().__init__()
        self.r = nn.Parameter(torch.tensor(falling(1.15, 1.05, layer, depth)))
        self.z = nn.Parameter(torch.tensor(falling(0.20, 0.05, layer, depth)))
        self.attn_norm = make_norm(width)
        self.mlp_norm = make_norm(width)

    def forward(self, streams: Streams, attn: Branch, mlp: Branch) -> Streams:
        """The stream after the block, and the embeddings as they were."""
        x_BTD, x0_BTD = streams
        x_BTD = self.r * x_BTD + self.z * x0_BTD
        x_BTD = x_BTD + attn(self.attn_norm(x_BTD))
        return x_BTD + mlp(self.mlp_norm(x_BTD)), x0_BTD


class Kept(nn.Module):
    """(N(x), N(x))."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width)

    def forward(self, x_BTD: Tensor) -> Streams:
        """The stream that enters the first block, and what each block adds of it."""
        return twice(self.norm(x_BTD))


class Last(nn.Module):
    """N(x), of the first of two streams."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width)

    def forward(self, streams: Streams) -> Tensor:
        """The head's input."""
        return self.norm(streams[0])


register_placement(X0Lambdas())
