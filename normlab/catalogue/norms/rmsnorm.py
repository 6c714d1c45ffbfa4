"""Root-mean-square norm, with five conventions for eps.

Shapes: `*batch` any leading axes, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.base.errors import ConfigError
from normlab.base.options import option
from normlab.catalogue.kernels.rms_norm import has_kernel, rms_norm
from normlab.catalogue.norms.affine import NormModule, working_dtype
from normlab.catalogue.norms.base import register_norm
from normlab.catalogue.norms.taper import PITFALL, Taper, TaperedNormConfig


class RMSNorm(NormModule):
    def __init__(self, width: int, options: RMSNormConfig):
        super().__init__(width, options)
        self.taper = None if options.taper_steps is None else Taper(width, options)
        self.eps_mode = options.eps_mode
        self.upcast = options.compute == "fp32"
        self.cast_first = options.rounding == "cast_then_scale"
        self.is_of_kernel = self.upcast and self.eps_mode == "inside_ms" and not self.cast_first and self.taper is None

    def normalise(self, x_D: Tensor) -> Tensor:
        match self.eps_mode:
            case "inside_ms":
                # With eps inside the root the gradient at x = 0 is 1 / sqrt(eps), without a special case.
                return x_D * torch.rsqrt(x_D.square().mean(-1, keepdim=True) + self.eps)
            case "inside_sum":
                return x_D * torch.rsqrt(x_D.square().sum(-1, keepdim=True) + self.eps)
            case "none":
                return x_D * torch.rsqrt(x_D.square().mean(-1, keepdim=True))
        # The subgradient of vector_norm at x = 0 is 0; sqrt(mean(x^2)) would give 0 * inf = NaN.
        rms = torch.linalg.vector_norm(x_D, dim=-1, keepdim=True) * x_D.shape[-1] ** -0.5
        if self.eps_mode == "outside_rms":
            return x_D / (rms + self.eps)
        return x_D / rms.clamp(min=self.eps)

    def forward(self, x_D: Tensor) -> Tensor:
        dtype = x_D.dtype
        x_D = x_D.to(working_dtype(dtype)) if self.upcast else x_D
        if self.is_of_kernel and has_kernel(x_D):
            # One kernel each way; separate operations need twenty.
            y_D = rms_norm(x_D, self.affine.effective_gain(x_D.dtype), self.eps)
            return self.affine.add_bias(y_D).to(dtype)
        y_D = self.normalise(x_D)
        if self.taper is not None:
            return self.taper(y_D, x_D, self.affine, dtype if self.cast_first else y_D.dtype).to(dtype)
        # Llama and Qwen 3 of transformers round before the gain, and the product with it is a second rounding.
        if self.cast_first:
            y_D = y_D.to(dtype)
        return self.affine(y_D).to(dtype)


@register_norm
@dataclass(kw_only=True, slots=True)
class RMSNormConfig(TaperedNormConfig):
    """x / rms(x) * gain + bias over the last axis, rms(x) = sqrt(mean(x^2)).

    The five forms differ in the place of eps:

    - `inside_ms`: Llama, Qwen, Gemma.
    - `outside_rms`: the paper's own code.
    - `inside_sum`: an L2 norm; the rms of the output is 1/sqrt(D).
    - `clamp`: sqrt(D) times torch.nn.functional.normalize, whose own eps is sqrt(D) times this one.
    - `none`: NaN at x = 0.

    In float32 the gradient at x = 0 is finite for eps >= 2.1e-26 in `inside_ms` and `inside_sum`, where it grows as
    eps^(-3/2), and for eps >= 1e-38 in `outside_rms` and `clamp`, where it is 1 / eps.
    """

    title: ClassVar[str] = "RMSNorm"
    module = RMSNorm
    formula: ClassVar[str] = "x / sqrt(mean(x^2) + eps) * gain"
    formulas: ClassVar[Mapping[str, str]] = {
        "eps_mode=outside_rms": "x / (sqrt(mean(x^2)) + eps) * gain",
        "eps_mode=inside_sum": "x / sqrt(sum(x^2) + eps) * gain",
        "eps_mode=clamp": "x / max(sqrt(mean(x^2)), eps) * gain",
        "eps_mode=none": "x / sqrt(mean(x^2)) * gain",
        "unit_offset=true": "x / sqrt(mean(x^2) + eps) * (1 + gain)",
        "gain=false": "x / sqrt(mean(x^2) + eps)",
        "eps_mode=inside_sum, gain=false": "x / sqrt(sum(x^2) + eps)",
    }
    source: ClassVar[str] = "Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4"
    verified_by: ClassVar[str] = (
        "torch.nn.functional.rms_norm; with outside_rms and clamp torch's normalize, by algebra; a taper's formula"
    )
    reference_kind: ClassVar[str] = "external"
    parameters: ClassVar[str] = "D"
    invariant_to: ClassVar[tuple[str, ...]] = ("scale",)
    equals: ClassVar[str] = "layernorm without its bias, on input whose mean over the channels is 0"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "x / (rms(x) + eps) written with pow, mean and sqrt has a NaN gradient at x = 0.",
        "torch.nn.RMSNorm(eps=None) used 7.8e-3 for bfloat16 until January 2025, and 1.2e-7 since.",
        "With the sum instead of the mean (eps_mode=inside_sum) the rms of the output is 1 / sqrt(D).",
        "Llama rounds before the gain and Gemma after it: in bfloat16 the results differ.",
        PITFALL,
    )

    name: str = "rmsnorm"
    eps: float = option(
        1e-6, "Unit of x squared in inside_ms and inside_sum, of x in outside_rms and clamp.", at_least=0
    )
    eps_mode: str = option(
        "inside_ms", "Place of eps in the formula.", choices=("inside_ms", "outside_rms", "inside_sum", "clamp", "none")
    )
    compute: str = option(
        "fp32", choices=("fp32", "input"),
        help="fp32: upcast a narrower input and compute in float32; input: compute in the input's own dtype.",
    )  # fmt: skip
    rounding: str = option(
        "scale_then_cast", choices=("scale_then_cast", "cast_then_scale"),
        help="Cast back to the input's dtype after the affine (Gemma, OLMo) or before it (Llama, Qwen3 in HF).",
    )  # fmt: skip

    def validate(self) -> None:
        TaperedNormConfig.validate(self)  # zero-argument super() does not work in a dataclass with slots
        if self.rounding == "cast_then_scale" and not (self.gain or self.bias):
            raise ConfigError(
                "norm.rounding=cast_then_scale: has no effect with norm.gain=false and norm.bias=false; "
                "leave one of them out"
            )
        if self.compute == "input" and self.taper_steps is not None:
            raise ConfigError("norm.compute=input: norm.taper_steps is measured and computed in fp32; leave out either")
        if self.rounding == "cast_then_scale" and self.compute == "input":
            raise ConfigError(
                "norm.rounding=cast_then_scale: has no effect with norm.compute=input, which never casts; "
                "leave one of them out"
            )
        if self.eps_mode == "none" and self.eps != 0:
            raise ConfigError(f"norm.eps={self.eps}: has no effect with norm.eps_mode=none; set norm.eps=0")

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Torch's rms_norm; for outside_rms and clamp torch's normalize, which is x / max(|x|, eps)."""
        width = x_D.shape[-1]
        match self.eps_mode:
            case "inside_ms" | "none":
                y_D = F.rms_norm(x_D, (width,), eps=self.eps)
            case "inside_sum":
                y_D = F.rms_norm(x_D, (width,), eps=self.eps / width) / width**0.5
            case "clamp":
                y_D = F.normalize(x_D, dim=-1, eps=self.eps * width**0.5) * width**0.5
            case _:
                rms = torch.linalg.vector_norm(x_D, dim=-1, keepdim=True) / width**0.5
                y_D = F.normalize(x_D, dim=-1, eps=0) * width**0.5 * (rms / (rms + self.eps))
        return self.reference_taper(y_D, x_D, weights)
