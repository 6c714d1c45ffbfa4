"""ResiDual: a post-norm stream that the sub-layers read, and a second stream that sums their outputs without norms.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from normlab.placements.base import MakeNorm, Placement, register_placement
from normlab.placements.streams import DuplicateStream, Streams
from normlab.placements.wiring import Branch, Sequential


@dataclass(kw_only=True, slots=True)
class ResiDual(Placement):
    """f = F(x), x <- N(x + f), y <- y + f; both start at the embeddings, and the head reads x + N(y).

    Through y the gradient reaches every sub-layer and passes only the last norm. Statistics of the stream are those
    of x. The authors' code can scale y, which the last norm undoes apart from its eps; here y is not scaled.
    """

    formula: ClassVar[str] = "f = F(x); x = N(x + f); y = y + f"
    embedding_formula: ClassVar[str] = "y = x"
    head_formula: ClassVar[str] = "x = x + N(y)"
    source: ClassVar[str] = "Xie et al. 2023, arXiv:2304.14802 (ResiDual)"
    pitfalls: ClassVar[tuple[str, ...]] = ("x-transformers still documents resi_dual=True, whose code is gone.",)
    init: ClassVar[str] = "xavier"  # as post-norm; the authors' code keeps the init of fairseq

    name: str = "resi_dual"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the two sub-layers in sequence."""
        return Sequential(ResiDualSubLayer(width, make_norm), ResiDualSubLayer(width, make_norm))

    def embed_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the module that starts both streams at the embeddings."""
        return DuplicateStream()

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the module that combines both streams."""
        return ResiDualOutput(width, make_norm)


class ResiDualSubLayer(nn.Module):
    """One sub-layer, whose output is added to both streams."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width)

    def forward(self, streams: Streams, sublayer: Branch) -> Streams:
        """Return both streams after the sub-layer."""
        x_BTD, y_BTD = streams
        branch_BTD = sublayer(x_BTD)
        return self.norm(x_BTD + branch_BTD), y_BTD + branch_BTD


class ResiDualOutput(nn.Module):
    """x + N(y)."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width)

    def forward(self, streams: Streams) -> Tensor:
        """Return the input of the head."""
        x_BTD, y_BTD = streams
        return x_BTD + self.norm(y_BTD)


register_placement(ResiDual())
