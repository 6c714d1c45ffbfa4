"""Placements of two streams: ResiDual, SiameseNorm and nanochat's x0 lambdas.

Shapes: B batch, T time, D width.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from normlab.catalogue.parameters import parameter
from normlab.catalogue.placements.base import MakeNorm, Placement, register_placement
from normlab.catalogue.placements.wiring import Branch, Sequential, TwoNorms
from normlab.catalogue.sites import of_sub_layer

StreamPair = tuple[Tensor, Tensor]
"""Two streams, (B, T, D) each. Statistics of the stream are computed on the first."""


def duplicate_stream(x_BTD: Tensor) -> StreamPair:
    """Return (x, copy of x).

    With one shared tensor the first block would need a compiled graph of its own.
    """
    return x_BTD, x_BTD.clone()


class DuplicateStream(nn.Module):
    """(x, x): both streams start at the embeddings."""

    def forward(self, x_BTD: Tensor) -> StreamPair:
        return duplicate_stream(x_BTD)


@dataclass(kw_only=True, slots=True)
class ResiDual(Placement):
    """f = F(x), x <- N(x + f), y <- y + f; both start at the embeddings, and the head reads x + N(y).

    Through y the gradient reaches every sub-layer and passes only the last norm. Statistics of the stream are those
    of x. The authors' code can scale y, which the last norm cancels apart from its eps; here y is not scaled.
    """

    title: ClassVar[str] = "ResiDual"
    formula: ClassVar[str] = "f = F(x); x = N(x + f); y = y + f"
    embedding_formula: ClassVar[str] = "y = x"
    head_formula: ClassVar[str] = "x = x + N(y)"
    source: ClassVar[str] = "Xie et al. 2023, arXiv:2304.14802 (ResiDual)"
    pitfalls: ClassVar[tuple[str, ...]] = ("x-transformers still documents resi_dual=True, whose code is gone.",)
    block_sites: ClassVar[tuple[str, ...]] = ("residual_attn", "residual_mlp")
    init: ClassVar[str] = "xavier"
    init_source: ClassVar[str] = "our choice: that of post; the authors' code keeps fairseq's (arXiv:2304.14802)"

    name: str = "resi_dual"

    @property
    def streams_in_tensors(self) -> tuple[int, ...]:
        return 1, 1

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        return Sequential(ResiDualSubLayer("attn", width, make_norm), ResiDualSubLayer("mlp", width, make_norm))

    def embed_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        return DuplicateStream()

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        return ResiDualOutput(width, make_norm)


class ResiDualSubLayer(nn.Module):
    """One sub-layer, whose output is added to both streams."""

    def __init__(self, sub_layer: str, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width, of_sub_layer("residual", sub_layer))

    def forward(self, streams: StreamPair, sublayer: Branch) -> StreamPair:
        x_BTD, y_BTD = streams
        branch_BTD = sublayer(x_BTD)
        # y has no norm in the blocks: through it the gradient of each sub-layer meets only the last norm.
        return self.norm(x_BTD + branch_BTD), y_BTD + branch_BTD


class ResiDualOutput(nn.Module):
    """x + N(y)."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width, "final")

    def forward(self, streams: StreamPair) -> Tensor:
        x_BTD, y_BTD = streams
        return x_BTD + self.norm(y_BTD)


register_placement(ResiDual())


@dataclass(kw_only=True, slots=True)
class Siamese(Placement):
    """x <- N(x), f = F(N(x + N(y))), x <- x + f / sqrt(2l), y <- y + f; the head gets N(N(x) + N(y)).

    Both streams start at the embeddings. Each sub-layer has three norms, and three more are before the LM head.
    Statistics of the stream are those of x before its norm. The authors' image model has this form.
    """

    title: ClassVar[str] = "SiameseNorm"
    formula: ClassVar[str] = "x = N(x); f = F(N(x + N(y))); x = x + f / sqrt(2 * l); y = y + f"
    embedding_formula: ClassVar[str] = "y = x"
    head_formula: ClassVar[str] = "x = N(N(x) + N(y))"
    source: ClassVar[str] = "Li et al. 2026, arXiv:2602.08064 (SiameseNorm; as in Qwen-Applications/SiameseNorm's DeiT)"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "The paper's algorithm and the authors' code differ in one norm of x and one factor; this follows the code.",
    )
    block_sites: ClassVar[tuple[str, ...]] = (
        *("streams", "streams", "input_attn"), *("streams", "streams", "input_mlp"),
    )  # fmt: skip
    init: ClassVar[str] = "gpt2_scaled"
    init_source: ClassVar[str] = "our choice: that of pre, whose recipes its abstract recommends (arXiv:2602.08064)"

    name: str = "siamese"

    @property
    def streams_in_tensors(self) -> tuple[int, ...]:
        return 1, 1

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        attn, mlp = [SiameseSubLayer(sub_layer, layer + 1, width, make_norm) for sub_layer in ("attn", "mlp")]
        return Sequential(attn, mlp)

    def embed_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        return DuplicateStream()

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        return SiameseOutput(width, make_norm)


class SiameseSubLayer(nn.Module):
    """One sub-layer of block `layer` (counted from 1), which reads and writes both streams."""

    root: Tensor

    def __init__(self, sub_layer: str, layer: int, width: int, make_norm: MakeNorm):
        super().__init__()
        self.x_norm = make_norm(width, "streams")
        self.y_norm = make_norm(width, "streams")
        self.in_norm = make_norm(width, of_sub_layer("input", sub_layer))
        # A float64 scalar divides a float32 tensor as a float32 number, and a float64 tensor without loss.
        self.register_buffer("root", torch.tensor(math.sqrt(2 * layer), dtype=torch.float64))

    def forward(self, streams: StreamPair, sublayer: Branch) -> StreamPair:
        x_BTD, y_BTD = streams
        x_BTD = self.x_norm(x_BTD)
        branch_BTD = sublayer(self.in_norm(x_BTD + self.y_norm(y_BTD)))
        return x_BTD + sublayer.mark_update(branch_BTD / self.root), y_BTD + branch_BTD


class SiameseOutput(nn.Module):
    """N(N(x) + N(y))."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.x_norm = make_norm(width, "final")
        self.y_norm = make_norm(width, "final")
        self.out_norm = make_norm(width, "final")

    def forward(self, streams: StreamPair) -> Tensor:
        x_BTD, y_BTD = streams
        return self.out_norm(self.x_norm(x_BTD) + self.y_norm(y_BTD))


register_placement(Siamese())


def interpolate(first: float, last: float, layer: int, depth: int) -> float:
    """Interpolate linearly from `first` at block 1 to `last` at block L; `first` if L = 1."""
    return first + (last - first) * (layer - 1) / max(depth - 1, 1)


@dataclass(kw_only=True, slots=True)
class X0Lambdas(Placement):
    """x <- r x + z x0 before each block, then pre-norm; x0 is the embeddings after a norm.

    Each block has two learned numbers: r starts at 1.15 in the first block and 1.05 in the last, z at 0.20 and 0.05,
    linear in between. There is a norm on the embeddings and one before the LM head. Other parts of nanochat are left
    out: value embeddings, smearing, the subtraction of a middle layer and the cap on the logits. The matrices follow an
    init rule of GPT-2, while in nanochat the output matrices start at 0. In nanochat z has the learning rate 0.5 and r
    0.005; here both have that of `optim.groups.scalars`.
    """

    title: ClassVar[str] = "x0 lambdas"
    formula: ClassVar[str] = "x = r * x + z * x0; x = x + A(N(x)); x = x + M(N(x))"
    embedding_formula: ClassVar[str] = "x = N(x); x0 = x"
    head_formula: ClassVar[str] = "x = N(x)"
    source: ClassVar[str] = "Karpathy, nanochat (karpathy/nanochat, nanochat/gpt.py at 92d63d4)"
    parameters: ClassVar[str] = "2 * L"
    equals: ClassVar[str] = "pre with placement.embedding_norm=true where r = 1 and z = 0"
    init: ClassVar[str] = "gpt2_scaled"
    init_source: ClassVar[str] = "our choice: that of pre; in nanochat outputs start at zero"
    initial_values: ClassVar[Mapping[str, str]] = {
        "wiring.r": "1.15 - 0.10 * (l - 1) / max(L - 1, 1)",
        "wiring.z": "0.20 - 0.15 * (l - 1) / max(L - 1, 1)",
    }

    name: str = "x0_lambdas"

    @property
    def streams_in_tensors(self) -> tuple[int, ...]:
        return 1, 1

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        return X0Wiring(layer + 1, depth, width, make_norm)

    def embed_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        return X0Input(width, make_norm)

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        return X0Output(width, make_norm)


class X0Wiring(TwoNorms):
    """The wiring of `X0Lambdas`, of block `layer` (counted from 1)."""

    def __init__(self, layer: int, depth: int, width: int, make_norm: MakeNorm):
        super().__init__(width, make_norm)
        self.r = parameter(torch.tensor(interpolate(1.15, 1.05, layer, depth)), role="scalar")
        self.z = parameter(torch.tensor(interpolate(0.20, 0.05, layer, depth)), role="scalar")

    def forward(self, streams: StreamPair, attn: Branch, mlp: Branch) -> StreamPair:
        x_BTD, x0_BTD = streams
        # Once a block, before its attention, as in nanochat; the MLP reads no x0 of its own.
        x_BTD = self.r * x_BTD + self.z * x0_BTD
        x_BTD = x_BTD + attn(self.attn_norm(x_BTD))
        return x_BTD + mlp(self.mlp_norm(x_BTD)), x0_BTD


class X0Input(nn.Module):
    """(N(x), N(x))."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width, "embedding")

    def forward(self, x_BTD: Tensor) -> StreamPair:
        return duplicate_stream(self.norm(x_BTD))


class X0Output(nn.Module):
    """N(x), of the first of two streams."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width, "final")

    def forward(self, streams: StreamPair) -> Tensor:
        return self.norm(streams[0])


register_placement(X0Lambdas())
