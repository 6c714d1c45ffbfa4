"""L2 norm and ScaleNorm: each token scaled to a given or a learned length.

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


class L2Norm(NormModule):
    def __init__(self, width: int, options: L2NormConfig):
        super().__init__(width, options)
        radius = width**0.5 if options.radius is None else options.radius
        self.radius = parameter(torch.tensor(radius), role="gain") if options.learn_radius else radius

    def normalise(self, x_D: Tensor) -> Tensor:
        # A limit instead of a sum with eps, as in F.normalize and the code of ScaleNorm: no eps in the output's length.
        length = torch.linalg.vector_norm(x_D, dim=-1, keepdim=True).clamp(min=self.eps)
        return x_D / length * self.radius


@register_norm
@dataclass(kw_only=True, slots=True)
class L2NormConfig(NormConfig):
    """radius * x / max(|x|, eps), |x| the Euclidean length over the last axis.

    The rms of the output is radius / sqrt(D): with the default of 1 a pre-norm block reads very small numbers. Code
    that calls an rms norm "L2Norm" means radius = sqrt(D).
    """

    title: ClassVar[str] = "L2 norm"
    module = L2Norm
    formula: ClassVar[str] = "radius * x / max(|x|, eps)"
    source: ClassVar[str] = "Loshchilov et al. 2024, arXiv:2410.01131 (nGPT), where it normalises the hidden states"
    verified_by: ClassVar[str] = "torch.nn.functional.normalize, times the radius"
    reference_kind: ClassVar[str] = "external"
    parameters: ClassVar[str] = "0"
    initial_values: ClassVar[Mapping[str, str]] = {"radius": "radius or sqrt(D)"}
    invariant_to: ClassVar[tuple[str, ...]] = ("scale",)
    equals: ClassVar[str] = "rmsnorm without gain, at radius=null and where x is much larger than eps"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "What Llama 4's qk-norm and Megatron call L2 norm is an rms norm without gain: radius=null here.",
        "x / |x| without eps is NaN at x = 0.",
    )

    name: str = "l2norm"
    eps: float = option(1e-12, "Smallest divisor, unit of x.", at_least=0)
    radius: float | None = option(1.0, "Length of the output; null for sqrt(D).", above=0)
    learn_radius: bool = option(False, "Learn the radius, one scalar, initially the value of `radius`.")

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        radius = x_D.shape[-1] ** 0.5 if self.radius is None else self.radius
        return F.normalize(x_D, dim=-1, eps=self.eps) * weights.get("radius", radius)


@register_norm
@dataclass(kw_only=True, slots=True)
class ScaleNormConfig(L2NormConfig):
    """g * x / max(|x|, eps), with one learned scalar g, initially sqrt(D).

    The paper pairs it with embeddings of unit length (FixNorm) and a small init.
    """

    title: ClassVar[str] = "ScaleNorm"
    formula: ClassVar[str] = "g * x / max(|x|, eps)"
    source: ClassVar[str] = "Nguyen & Salazar 2019, arXiv:1910.05895"
    verified_by: ClassVar[str] = "torch.nn.functional.normalize, times g"
    parameters: ClassVar[str] = "1"
    equals: ClassVar[str] = "l2norm with learn_radius=true, radius=null, eps=1e-5"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "It has one gain for all channels and cannot scale down a single channel, unlike rmsnorm.",
    )

    name: str = "scalenorm"
    eps: float = option(1e-5, "Smallest divisor, unit of x.", at_least=0)
    radius: float | None = option(None, "Initial value of g; null for sqrt(D).", above=0)
    learn_radius: bool = option(True, "Learn g.")
