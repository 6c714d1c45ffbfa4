"""SiameseNorm: a stream that is normed before each sub-layer, and one that is not; sub-layers read and write both.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from normlab.placements.base import MakeNorm, Placement, register_placement
from normlab.placements.streams import DuplicateStream, Streams
from normlab.placements.wiring import Branch, Sequential


@dataclass(kw_only=True, slots=True)
class Siamese(Placement):
    """x <- N(x), f = F(N(x + N(y))), x <- x + f / sqrt(2l), y <- y + f; the head gets N(N(x) + N(y)).

    Both streams start at the embeddings. There are three norms for each sub-layer and three before the head.
    Statistics of the stream are those of x before its norm. The form is that of the authors' image model.
    """

    formula: ClassVar[str] = "x = N(x); f = F(N(x + N(y))); x = x + f / sqrt(2 * l); y = y + f"
    embedding_formula: ClassVar[str] = "y = x"
    head_formula: ClassVar[str] = "x = N(N(x) + N(y))"
    source: ClassVar[str] = "Li et al. 2026, arXiv:2602.08064 (SiameseNorm; as in Qwen-Applications/SiameseNorm's DeiT)"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "The paper's algorithm norms x elsewhere and has another factor than the authors' code; this follows the code.",
    )
    init: ClassVar[str] = "gpt2_scaled"  # as pre: the abstract calls it compatible with pre-norm recipes

    name: str = "siamese"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the two sub-layers in sequence."""
        return Sequential(*(SiameseSubLayer(layer + 1, width, make_norm) for _ in range(2)))

    def embed_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the module that starts both streams at the embeddings."""
        return DuplicateStream()

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the module that combines both streams."""
        return SiameseOutput(width, make_norm)


class SiameseSubLayer(nn.Module):
    """One sub-layer of block `layer` (counted from 1), which reads and writes both streams."""

    root: Tensor

    def __init__(self, layer: int, width: int, make_norm: MakeNorm):
        super().__init__()
        self.x_norm = make_norm(width)
        self.y_norm = make_norm(width)
        self.in_norm = make_norm(width)
        # A float64 scalar divides a float32 tensor as a float32 number, and a float64 tensor without loss.
        self.register_buffer("root", torch.tensor(math.sqrt(2 * layer), dtype=torch.float64))

    def forward(self, streams: Streams, sublayer: Branch) -> Streams:
        """Return both streams after the sub-layer."""
        x_BTD, y_BTD = streams
        x_BTD = self.x_norm(x_BTD)
        branch_BTD = sublayer(self.in_norm(x_BTD + self.y_norm(y_BTD)))
        return x_BTD + sublayer.mark_update(branch_BTD / self.root), y_BTD + branch_BTD


class SiameseOutput(nn.Module):
    """N(N(x) + N(y))."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.x_norm = make_norm(width)
        self.y_norm = make_norm(width)
        self.out_norm = make_norm(width)

    def forward(self, streams: Streams) -> Tensor:
        """Return the input of the head."""
        x_BTD, y_BTD = streams
        return self.out_norm(self.x_norm(x_BTD) + self.y_norm(y_BTD))


register_placement(Siamese())
