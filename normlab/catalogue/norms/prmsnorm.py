"""Partial RMS norm: divides all channels by the root mean square of the first K channels.

Shapes: `*batch` any leading axes, D width, K channels in the root mean square.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.base.options import option
from normlab.catalogue.norms.affine import NormModule
from normlab.catalogue.norms.base import AffineNormConfig, register_norm


class PRMSNorm(NormModule):
    def __init__(self, width: int, options: PRMSNormConfig):
        super().__init__(width, options)
        rounded = math.floor if options.count == "floor" else math.ceil
        # Of a narrow vector, such as that of a head, the fraction may be less than one channel.
        self.channels = max(1, rounded(options.fraction * width))

    def normalise(self, x_D: Tensor) -> Tensor:
        # vector_norm, because the gradient of sqrt(mean(x^2)) is NaN where the first channels are 0.
        length = torch.linalg.vector_norm(x_D[..., : self.channels], dim=-1, keepdim=True)
        rms = length * self.channels**-0.5
        return x_D / (rms + self.eps)


@register_norm
@dataclass(kw_only=True, slots=True)
class PRMSNormConfig(AffineNormConfig):
    """x / (rms(x_1 ... x_K) + eps) * gain + bias, K a fraction of the width, at least one channel."""

    title: ClassVar[str] = "pRMSNorm"
    module = PRMSNorm
    formula: ClassVar[str] = "x / (sqrt(mean(x_1^2 ... x_K^2)) + eps) * gain, K = fraction * D"
    source: ClassVar[str] = "Zhang & Sennrich 2019, arXiv:1910.07467 (pRMSNorm), and its public code"
    verified_by: ClassVar[str] = "torch's rms_norm of the first channels, which gives their rms by algebra"
    reference_kind: ClassVar[str] = "identity"
    parameters: ClassVar[str] = "D"
    invariant_to: ClassVar[tuple[str, ...]] = ("scale",)
    equals: ClassVar[str] = "rmsnorm with eps_mode=outside_rms at fraction=1"
    example_options: ClassVar[Mapping[str, Any]] = {"fraction": 0.5}
    pitfalls: ClassVar[tuple[str, ...]] = (
        "Public code rounds K down (the paper's code) or up: at 6.25 % of 100 channels K is 6 or 7.",
        "The first channels are not a random sample: if training makes some of them large, all others shrink.",
    )

    name: str = "prmsnorm"
    eps: float = option(1e-8, "Added to the root mean square, unit of x.", at_least=0)
    fraction: float = option(
        0.0625, "Share of the channels, from the first, in the root mean square.", above=0, at_most=1
    )
    count: str = option("floor", "How to round fraction * D.", choices=("floor", "ceil"))

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """The rms of the first channels is the mean of x * rms_norm(x), with torch's rms_norm."""
        rounded = math.floor if self.count == "floor" else math.ceil
        first = x_D[..., : max(1, rounded(self.fraction * x_D.shape[-1]))]
        rms = (first * F.rms_norm(first, first.shape[-1:], eps=0.0)).mean(-1, keepdim=True)
        return self.reference_affine(x_D / (rms + self.eps), weights)
