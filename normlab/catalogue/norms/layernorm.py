"""Layer norm: mean and variance over one token's channels.

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
from normlab.catalogue.norms.affine import NormModule, working_dtype
from normlab.catalogue.norms.base import register_norm
from normlab.catalogue.norms.taper import PITFALL, Taper, TaperedNormConfig


class LayerNorm(NormModule):
    def __init__(self, width: int, options: LayerNormConfig):
        super().__init__(width, options)
        self.taper = None if options.taper_steps is None else Taper(width, options)
        self.inside = options.eps_mode == "inside"

    def forward(self, x_D: Tensor) -> Tensor:
        work_D = x_D.to(working_dtype(x_D.dtype))
        width = x_D.shape[-1]
        if self.inside and self.taper is None:
            # One fused kernel computes the formula and the affine; separate operations need seven.
            gain_D, bias_D = self.affine.effective_gain(work_D.dtype), self.affine.bias
            bias_D = bias_D if bias_D is None else bias_D.to(work_D.dtype)
            return F.layer_norm(work_D, (width,), gain_D, bias_D, self.eps).to(x_D.dtype)
        centred_D = work_D - work_D.mean(-1, keepdim=True)
        if self.inside:
            y_D = F.layer_norm(work_D, (width,), eps=self.eps)
        else:
            # The subgradient of vector_norm is 0 at a constant token; sqrt(var(x)) would give 0 * inf = NaN there.
            y_D = centred_D / (torch.linalg.vector_norm(centred_D, dim=-1, keepdim=True) * width**-0.5 + self.eps)
        y_D = self.affine(y_D) if self.taper is None else self.taper(y_D, centred_D, self.affine, y_D.dtype)
        return y_D.to(x_D.dtype)


@register_norm
@dataclass(kw_only=True, slots=True)
class LayerNormConfig(TaperedNormConfig):
    """(x - mean) / sqrt(var + eps) * gain + bias over the last axis, with the biased variance.

    `eps_mode=outside` is the other published form; its gradient at constant x is finite, because the subgradient of the
    root is 0 there.
    """

    title: ClassVar[str] = "LayerNorm"
    module = LayerNorm
    formula: ClassVar[str] = "(x - mean(x)) / sqrt(var(x) + eps) * gain + bias"
    formulas: ClassVar[Mapping[str, str]] = {
        "eps_mode=outside": "(x - mean(x)) / (sqrt(var(x)) + eps) * gain + bias",
        "bias=false": "(x - mean(x)) / sqrt(var(x) + eps) * gain",
        "gain=false, bias=false": "(x - mean(x)) / sqrt(var(x) + eps)",
    }
    source: ClassVar[str] = "Ba, Kiros & Hinton 2016, arXiv:1607.06450, eq. 4"
    verified_by: ClassVar[str] = "torch's group_norm of one group; with eps_mode=outside by algebra; a taper's formula"
    reference_kind: ClassVar[str] = "external"
    parameters: ClassVar[str] = "2 * D"
    invariant_to: ClassVar[tuple[str, ...]] = ("scale", "shift")
    equals: ClassVar[str] = "rmsnorm of x - mean(x), plus the bias; groupnorm with one group"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "eps added to sigma differs from eps added to the variance, unless sigma is much larger than eps.",
        "sigma + eps written with var and sqrt has a NaN gradient where all channels are the same.",
        "The variance divides by D; with D - 1, the default of torch.std, the output is smaller.",
        PITFALL,
    )

    name: str = "layernorm"
    eps: float = option(1e-5, "Added to the variance, unit of x squared, or to sigma, unit of x.", at_least=0)
    eps_mode: str = option(
        "inside", "inside: eps is added to the variance; outside: eps is added to sigma.", choices=("inside", "outside")
    )
    bias: bool = option(True, "Learn a bias per channel, initially 0.")

    @property
    def keeps_normalised(self) -> bool:
        return False  # the fused kernel computes it again

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Torch's group_norm of one group; eps outside: with eps = 0, times sigma / (sigma + eps)."""
        eps = self.eps if self.eps_mode == "inside" else 0.0
        y_D = F.group_norm(x_D.reshape(-1, x_D.shape[-1]), 1, eps=eps).view_as(x_D)
        if self.eps_mode == "outside":
            sigma = x_D.std(-1, correction=0, keepdim=True)
            y_D = y_D * sigma / (sigma + self.eps)
        return self.reference_taper(y_D, x_D - x_D.mean(-1, keepdim=True), weights)
