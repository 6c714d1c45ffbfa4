"""Z-score: each token scaled to mean 0 and standard deviation 1.

Shapes: `*batch` any leading axes, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.base.options import option
from normlab.catalogue.norms.affine import NormModule
from normlab.catalogue.norms.base import AffineNormConfig, register_norm


class ZScore(NormModule):
    def __init__(self, width: int, options: ZScoreConfig):
        super().__init__(width, options)
        # One channel has no sample deviation; use that of the population (0), which avoids a division by zero.
        self.freedom = max(1, width - 1) if options.sigma == "sample" else width

    def normalise(self, x_D: Tensor) -> Tensor:
        centred_D = x_D - x_D.mean(-1, keepdim=True)
        # The subgradient of vector_norm at a constant token is 0; sqrt(mean(x^2)) would give NaN.
        sigma = torch.linalg.vector_norm(centred_D, dim=-1, keepdim=True) * self.freedom**-0.5
        return centred_D / (sigma + self.eps)


@register_norm
@dataclass(kw_only=True, slots=True)
class ZScoreConfig(AffineNormConfig):
    """(x - mean) / (sigma + eps) over the last axis; the standard score of one token.

    With eps=0 the result is NaN for a token whose channels are all equal.
    """

    title: ClassVar[str] = "z-score"
    module = ZScore
    formula: ClassVar[str] = "(x - mean(x)) / (sigma(x) + eps)"
    formulas: ClassVar[Mapping[str, str]] = {"gain=true, bias=true": "(x - mean(x)) / (sigma(x) + eps) * gain + bias"}
    source: ClassVar[str] = "the textbook's standard score"
    verified_by: ClassVar[str] = "torch's layer_norm at eps = 0, times sigma / (sigma + eps)"
    reference_kind: ClassVar[str] = "identity"
    parameters: ClassVar[str] = "0"
    invariant_to: ClassVar[tuple[str, ...]] = ("scale", "shift")
    equals: ClassVar[str] = "layernorm with eps_mode=outside, eps=1e-6, gain=false, bias=false"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "numpy's std divides by D (sigma=population) and torch's by D - 1 (sigma=sample).",
        "sigma written with var and sqrt has a NaN gradient where all channels are the same.",
    )

    name: str = "zscore"
    eps: float = option(1e-6, "Added to sigma, unit of x.", at_least=0)
    sigma: str = option(
        "population", "population: divide by D; sample: divide by D - 1.", choices=("population", "sample")
    )
    gain: bool = option(False, "Learn a gain per channel.")

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Torch's layer_norm, rescaled from the population sigma to (sigma + eps) of either kind."""
        width = x_D.shape[-1]
        population = x_D.std(-1, correction=0, keepdim=True)
        sigma = x_D.std(-1, keepdim=True) if self.sigma == "sample" and width > 1 else population
        y_D = F.layer_norm(x_D, (width,), eps=0.0) * population / (sigma + self.eps)
        return self.reference_affine(y_D, weights)
