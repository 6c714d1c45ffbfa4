"""What placements of n streams share: how streams are made, read, mixed and written.

A sub-layer F reads a weighted sum of the streams, and its output is added to each of them:

    x <- mix(c, x) + write(b, F(N(read(a, x))))

with n numbers a, n numbers b and an n x n matrix c, learned or computed from the streams of each token. A placement
is a way to make a, b and c (`Placement.weights_formula`).

Shapes: B batch, T time, n streams, D width. A weight that is the same for all tokens lacks the axes B and T.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from normlab.base.options import option
from normlab.catalogue.placements.base import MakeNorm, Placement
from normlab.catalogue.placements.wiring import Branch
from normlab.catalogue.sites import of_sub_layer

EPS = 1e-6
"""Added to the mean square of the streams of a token or to its root, to `a` of `IdentityHC`, and in `sinkhorn.py`."""


def in_full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Switch autocast off: the streams are mixed in their own precision, in which other placements add."""
    return torch.autocast(x.device.type, enabled=False)


def read(a: Tensor, x_BTnD: Tensor) -> Tensor:
    """Return sum_i a_i x_i, (B, T, D)."""
    return (a[..., None] * x_BTnD).sum(-2)


def rms_normed(x: Tensor, *, eps: float = EPS, eps_outside: bool = False) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps), or x / (sqrt(mean(x^2)) + eps), over the last axis."""
    square = x.square().mean(-1, keepdim=True)
    return x / (square.sqrt() + eps) if eps_outside else x * torch.rsqrt(square + eps)


class MixedStreams(nn.Module):
    """x <- mix(c, x) + write(b, F(N(read(a, x)))) for one sub-layer F; a subclass makes a, b and c.

    One product reads and mixes, since on a GPU its start takes longer than its work.
    """

    def __init__(self, sub_layer: str, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width, of_sub_layer("input", sub_layer))

    def weights(self, x_BTnD: Tensor) -> tuple[Tensor, Tensor]:
        """Return [a, c], (..., n, 1 + n), or [a], (..., n, 1), if every stream is kept as it is; and b, (..., n)."""
        raise NotImplementedError

    def forward(self, x_BTnD: Tensor, sublayer: Branch) -> Tensor:
        with in_full_precision(x_BTnD):
            mixing, b = self.weights(x_BTnD)
            # The streams are the rows of [a, c], so the transpose's first row reads, and the others mix.
            product_BTmD = mixing.mT @ x_BTnD
            read_BT1D, mixed_BTnD = product_BTmD.split_with_sizes([1, mixing.shape[-1] - 1], -2)
            kept_BTnD = mixed_BTnD if mixed_BTnD.shape[-2] else x_BTnD
        branch_BTD = sublayer(self.norm(read_BT1D.squeeze(-2)))
        with in_full_precision(x_BTnD):
            return kept_BTnD + sublayer.mark_update(b[..., None] * branch_BTD[..., None, :])


class Copies(nn.Module):
    """n copies of the embeddings."""

    def __init__(self, streams: int):
        super().__init__()
        self.streams = streams

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD[..., None, :].repeat_interleave(self.streams, -2)


@dataclass(kw_only=True, slots=True)
class Streams(Placement):
    """The base class of placements of n streams that start as copies of the embeddings."""

    formula: ClassVar[str] = "x = mix(c, x) + write(b, F(N(read(a, x))))"
    embedding_formula: ClassVar[str] = "x = copies(streams, x)"
    head_formula: ClassVar[str] = "x = N(read(a, x))"

    streams: int = option(4, "Number n of streams.", at_least=1, at_most=64)

    @property
    def streams_in_tensors(self) -> tuple[int, ...]:
        return (self.streams,)

    def embed_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        return Copies(self.streams)
