"""RMSNorm with one gain for all channels.

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
from normlab.catalogue.norms.base import NormConfig, register_norm
from normlab.catalogue.parameters import parameter


class SSNorm(NormModule):
    def __init__(self, width: int, options: SSNormConfig):
        super().__init__(width, options)
        # The role of a gain, not of a scalar: it stands for the gains of rmsnorm, and has their group of the optimiser.
        self.scale = parameter(torch.ones(()), role="gain")

    def normalise(self, x_D: Tensor) -> Tensor:
        return x_D * torch.rsqrt(x_D.square().mean(-1, keepdim=True) + self.eps) * self.scale.to(x_D.dtype)


@register_norm
@dataclass(kw_only=True, slots=True)
class SSNormConfig(NormConfig):
    """g * x / sqrt(mean(x^2) + eps), with one learned scalar g, initially 1."""

    title: ClassVar[str] = "SSNorm"
    module = SSNorm
    formula: ClassVar[str] = "g * x / sqrt(mean(x^2) + eps)"
    source: ClassVar[str] = "Park et al. 2025, arXiv:2506.19697 (Outlier-Safe Pre-Training), in the form of torchtitan"
    verified_by: ClassVar[str] = "torch.nn.functional.rms_norm, times g"
    reference_kind: ClassVar[str] = "external"
    parameters: ClassVar[str] = "1"
    initial_values: ClassVar[Mapping[str, str]] = {"scale": "1"}
    invariant_to: ClassVar[tuple[str, ...]] = ("scale",)
    equals: ClassVar[str] = "scalenorm at g = sqrt(D) and where x is much larger than eps"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "The same function as scalenorm trains in another way: Adam moves the length of its output sqrt(D) times as "
        "far.",
    )

    name: str = "ssnorm"
    eps: float = option(1e-6, "Added to the mean of squares, unit of x squared.", at_least=0)

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return F.rms_norm(x_D, (x_D.shape[-1],), eps=self.eps) * weights["scale"]
