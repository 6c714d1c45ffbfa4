"""mHC: the streams of `identity_hc`, mixed by a matrix whose rows and columns nearly sum to 1.

Shapes: B batch, T time, n streams, D width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from normlab.base.errors import ConfigError, no_effect
from normlab.base.options import option
from normlab.catalogue.norms.base import NormConfig
from normlab.catalogue.placements.base import register_placement
from normlab.catalogue.placements.identity_hc import IdentityHC
from normlab.catalogue.placements.mixing import MIXINGS, Mixing
from normlab.catalogue.placements.sinkhorn import sinkhorn
from normlab.catalogue.placements.streams import EPS, Streams, rms_normed

ITERATIONS = 20
"""The default number of Sinkhorn's iterations."""


@dataclass(kw_only=True, slots=True)
class ManifoldHC(IdentityHC):
    """x <- mix(c, x) + write(b, F(N(read(a, x)))): `identity_hc` with a c whose rows and columns nearly sum to 1.

    c is made by Sinkhorn's iterations from n^2 more numbers of the same matrix, so that mixing nearly keeps the sum of
    the streams. The matrix is drawn by the init rule: the wider the model, the more the entries of c differ at first.

    With mixing=permutations or kronecker c is made without iterations, and its rows and columns sum to 1 but for
    rounding. At first the identity has the score 0 and every other permutation -8.
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
    start: float | None = option(None, "Initial value of the factors on what the matrix gives; null for 1.")
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
        # Each sub-layer also keeps the matrix [a, c] and a copy of the numbers of c: for Sinkhorn's iterations in
        # another order, for the other ways of mixing after their softmax.
        of_c = self.streams * (self.streams + 1) + self.parts[2]
        return super(ManifoldHC, self).kept_numbers(depth, width) + 2 * of_c

    def kept_with_input(self, width: int) -> int:
        # What the sub-layer reads is a part of the product with [a, c], which also has the mixed streams.
        return self.streams * width


register_placement(ManifoldHC())
