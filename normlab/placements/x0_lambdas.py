"""Learned factors on the stream and on the embeddings before each block, as in nanochat.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from normlab.placements.base import MakeNorm, Placement, register_placement
from normlab.placements.streams import Streams, duplicate_stream
from normlab.placements.wiring import Branch


def interpolate(first: float, last: float, layer: int, depth: int) -> float:
    """Return the linear interpolation from `first` at block 1 to `last` at block L; `first` if L = 1."""
    return first + (last - first) * (layer - 1) / max(depth - 1, 1)


@dataclass(kw_only=True, slots=True)
class X0Lambdas(Placement):
    """x <- r x + z x0 before each block, then pre-norm; x0 is the embeddings after a norm.

    Each block has two learned numbers: r starts at 1.15 in the first block and 1.05 in the last, z at 0.20 and 0.05,
    linear in between. There is a norm on the embeddings and one before the head. Other parts of nanochat are left
    out: value embeddings, smearing, the subtraction of a middle layer and the cap on the logits. The two numbers have
    the run's learning rate. The matrices follow an init rule of GPT-2, while in nanochat the output matrices start
    at 0.
    """

    formula: ClassVar[str] = "x = r * x + z * x0; x = x + A(N(x)); x = x + M(N(x))"
    embedding_formula: ClassVar[str] = "x = N(x); x0 = x"
    head_formula: ClassVar[str] = "x = N(x)"
    source: ClassVar[str] = "Karpathy, nanochat (karpathy/nanochat, nanochat/gpt.py at 92d63d4)"
    parameters: ClassVar[str] = "2 * L"
    equals: ClassVar[str] = "pre with placement.embedding_norm=true where r = 1 and z = 0"
    init: ClassVar[str] = "gpt2_scaled"
    initial_values: ClassVar[Mapping[str, str]] = {
        "wiring.r": "1.15 - 0.10 * (l - 1) / max(L - 1, 1)",
        "wiring.z": "0.20 - 0.15 * (l - 1) / max(L - 1, 1)",
    }

    name: str = "x0_lambdas"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the wiring of one block."""
        return X0Wiring(layer + 1, depth, width, make_norm)

    def embed_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the module that norms the embeddings and keeps a copy."""
        return X0Input(width, make_norm)

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the module that norms the stream and drops the embeddings."""
        return X0Output(width, make_norm)


class X0Wiring(nn.Module):
    """The wiring of `X0Lambdas`, of block `layer` (counted from 1)."""

    def __init__(self, layer: int, depth: int, width: int, make_norm: MakeNorm):
        super().__init__()
        self.r = nn.Parameter(torch.tensor(interpolate(1.15, 1.05, layer, depth)))
        self.z = nn.Parameter(torch.tensor(interpolate(0.20, 0.05, layer, depth)))
        self.attn_norm = make_norm(width)
        self.mlp_norm = make_norm(width)

    def forward(self, streams: Streams, attn: Branch, mlp: Branch) -> Streams:
        """Return the stream after the block, and the unchanged embeddings."""
        x_BTD, x0_BTD = streams
        x_BTD = self.r * x_BTD + self.z * x0_BTD
        x_BTD = x_BTD + attn(self.attn_norm(x_BTD))
        return x_BTD + mlp(self.mlp_norm(x_BTD)), x0_BTD


class X0Input(nn.Module):
    """(N(x), N(x))."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width)

    def forward(self, x_BTD: Tensor) -> Streams:
        """Return the stream that enters the first block, and the embeddings that each block adds."""
        return duplicate_stream(self.norm(x_BTD))


class X0Output(nn.Module):
    """N(x), of the first of two streams."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width)

    def forward(self, streams: Streams) -> Tensor:
        """Return the input of the head."""
        return self.norm(streams[0])


register_placement(X0Lambdas())
