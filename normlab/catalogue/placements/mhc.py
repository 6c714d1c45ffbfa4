"""Streams whose weights one matrix computes for each token: identity hyper-connections, and mHC, which mixes them.

Shapes: B batch, T time, n streams, D width.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from normlab.base.errors import ConfigError, no_effect
from normlab.base.options import option
from normlab.catalogue.norms.base import NormConfig
from normlab.catalogue.parameters import parameter
from normlab.catalogue.placements.base import MakeNorm, register_placement
from normlab.catalogue.placements.mixing import MIXINGS, Mixing
from normlab.catalogue.placements.sinkhorn import sinkhorn
from normlab.catalogue.placements.streams import EPS, MixedStreams, Streams, in_full_precision, read, rms_normed
from normlab.catalogue.placements.wiring import Sequential

ITERATIONS = 20
"""The default number of Sinkhorn's iterations."""


@dataclass(kw_only=True, slots=True)
class IdentityHC(Streams):
    """x <- x + write(b, F(N(read(a, x)))): n streams, each kept as it is, and a and b of each token.

    a is a sigmoid and b twice a sigmoid of numbers that one matrix computes from a token's streams, all n D numbers
    divided by their root mean square. The streams start as copies of the embeddings, and the head reads a sum of them
    with sigmoids of its own. The factors on what the matrix gives start at `start`, and b on average at 1. The numbers
    added for a start at 0, so that a starts at a half; with `variant=hy4` a starts at 1 / n, as in a mean of the
    streams. It is the control of `mhc`: what streams give without being mixed.
    """

    title: ClassVar[str] = "identity hyper-connections"
    formula: ClassVar[str] = "x = x + write(b, F(N(read(a, x))))"
    source: ClassVar[str] = (
        "marin-community/marin, experiment 7409: mHC with the identity for c; variant=hy4: Hy4-Preview in "
        "huggingface/transformers 5.23.0 and in vllm-project/vllm at 069d344"
    )
    note: ClassVar[str] = "Hy4-Preview calls it iHC: independent in its code, identity in its README"
    init: ClassVar[str] = "gpt2"
    init_source: ClassVar[str] = "DeepSeek-V4 of transformers: N(0, 0.02) for every matrix; Hy4-Preview has N(0, 0.006)"

    name: str = "identity_hc"
    start: float | None = option(
        None, "Initial value of the factors on what the matrix gives; null for 1, and for 0.01 with variant=hy4."
    )
    variant: str = option(
        "marin", choices=("marin", "hy4"), is_later=True,
        help="Which public code. marin: as mhc; hy4: Hy4-Preview, which adds 1e-6 to b as well and 1e-5 to the mean "
        "square of the streams, and where a starts at 1 / n.",
    )  # fmt: skip

    def resolved(self) -> Self:
        """Return this placement with the start of its variant."""
        return replace(self, start=self.initial_scale)

    @property
    def initial_scale(self) -> float:
        """The initial value of the factors on what the matrix gives."""
        if self.start is not None:
            return self.start
        return 0.01 if self.variant == "hy4" else 1.0

    @property
    def initial_base(self) -> float:
        """The initial value of what is added to the numbers for a: sigmoid(-ln(n - 1)) = 1 / n."""
        return -math.log(max(self.streams - 1, 1)) if self.variant == "hy4" else 0.0

    @property
    def initial_bases(self) -> list[float]:
        """The initial values of what is added to the numbers of a token, as in `parts`."""
        return [self.initial_base] * self.streams + [0.0] * self.streams

    @property
    def rms_eps(self) -> float:
        """What is added to the mean square of the streams of a token."""
        return 1e-5 if self.variant == "hy4" else EPS

    @property
    def parts(self) -> tuple[int, ...]:
        """How many numbers of a token a sub-layer needs for a, for b, and for c if there is one."""
        return self.streams, self.streams

    @property
    def rms_formula(self) -> str:
        """The streams of a token over their root mean square."""
        return "rms(x.flatten(-2), eps=1e-5)" if self.variant == "hy4" else "rms(x.flatten(-2))"

    @property
    def weights_formula(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (
            f"w = {self.rms_formula} @ fn_weight.mT; "
            "a = sigmoid(scale[0] * w[..., :streams] + base[:streams]) + 1e-6; "
            f"b = {'1e-6 + ' if self.variant == 'hy4' else ''}"
            "2 * sigmoid(scale[1] * w[..., streams:2 * streams] + base[streams:2 * streams])"
        )

    @property
    def head_weights_formula(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"a = sigmoid(close_scale * ({self.rms_formula} @ close_fn_weight.mT) + close_base) + 1e-6"

    @property
    def initial_values(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        start, base = str(self.initial_scale), "[-ln(max(streams - 1, 1))]" if self.variant == "hy4" else "[0]"
        values = {"head.close.base": f"{base} * streams", "head.close.scale": f"[{start}]"}
        for part in ("attn", "mlp"):
            values[f"wiring.{part}.base"] = f"{base} * streams + [0] * {sum(self.parts[1:])}"
            values[f"wiring.{part}.scale"] = f"[{start}] * {len(self.parts)}"
        return values

    @property
    def parameters(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"2 * L * {sum(self.parts) + len(self.parts)} + {self.streams + 1}"

    def matmul_weights(self, depth: int, width: int) -> int:
        return self.streams * width * (2 * depth * (sum(self.parts) + 1) + self.streams)

    def kept_numbers(self, depth: int, width: int) -> int:
        # Each sub-layer keeps the streams x and x / rms(x), which the matrix multiplies; of the weights, the numbers
        # that the matrix gives, the sigmoids of those for a and b, a and b.
        n = self.streams
        return 2 * (2 * n * width + sum(self.parts) + 4 * n)

    def normed(self, x: Tensor) -> Tensor:
        """Return what the matrix multiplies: the numbers of a token's streams over their root mean square."""
        return rms_normed(x, eps=self.rms_eps)

    def writing(self, scores_BTn: Tensor) -> Tensor:
        """Return b from the numbers that are computed for it."""
        b_BTn = 2 * torch.sigmoid(scores_BTn)
        return b_BTn + EPS if self.variant == "hy4" else b_BTn

    def mixing_matrix(self, scores_BTm: Tensor | None = None) -> Tensor | None:
        """Return c, (B, T, n, n), from the numbers that are computed for it; None for the identity."""
        return None

    def mixing_function(self) -> Callable[..., Tensor | None]:
        """Return the function or the module that makes c."""
        return self.mixing_matrix

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

    With mixing=permutations or kronecker c is made without iterations: its rows and columns sum to 1 but for rounding,
    and it starts near the identity: 0 is added to the numbers of the identity, and -8 to those of the other
    permutations.
    """

    title: ClassVar[str] = "mHC"
    init_source: ClassVar[str] = "DeepSeek-V4 of transformers: N(0, 0.02) for every matrix"
    source: ClassVar[str] = (
        "Xie et al. 2025, arXiv:2512.24880 (mHC), as DeepSeek-V4 in transformers 5.23; mixing=permutations: Yang & Gao "
        "2026, arXiv:2601.05732 (mHC-lite), FFTYYY/mhc-lite at ea19775; mixing=kronecker: Zhou et al. 2026, "
        "arXiv:2601.21579 (KromHC), wz1119/KromHC at 7b15834"
    )
    note: ClassVar[str] = (
        "placement.variant names what other code computes; Megatron-LM, mHC-lite and KromHC also have "
        "placement.start=0.01"
    )
    pitfalls: ClassVar[tuple[str, ...]] = (
        "Megatron-LM multiplies by c, not by its transpose, on its branch main (d98e8a6), and did so on dev before its "
        "pull request 4624: variant=untransposed.",
        "transformers 5.8.0, and no later version, has other b and c and multiplies by c: variant=transformers_5_8_0.",
        "With mixing=sinkhorn, in narrow models c starts near 1 / n, not at the identity, so that every sub-layer "
        "averages the streams: with init=gpt2 its entries are 0.1 to 0.4 at width 32. In wide ones they vary more: "
        "0.002 to 0.9 at width 768.",
        "placement.mixing changes only c. In the authors' code of mHC-lite and KromHC the matrix also starts at 0, and "
        "a and b are larger for one stream at first; the root mean square has a gain, and the head reads the sum of "
        "the streams. MaxText's mHC-lite adds 0 to all numbers at first, so that c starts near 1 / n.",
    )

    name: str = "mhc"
    streams: int = option(4, "Number n of streams.", at_least=2, at_most=64)
    iterations: int = option(ITERATIONS, "Number of Sinkhorn's iterations.", at_least=1, at_most=1000)
    variant: str = option(
        "deepseek_v4", choices=("deepseek_v4", "megatron", "untransposed", "transformers_5_8_0"),
        help="What is called mHC. deepseek_v4: in transformers; megatron: Megatron-LM's branch dev at 023f5cf, which "
        "adds eps to the root mean square of the streams; untransposed: its branch main at d98e8a6, where stream i "
        "receives sum_j c_ij x_j; transformers_5_8_0: so too, and c starts from sigmoids, and b is a sigmoid.",
    )  # fmt: skip
    mixing: str = option(
        "sinkhorn", choices=("sinkhorn", *MIXINGS), is_later=True,
        help="How c is made. sinkhorn: from n^2 numbers of a token, by iterations; permutations: a sum of the n! "
        "permutation matrices, weighted by a softmax (mHC-lite); kronecker: a Kronecker product of log2(n) matrices "
        "[[p, 1 - p], [1 - p, p]], each p of a softmax of two numbers (KromHC).",
    )  # fmt: skip

    @property
    def other_mixing(self) -> Mixing | None:
        """The way to make c, or None for Sinkhorn's iterations."""
        return MIXINGS.get(self.mixing)

    def validate(self) -> None:
        """As the base class; also reject a number of streams, or a variant, that the mixing does not have."""
        super(ManifoldHC, self).validate()
        if self.other_mixing is None:
            return
        self.other_mixing.check_streams(self.streams)
        if self.variant != "deepseek_v4":
            raise ConfigError(
                f"placement.variant={self.variant}: names code in which c is made by Sinkhorn's iterations; leave it "
                "out, or set placement.mixing=sinkhorn"
            )

    def reject_unused_options(self, norm: NormConfig, depth: int) -> None:
        """As the base class; also reject a number of iterations where there are none."""
        super(ManifoldHC, self).reject_unused_options(norm, depth)
        if self.other_mixing is not None and self.iterations != ITERATIONS:
            raise no_effect(f"placement.iterations={self.iterations}", f"placement.mixing={self.mixing}")

    @property
    def formula(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        formula = Streams.formula
        is_transposed = self.variant in ("untransposed", "transformers_5_8_0")
        return formula.replace("mix(c,", "mix(c.mT,") if is_transposed else formula

    @property
    def parts(self) -> tuple[int, ...]:
        mixing = self.other_mixing
        of_c = self.streams**2 if mixing is None else mixing.count_numbers(self.streams)
        return self.streams, self.streams, of_c

    @property
    def initial_bases(self) -> list[float]:
        of_a_and_b, mixing = super(ManifoldHC, self).initial_bases, self.other_mixing
        return of_a_and_b + ([0.0] * self.parts[2] if mixing is None else mixing.initial_numbers(self.streams))

    @property
    def initial_values(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        values = dict(super(ManifoldHC, self).initial_values)
        if self.other_mixing is not None:
            base = f"[0] * {2 * self.streams} + {self.other_mixing.initial_values(self.streams)}"
            values |= {"wiring.attn.base": base, "wiring.mlp.base": base}
        return values

    @property
    def weights_formula(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        formula = super(ManifoldHC, self).weights_formula
        if self.variant == "megatron":
            formula = formula.replace("rms(", "rms_eps_outside(")
        numbers = "scale[2] * w[..., 2 * streams:] + base[2 * streams:]"
        if self.other_mixing is not None:
            return f"{formula}; c = {self.other_mixing.formula(numbers)}"
        scores = f"({numbers}).unflatten(-1, (streams, streams))"
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

    def mixing_function(self) -> Callable[..., Tensor | None]:
        return self.mixing_matrix if self.other_mixing is None else self.other_mixing.function(self.streams)

    def matmul_weights(self, depth: int, width: int) -> int:
        of_mixing = self.streams**2 * width
        if self.other_mixing is not None:
            of_mixing += self.other_mixing.matmul_weights(self.streams)
        return super(ManifoldHC, self).matmul_weights(depth, width) + 2 * depth * of_mixing

    def kept_numbers(self, depth: int, width: int) -> int:
        # Each sub-layer also keeps the matrix [a, c], and once more the numbers of c: Sinkhorn's iterations in another
        # order, other ways of mixing as their softmax.
        of_c = self.streams * (self.streams + 1) + self.parts[2]
        return super(ManifoldHC, self).kept_numbers(depth, width) + 2 * of_c

    def kept_with_input(self, width: int) -> int:
        # One product with [a, c] has what the sub-layer reads and the mixed streams.
        return self.streams * width


class ComputedWeights(MixedStreams):
    """One sub-layer of `IdentityHC` or `ManifoldHC`."""

    init_roles: ClassVar[dict[str, str]] = {"fn.weight": "streams"}

    def __init__(self, placement: IdentityHC, sub_layer: str, width: int, make_norm: MakeNorm):
        super().__init__(sub_layer, width, make_norm)
        self.parts = placement.parts
        self.normed, self.writing = placement.normed, placement.writing
        self.mixing_function = placement.mixing_function()
        self.fn = nn.Linear(placement.streams * width, sum(self.parts), bias=False)
        self.base = parameter(torch.tensor(placement.initial_bases), role="scalar")
        self.scale = parameter(torch.full((len(self.parts),), placement.initial_scale), role="scalar")

    def weights(self, x_BTnD: Tensor) -> tuple[Tensor, Tensor]:
        numbers_BTm = self.fn(self.normed(x_BTnD.flatten(-2)))
        # One scale for each of a, b and c, spread over their numbers so that one operation computes all of them.
        scale_m = torch.cat([scale.expand(size) for scale, size in zip(self.scale, self.parts, strict=True)])
        a, b, *c = torch.addcmul(self.base, scale_m, numbers_BTm).split(self.parts, -1)
        # a has an eps in all variants, b in some (`writing`).
        a_BTn1 = (torch.sigmoid(a) + EPS)[..., None]
        c_BTnn = self.mixing_function(*c)
        # One product reads the input of the sub-layer and mixes the streams.
        reading = a_BTn1 if c_BTnn is None else torch.cat([a_BTn1, c_BTnn], -1)
        return reading, self.writing(b)


class WeightedStreams(nn.Module):
    """N(read(a, x)), a the sigmoids of numbers computed from the streams."""

    init_roles: ClassVar[dict[str, str]] = {"fn.weight": "streams"}

    def __init__(self, placement: IdentityHC, width: int, make_norm: MakeNorm):
        super().__init__()
        self.fn = nn.Linear(placement.streams * width, placement.streams, bias=False)
        self.base = parameter(torch.full((placement.streams,), placement.initial_base), role="scalar")
        self.scale = parameter(torch.full((1,), placement.initial_scale), role="scalar")
        self.eps = placement.rms_eps
        self.norm = make_norm(width, "final")

    def forward(self, x_BTnD: Tensor) -> Tensor:
        with in_full_precision(x_BTnD):
            numbers_BTn = self.fn(rms_normed(x_BTnD.flatten(-2), eps=self.eps))
            a_BTn = torch.sigmoid(self.scale * numbers_BTn + self.base) + EPS
            read_BTD = read(a_BTn, x_BTnD)
        return self.norm(read_BTD)


register_placement(IdentityHC())
register_placement(ManifoldHC())
