"""Norms without statistics: a bounded function of each number.

Shapes: `*batch` any leading axes, D width.
"""

from __future__ import annotations  # torch's compiler cannot trace the annotations of a nested function

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.base.options import option
from normlab.catalogue.norms.affine import NormModule
from normlab.catalogue.norms.base import AffineNormConfig, register_norm
from normlab.catalogue.parameters import parameter

TensorFunction = Callable[[Tensor], Tensor]


def odd(half: TensorFunction) -> TensorFunction:
    """Return the odd function equal to `half` for x >= 0, with the slope of `half` at 0."""

    def both(x: Tensor) -> Tensor:
        # Both halves are computed, because a branch on data neither compiles nor runs in a pack. They are clamped so
        # that the other half has a finite slope: `where` multiplies it by 0, and 0 * inf is NaN.
        return torch.where(x >= 0, half(x.clamp(min=0)), -half((-x).clamp(min=0)))

    return both


def saturlog(x: Tensor) -> Tensor:
    """log(1 + x) / (1 + log(1 + x)), for x >= 0."""
    log = torch.log1p(x)
    return log / (1 + log)


FUNCTIONS: dict[str, TensorFunction] = {
    "tanh": torch.tanh,
    "erf": torch.erf,
    "arctan": lambda x: torch.atan(x) * (2 / math.pi),
    "isru": lambda x: x * torch.rsqrt(x.square() + 1),
    "relsign": lambda x: x / (1 + torch.sqrt(x.square() + 1)),
    "smoothsign": lambda x: x / (1 + x.abs()),
    # expm1 and log1p keep the digits of a small x, which 1 - exp(-x) and log(1 + x) lose.
    "expsign": odd(lambda x: -torch.expm1(-x)),
    "saturlog": odd(saturlog),
    "cubsign": lambda x: x**3 / (1 + x.abs() ** 3),
    "satursin": lambda x: torch.sin(x.clamp(-math.pi / 2, math.pi / 2)),
    "linear_clip": lambda x: x.clamp(-1, 1),
    "logsign_clip": odd(lambda x: torch.log1p(x).clamp(max=1)),
    "logquad_clip": odd(lambda x: torch.log1p(x.square()).clamp(max=1)),
}
"""Odd functions bounded by 1, by name, from the search in arXiv:2512.10938. Its exproot and power23_clip are left out
because their slope at 0 is infinite, and its smoothsign_clip because it equals smoothsign."""


@dataclass(kw_only=True, slots=True)
class BoundedConfig(AffineNormConfig):
    """Options of gain * f(alpha x + shift) + bias. A subclass chooses f."""

    initial_values: ClassVar[Mapping[str, str]] = {"alpha": "alpha", "shift": "0"}

    alpha: float = option(0.5, "Initial value of the learned scalar alpha.", above=0)
    shift: bool = option(False, "Learn a scalar that is added to alpha x, initially 0.")
    bias: bool = option(True, "Learn a bias per channel, initially 0.")


@register_norm
@dataclass(kw_only=True, slots=True)
class PointwiseConfig(BoundedConfig):
    """gain * f(alpha x + shift) + bias, one number at a time; alpha and shift are learned scalars.

    It does not remove the scale of x: saturation depends on alpha and on the scale of the stream. `linear_clip` is
    HardTanh, the control for the effect of boundedness alone.
    """

    title: ClassVar[str] = "pointwise function"
    formula: ClassVar[str] = "f(alpha * x + shift) * gain + bias"
    source: ClassVar[str] = "Chen et al. 2025, arXiv:2512.10938, and its public code"
    verified_by: ClassVar[str] = (
        "torch's hardtanh and softsign; the others by identities with these, sigmoid, ndtr and elu"
    )
    reference_kind: ClassVar[str] = "identity"
    parameters: ClassVar[str] = "2 * D + 1"
    equals: ClassVar[str] = "dyt with function=tanh; derf with function=erf, shift=true"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "Code that writes f with sign(x) has the slope 0 at x = 0 in autograd, even where f has another slope.",
        "cubsign and logquad_clip are flat at 0: a small stream gets no gradient through them.",
    )

    name: str = "pointwise"
    function: str = option("tanh", "The function f.", choices=tuple(FUNCTIONS))

    def build(self, width: int) -> nn.Module:
        return Pointwise(width, self, FUNCTIONS[self.function])

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the output, with f computed by a different expression of torch."""
        z = weights["alpha"] * x_D + weights.get("shift", 0.0)
        # z = up - down. At 0 `maximum` gives half of the slope to each, so the difference has the full slope.
        up, down = torch.maximum(z, torch.zeros_like(z)), torch.maximum(-z, torch.zeros_like(z))
        match self.function:
            case "tanh":
                y = 2 * torch.sigmoid(2 * z) - 1
            case "erf":
                y = 2 * torch.special.ndtr(math.sqrt(2) * z) - 1
            case "arctan":
                y = torch.atan2(z, torch.ones_like(z)) * 2 / math.pi
            case "isru":
                y = torch.tanh(torch.asinh(z))
            case "relsign":
                y = torch.tanh(torch.asinh(z) / 2)
            case "smoothsign":
                y = F.softsign(z)
            case "expsign":
                y = F.elu(-down) - F.elu(-up)
            case "saturlog":
                y = F.softsign(torch.log1p(up) - torch.log1p(down))
            case "cubsign":
                y = F.softsign(z**3)
            case "satursin":
                y = torch.sin(F.hardtanh(z, -math.pi / 2, math.pi / 2))
            case "linear_clip":
                y = F.hardtanh(z)
            case "logsign_clip":
                y = F.hardtanh(torch.log1p(up) - torch.log1p(down))
            case "logquad_clip":
                y = F.hardtanh(torch.log1p(up**2) - torch.log1p(down**2))
            case name:
                raise NotImplementedError(name)
        return self.reference_affine(y, weights)


@register_norm
@dataclass(kw_only=True, slots=True)
class DyTConfig(BoundedConfig):
    """gain * tanh(alpha x) + bias; alpha is a learned scalar.

    The paper's language models use a smaller initial alpha in wider models and a larger one in attention, have no
    bias, and multiply the embeddings by a learned scalar, initially sqrt(D). None of these is a default here: all
    sites have the same initial alpha.
    """

    title: ClassVar[str] = "DyT"
    formula: ClassVar[str] = "tanh(alpha * x) * gain + bias"
    formulas: ClassVar[Mapping[str, str]] = {"bias=false": "tanh(alpha * x) * gain"}
    source: ClassVar[str] = "Zhu, Chen, He, LeCun & Liu 2025, arXiv:2503.10622"
    verified_by: ClassVar[str] = "torch.sigmoid: tanh(z) = 2 sigmoid(2 z) - 1"
    reference_kind: ClassVar[str] = "identity"
    parameters: ClassVar[str] = "2 * D + 1"
    equals: ClassVar[str] = "pointwise with function=tanh"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "It is not a drop-in replacement: the paper's language models have another initial alpha in attention than "
        "elsewhere, and a learned scale after the embeddings, which `model.embed_scale` is without learning.",
        "It bounds a large stream by saturation: where |alpha x| is large the gradient is almost 0.",
        "At RMSNorm's learning rate it can diverge: Qiu et al. 2026 (arXiv:2601.22966) used the lowest of four.",
    )

    name: str = "dyt"

    def build(self, width: int) -> nn.Module:
        return Pointwise(width, self, torch.tanh)

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        inner_D = weights["alpha"] * x_D + weights.get("shift", 0.0)
        return self.reference_affine(2 * torch.sigmoid(2 * inner_D) - 1, weights)


@register_norm
@dataclass(kw_only=True, slots=True)
class DerfConfig(BoundedConfig):
    """gain * erf(alpha x + shift) + bias; alpha and shift are learned scalars.

    In the paper's language-model code alpha has another initial value in attention than elsewhere, and the embeddings
    are multiplied by a learned scalar, initially sqrt(D). Neither is part of this norm.
    """

    title: ClassVar[str] = "Derf"
    formula: ClassVar[str] = "erf(alpha * x + shift) * gain + bias"
    source: ClassVar[str] = "Chen et al. 2025, arXiv:2512.10938"
    verified_by: ClassVar[str] = "torch's normal distribution: erf(z) = 2 ndtr(sqrt(2) z) - 1"
    reference_kind: ClassVar[str] = "identity"
    parameters: ClassVar[str] = "2 * D + 2"
    equals: ClassVar[str] = "pointwise with function=erf, shift=true"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "In the public language-model patch norm_type has no annotation and is no dataclass field: the published "
        "command raises a TypeError.",
        "Its slope at 0 is 2 / sqrt(pi) alpha, while that of dyt is alpha.",
        "As dyt it passes small embeddings on as small ones: with N(0, 0.02) small models stay at the unigram loss for "
        "hundreds of steps of AdamW, and learn with `model.embed_scale=50` (the study optimizer_gap).",
    )

    name: str = "derf"
    shift: bool = option(True, "Learn a scalar that is added to alpha x, initially 0.")

    def build(self, width: int) -> nn.Module:
        return Pointwise(width, self, torch.erf)

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        inner_D = weights["alpha"] * x_D + weights.get("shift", 0.0)
        return self.reference_affine(2 * torch.special.ndtr(2**0.5 * inner_D) - 1, weights)


class Pointwise(NormModule):
    def __init__(self, width: int, options: BoundedConfig, function: TensorFunction):
        super().__init__(width, options)
        self.function = function
        self.alpha = parameter(torch.tensor(options.alpha), role="scalar")
        self.shift = parameter(torch.zeros(()), role="scalar") if options.shift else None

    def normalise(self, x_D: Tensor) -> Tensor:
        inner_D = x_D * self.alpha.to(x_D.dtype)
        if self.shift is not None:
            inner_D = inner_D + self.shift.to(x_D.dtype)
        return self.function(inner_D)
