"""SiameseNorm: a stream normed before each sub-layer and a bare one; the sub-layer reads both and writes to both.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from normlab.placements.base import MakeNorm, Placement, register_placement
from normlab.placements.streams import Streams, Twice
from normlab.placements.wiring import Branch, Sequential


@dataclass(kw_only=True, slots=True)
class Siamese(Placement):
    """x <- N(x), f = F(N(x + N(y))), x <- x + f / sqrt(2l), y <- y + f; the head gets N(N(x) + N(y)).

    Both streams begin at the embeddings. Three norms for each sub-layer, and three at the end. Statistics of the
    stream are those of x, before it is normed. In the form of the authors' image model.
    """

    formula: ClassVar[str] = "x = N(x); f = F(N(x + N(y))); x = x + f / sqrt(2 * l); y = y + f"
    opens: ClassVar[str] = "y = x"
    closes: ClassVar[str] = "x = N(N(x) + N(y))"
    source: ClassVar[str] = "Li et al. 2026, arXiv:2602.08064 (SiameseNorm; as in Qwen-Applications/SiameseNorm's DeiT)"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "The paper's algorithm is told with x normed elsewhere and another factor than the code, which this follows.",
    )
    init: ClassVar[str] = "gpt2_scaled"  # pre's: the abstract calls it compatible with the recipes of pre-norm

    name: str = "siamese"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """The two sub-layers, one after the other."""
        return Sequential(*(Join(layer + 1, width, make_norm) for _ in range(2)))

    def open(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """Both streams begin at the embeddings."""
        return Twice()

    def close(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """The head's input, from both."""
        return Meet(width, make_norm)


class Join(nn.Module):
    """How one sub-layer of block `layer` (counted from 1) reads and writes both streams."""

    root: Tensor

    def __init__(self, layer: int, width: int, make_norm: MakeNorm):
        super().__init__()
        self.x_norm = make_norm(width)
        self.y_norm = make_norm(width)
        self.in_norm = make_norm(width)
        # A float64 scalar: it divides a float32 tensor as a float32 number, and a float64 one without loss.
        self.register_buffer("root", torch.tensor(math.sqrt(2 * layer), dtype=torch.float64))

    def forward(self, streams: Streams, sublayer: Branch) -> Streams:
        """The streams after the sub-layer."""
        x_BTD, y_BTD = streams
        x_BTD = self.x_norm(x_BTD)
        branch_BTD = sublayer(self.in_norm(x_BTD + self.y_norm(y_BTD)))
        return x_BTD + sublayer.added(branch_BTD / self.root), y_BTD + branch_BTD


class Meet(nn.Module):
    """N(N(x) + N(y))."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.x_norm = make_norm(width)
        self.y_norm = make_norm(width)
        self.out_norm = make_norm(width)

    def forward(self, streams: Streams) -> Tensor:
        """The head's input."""
        x_BTD, y_BTD = streams
        return self.out_norm(self.x_norm(x_BTD) + self.y_norm(y_BTD))


register_placement(Siamese())
