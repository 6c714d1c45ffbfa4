"""Placements of n streams that weights mix: hyper-connections and their descendants.

A sub-layer F reads a weighted sum of the streams, and its output is added to each of them:

    x <- mix(c, x) + write(b, F(N(read(a, x))))

with n numbers a, n numbers b and an n x n matrix c, learned or computed from the streams of each token. A placement
here is a way to make a, b and c (`Placement.weights_formula`).

Shapes: B batch, T time, n streams, D width. A weight that is the same for all tokens lacks the axes B and T.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.base.options import option
from normlab.catalogue.parameters import parameter, zero_matrix
from normlab.catalogue.placements.base import MakeNorm, Placement, register_placement
from normlab.catalogue.placements.wiring import Branch, Sequential
from normlab.catalogue.sites import of_sub_layer

EPS = 1e-6
"""Added to the mean square of the streams of a token or to its root, to `a` of `IdentityHC`, and in `sinkhorn`."""


def in_full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Switch autocast off: the streams are mixed in their own precision, in which other placements add."""
    return torch.autocast(x.device.type, enabled=False)


def read(a: Tensor, x_BTnD: Tensor) -> Tensor:
    """Return sum_i a_i x_i, (B, T, D)."""
    return (a[..., None] * x_BTnD).sum(-2)


def rms_normed(x: Tensor, *, eps_outside: bool = False) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps), or x / (sqrt(mean(x^2)) + eps), over the last axis."""
    square = x.square().mean(-1, keepdim=True)
    return x / (square.sqrt() + EPS) if eps_outside else x * torch.rsqrt(square + EPS)


def sinkhorn(scores: Tensor, iterations: int, *, of_sigmoid: bool = False) -> Tensor:
    """Return a positive matrix whose rows and columns sum to 1, nearly, from scores (..., n, n).

    It starts as the softmax of each row, or as the sigmoid of each number; then its rows, unless the softmax has done
    so, and its columns are divided by their sums, several times.

    Source: Sinkhorn & Knopp 1967; with these eps DeepSeek-V4 of transformers.
    """
    # A copy in which the numbers of neighbouring tokens are neighbours: a CPU is slow at sums over 4 of them.
    scores_nnBT = scores.movedim((-2, -1), (0, 1)).contiguous()
    matrix_nnBT = (torch.sigmoid(scores_nnBT) if of_sigmoid else scores_nnBT.softmax(1)) + EPS
    for number in range(iterations):
        if number or of_sigmoid:
            matrix_nnBT = matrix_nnBT / (matrix_nnBT.sum(1, keepdim=True) + EPS)
        matrix_nnBT = matrix_nnBT / (matrix_nnBT.sum(0) + EPS)
    return matrix_nnBT.movedim((0, 1), (-2, -1))


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
    """The base class of the placements of this file."""

    formula: ClassVar[str] = "x = mix(c, x) + write(b, F(N(read(a, x))))"
    embedding_formula: ClassVar[str] = "x = copies(streams, x)"
    head_formula: ClassVar[str] = "x = N(read(a, x))"

    streams: int = option(4, "Number n of streams.", at_least=1, at_most=64)

    def embed_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        return Copies(self.streams)


@dataclass(kw_only=True, slots=True)
class HyperConnections(Streams):
    """x <- mix(c, x) + write(b, F(N(read(a, x)))): n streams and learned a, b and c.

    The streams start as copies of the embeddings, and the head reads their sum. Initially sub-layer k of the model
    reads stream k mod n, both counted from 0, its output is added to all streams, and c is the identity. With `dynamic`
    the weights depend on the token: a learned number times the tanh of products with each of its normed streams is
    added. The products start at 0 and the learned numbers at 0.01.
    """

    title: ClassVar[str] = "hyper-connections"
    head_weights_formula: ClassVar[str] = "a = ones(streams)"
    source: ClassVar[str] = "Zhu et al. 2024, arXiv:2409.19606 (Hyper-Connections), static and dynamic"
    note: ClassVar[str] = "placement.dynamic=false are the static hyper-connections of the paper"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "At the start the head reads n times what it reads in pre; the norm before the head removes the factor.",
        "The dynamic weights are computed from the streams after LayerNorm in the paper, after RMSNorm in "
        "lucidrains/hyper-connections, and after the run's norm here.",
    )
    init: ClassVar[str] = "gpt2_scaled"
    init_source: ClassVar[str] = "our choice: that of pre; each stream starts as that of pre"

    name: str = "hyper_connections"
    dynamic: bool = option(True, "Whether the weights depend on the token.")

    @property
    def weights_formula(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        if not self.dynamic:
            return "a = mixing[:, 0]; c = mixing[:, 1:]; b = beta"
        return (
            "t = tanh(N(x) @ fn.mT); a = mixing[:, 0] + mixing_scale * t[..., 1]; "
            "c = mixing[:, 1:] + mixing_scale * t[..., 2:]; b = beta + beta_scale * t[..., 0]"
        )

    @property
    def initial_values(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        values = {}
        for number, part in enumerate(("attn", "mlp")):
            stream, row = f"(2 * (l - 1) + {number}) % streams", "[1.0 * (i == j) for j in range(streams)]"
            values[f"wiring.{part}.mixing"] = f"[[1.0 * (i == {stream})] + {row} for i in range(streams)]"
            values[f"wiring.{part}.beta"] = "[1] * streams"
            if self.dynamic:
                values[f"wiring.{part}.fn"] = "[[0] * D] * (streams + 2)"
                values |= {f"wiring.{part}.{name}_scale": "0.01" for name in ("mixing", "beta")}
        return values

    @property
    def parameters(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        n = self.streams
        return f"2 * L * ({n * (n + 2)} + {n + 2} * D + 2)" if self.dynamic else f"2 * L * {n * (n + 2)}"

    def matmul_weights(self, depth: int, width: int) -> int:
        computed = self.streams * (self.streams + 2) if self.dynamic else 0
        return 2 * depth * width * (computed + self.streams * (self.streams + 1))

    def kept_numbers(self, depth: int, width: int) -> int:
        return 2 * self.streams * width * (1 + self.dynamic)

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        attn = HyperSubLayer(self, "attn", 2 * layer, width, make_norm)
        return Sequential(attn, HyperSubLayer(self, "mlp", 2 * layer + 1, width, make_norm))

    def wiring_sites(self, layer: int, depth: int) -> tuple[str, ...]:
        if not self.dynamic:
            return self.block_sites
        return "input_attn", "streams", "input_mlp", "streams"

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        return SumOfStreams(width, make_norm)


class HyperSubLayer(MixedStreams):
    """One sub-layer of `HyperConnections`, number `number` of the model, from 0."""

    def __init__(self, placement: HyperConnections, sub_layer: str, number: int, width: int, make_norm: MakeNorm):
        super().__init__(sub_layer, width, make_norm)
        n = placement.streams
        # With these initial values all streams stay equal, so that the model starts as pre-norm.
        first_n1 = F.one_hot(torch.tensor(number % n), n)[:, None]
        self.mixing = parameter(torch.cat([first_n1, torch.eye(n)], -1), role="scalar")
        """a, then the columns of c."""
        self.beta = parameter(torch.ones(n), role="scalar")
        self.fn: nn.Parameter | None = None
        if placement.dynamic:
            self.stream_norm = make_norm(width, "streams")
            self.fn = zero_matrix(n + 2, width)
            self.mixing_scale = parameter(torch.tensor(0.01), role="scalar")
            self.beta_scale = parameter(torch.tensor(0.01), role="scalar")

    def weights(self, x_BTnD: Tensor) -> tuple[Tensor, Tensor]:
        mixing, beta = self.mixing, self.beta
        if self.fn is not None:
            t_BTnm = torch.tanh(self.stream_norm(x_BTnD) @ self.fn.mT)
            mixing, beta = mixing + self.mixing_scale * t_BTnm[..., 1:], beta + self.beta_scale * t_BTnm[..., 0]
        return mixing, beta


class SumOfStreams(nn.Module):
    """N(sum of the streams)."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width, "final")

    def forward(self, x_BTnD: Tensor) -> Tensor:
        return self.norm(x_BTnD.sum(-2))


register_placement(HyperConnections())


@dataclass(kw_only=True, slots=True)
class IdentityHC(Streams):
    """x <- x + write(b, F(N(read(a, x)))): n streams, each kept as it is, and a and b of each token.

    a is a sigmoid and b twice a sigmoid of numbers that one matrix computes from a token's streams, all n D numbers
    divided by their root mean square. The streams start as copies of the embeddings, and the head reads a sum of them
    with sigmoids of its own. The factors on what the matrix gives start at `start`, the numbers added to it at 0: on
    average a starts at a half, and b at 1. It is the control of `mhc`: what streams give without being mixed.
    """

    title: ClassVar[str] = "identity hyper-connections"
    formula: ClassVar[str] = "x = x + write(b, F(N(read(a, x))))"
    head_weights_formula: ClassVar[str] = (
        "a = sigmoid(close_scale * (rms(x.flatten(-2)) @ close_fn_weight.mT) + close_base) + 1e-6"
    )
    source: ClassVar[str] = "marin-community/marin, experiment 7409: mHC with the identity for c"
    init: ClassVar[str] = "gpt2"
    init_source: ClassVar[str] = "DeepSeek-V4 of transformers: N(0, 0.02) for every matrix"

    name: str = "identity_hc"
    start: float = option(1.0, "Initial value of the factors on what the matrix gives.")

    @property
    def parts(self) -> tuple[int, ...]:
        """How many numbers of a token a sub-layer needs for a, for b, and for c if there is one."""
        return self.streams, self.streams

    @property
    def weights_formula(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (
            "w = rms(x.flatten(-2)) @ fn_weight.mT; "
            "a = sigmoid(scale[0] * w[..., :streams] + base[:streams]) + 1e-6; "
            "b = 2 * sigmoid(scale[1] * w[..., streams:2 * streams] + base[streams:2 * streams])"
        )

    @property
    def initial_values(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        values = {"head.close.base": "[0] * streams", "head.close.scale": "[start]"}
        for part in ("attn", "mlp"):
            values[f"wiring.{part}.base"] = f"[0] * {sum(self.parts)}"
            values[f"wiring.{part}.scale"] = f"[start] * {len(self.parts)}"
        return values

    @property
    def parameters(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"2 * L * {sum(self.parts) + len(self.parts)} + {self.streams + 1}"

    def matmul_weights(self, depth: int, width: int) -> int:
        return self.streams * width * (2 * depth * (sum(self.parts) + 1) + self.streams)

    def kept_numbers(self, depth: int, width: int) -> int:
        return 4 * self.streams * width

    def normed(self, x: Tensor) -> Tensor:
        """Return what the matrix multiplies: the numbers of a token's streams over their root mean square."""
        return rms_normed(x)

    def writing(self, scores_BTn: Tensor) -> Tensor:
        """Return b from the numbers that are computed for it."""
        return 2 * torch.sigmoid(scores_BTn)

    def mixing_matrix(self, scores_BTm: Tensor | None = None) -> Tensor | None:
        """Return c, (B, T, n, n), from the numbers that are computed for it; None for the identity."""
        return None

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        attn, mlp = [ComputedWeights(self, sub_layer, width, make_norm) for sub_layer in ("attn", "mlp")]
        return Sequential(attn, mlp)

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        return WeightedStreams(self, width, make_norm)


@dataclass(kw_only=True, slots=True)
class ManifoldHC(IdentityHC):
    """x <- mix(c, x) + write(b, F(N(read(a, x)))): `identity_hc` with a c whose rows and columns nearly sum to 1.

    c is made by Sinkhorn's iterations from n^2 more numbers of the same matrix, so that mixing nearly keeps the sum of
    the streams. The matrix is drawn by the init rule: the wider the model, the more the entries of c differ at first.
    """

    title: ClassVar[str] = "mHC"
    source: ClassVar[str] = "Xie et al. 2025, arXiv:2512.24880 (mHC), as DeepSeek-V4 in transformers 5.23"
    note: ClassVar[str] = "placement.variant names what other code computes; Megatron-LM also has placement.start=0.01"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "Megatron-LM multiplies by c, not by its transpose, on its branch main (d98e8a6), and did so on dev before its "
        "pull request 4624: variant=untransposed.",
        "transformers 5.8.0, and no later version, has other b and c and multiplies by c: variant=transformers_5_8_0.",
        "In narrow models c starts near 1 / n, not at the identity, so that every sub-layer averages the streams: with "
        "init=gpt2 its entries are 0.1 to 0.4 at width 32. In wide ones they vary more: 0.002 to 0.9 at width 768.",
    )

    name: str = "mhc"
    streams: int = option(4, "Number n of streams.", at_least=2, at_most=64)
    iterations: int = option(20, "Number of Sinkhorn's iterations.", at_least=1, at_most=1000)
    variant: str = option(
        "deepseek_v4", choices=("deepseek_v4", "megatron", "untransposed", "transformers_5_8_0"),
        help="What is called mHC. deepseek_v4: in transformers; megatron: Megatron-LM's branch dev at 023f5cf, which "
        "adds eps to the root mean square of the streams; untransposed: its branch main at d98e8a6, where stream i "
        "receives sum_j c_ij x_j; transformers_5_8_0: so too, and c starts from sigmoids, and b is a sigmoid.",
    )  # fmt: skip

    @property
    def formula(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        formula = Streams.formula
        is_transposed = self.variant in ("untransposed", "transformers_5_8_0")
        return formula.replace("mix(c,", "mix(c.mT,") if is_transposed else formula

    @property
    def parts(self) -> tuple[int, ...]:
        return self.streams, self.streams, self.streams**2

    @property
    def weights_formula(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        formula = super(ManifoldHC, self).weights_formula
        if self.variant == "megatron":
            formula = formula.replace("rms(", "rms_eps_outside(")
        scores = "(scale[2] * w[..., 2 * streams:] + base[2 * streams:]).unflatten(-1, (streams, streams))"
        if self.variant != "transformers_5_8_0":
            return f"{formula}; c = sinkhorn({scores}, iterations)"
        formula = formula.replace("b = 2 * ", "b = 1e-6 + ")
        return f"{formula}; c = sinkhorn({scores}, iterations, of_sigmoid=True)"

    def normed(self, x: Tensor) -> Tensor:
        return rms_normed(x, eps_outside=self.variant == "megatron")

    def writing(self, scores_BTn: Tensor) -> Tensor:
        if self.variant == "transformers_5_8_0":
            return torch.sigmoid(scores_BTn) + EPS
        return super(ManifoldHC, self).writing(scores_BTn)

    def mixing_matrix(self, scores_BTm: Tensor | None = None) -> Tensor:
        assert scores_BTm is not None
        scores_BTnn = scores_BTm.unflatten(-1, (self.streams, self.streams))
        matrix_BTnn = sinkhorn(scores_BTnn, self.iterations, of_sigmoid=self.variant == "transformers_5_8_0")
        # `formula` says so too, so that `verify` compares two statements.
        return matrix_BTnn if self.variant in ("deepseek_v4", "megatron") else matrix_BTnn.mT

    def matmul_weights(self, depth: int, width: int) -> int:
        return super(ManifoldHC, self).matmul_weights(depth, width) + 2 * depth * self.streams**2 * width

    def kept_numbers(self, depth: int, width: int) -> int:
        return super(ManifoldHC, self).kept_numbers(depth, width) + 4 * self.iterations * self.streams**2


class ComputedWeights(MixedStreams):
    """One sub-layer of `IdentityHC` or `ManifoldHC`."""

    init_roles: ClassVar[dict[str, str]] = {"fn.weight": "streams"}

    def __init__(self, placement: IdentityHC, sub_layer: str, width: int, make_norm: MakeNorm):
        super().__init__(sub_layer, width, make_norm)
        self.parts = placement.parts
        self.normed, self.writing, self.mixing_matrix = placement.normed, placement.writing, placement.mixing_matrix
        self.fn = nn.Linear(placement.streams * width, sum(self.parts), bias=False)
        self.base = parameter(torch.zeros(sum(self.parts)), role="scalar")
        self.scale = parameter(torch.full((len(self.parts),), placement.start), role="scalar")

    def weights(self, x_BTnD: Tensor) -> tuple[Tensor, Tensor]:
        numbers_BTm = self.fn(self.normed(x_BTnD.flatten(-2)))
        # One scale for each of a, b and c, spread over their numbers so that one operation computes all of them.
        scale_m = torch.cat([scale.expand(size) for scale, size in zip(self.scale, self.parts, strict=True)])
        a, b, *c = torch.addcmul(self.base, scale_m, numbers_BTm).split(self.parts, -1)
        # a has an eps in all variants, b only in that of transformers 5.8.0 (`writing`).
        a_BTn1 = (torch.sigmoid(a) + EPS)[..., None]
        c_BTnn = self.mixing_matrix(*c)
        # One product reads the input of the sub-layer and mixes the streams.
        reading = a_BTn1 if c_BTnn is None else torch.cat([a_BTn1, c_BTnn], -1)
        return reading, self.writing(b)


class WeightedStreams(nn.Module):
    """N(read(a, x)), a the sigmoids of numbers computed from the streams."""

    init_roles: ClassVar[dict[str, str]] = {"fn.weight": "streams"}

    def __init__(self, placement: IdentityHC, width: int, make_norm: MakeNorm):
        super().__init__()
        self.fn = nn.Linear(placement.streams * width, placement.streams, bias=False)
        self.base = parameter(torch.zeros(placement.streams), role="scalar")
        self.scale = parameter(torch.full((1,), placement.start), role="scalar")
        self.norm = make_norm(width, "final")

    def forward(self, x_BTnD: Tensor) -> Tensor:
        with in_full_precision(x_BTnD):
            a_BTn = torch.sigmoid(self.scale * self.fn(rms_normed(x_BTnD.flatten(-2))) + self.base) + EPS
            read_BTD = read(a_BTn, x_BTnD)
        return self.norm(read_BTD)


register_placement(IdentityHC())
register_placement(ManifoldHC())
