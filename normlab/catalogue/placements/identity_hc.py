"""Identity hyper-connections: streams whose weights one matrix computes for each token, and which are not mixed.

Shapes: B batch, T time, n streams, D width.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from normlab.base.options import option
from normlab.catalogue.parameters import parameter
from normlab.catalogue.placements.base import MakeNorm, register_placement
from normlab.catalogue.placements.streams import EPS, MixedStreams, Streams, in_full_precision, read, rms_normed
from normlab.catalogue.placements.wiring import Sequential


@dataclass(kw_only=True, slots=True)
class IdentityHC(Streams):
    """x <- x + write(b, F(N(read(a, x)))): n streams, each kept as it is, and a and b of each token.

    a is a sigmoid and b twice a sigmoid of numbers that one matrix computes from a token's streams, all n D numbers
    divided by their root mean square. The streams start as copies of the embeddings, and the head reads a sum of them
    with sigmoids of its own. The factors on what the matrix gives start at `start`, and b on average at 1. What is
    added for a starts at 0, so that a starts at 1 / 2; with `variant=hy4` a starts at 1 / n, as in a mean of the
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
        """The initial values of what is added to the numbers of a token: those for a, for b and for c (`parts`)."""
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


class ComputedWeights(MixedStreams):
    """One sub-layer of `IdentityHC` or `ManifoldHC`, which mixes the streams."""

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
