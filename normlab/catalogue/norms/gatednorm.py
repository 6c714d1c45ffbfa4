"""GatedNorm: an RMS norm, then a gate per channel computed from its output.

Shapes: `*batch` any leading axes, D width, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.base.options import option
from normlab.catalogue.norms.affine import NormModule, working_dtype
from normlab.catalogue.norms.base import AffineNormConfig, register_norm
from normlab.catalogue.parameters import parameter


class GatedNorm(NormModule):
    def __init__(self, width: int, options: GatedNormConfig):
        super().__init__(width, options)
        self.gate_scale = options.gate_scale
        self.down = parameter(torch.randn(options.rank, width) * options.std, role="matrix")
        self.up = parameter(torch.randn(width, options.rank) * options.std, role="matrix")

    def forward(self, x_D: Tensor) -> Tensor:
        # The gate reads y with its gain and bias, so that only the rounding comes last, and not the affine.
        work_D = x_D.to(working_dtype(x_D.dtype))
        y_D = self.affine(work_D * torch.rsqrt(work_D.square().mean(-1, keepdim=True) + self.eps))
        # Autocast would compute the two products in a narrow dtype.
        with torch.autocast(x_D.device.type, enabled=False):
            hidden_R = F.silu(y_D @ self.down.to(y_D.dtype).mT)
            gate_D = torch.sigmoid(hidden_R @ self.up.to(y_D.dtype).mT)
        return (y_D * gate_D * self.gate_scale).to(x_D.dtype)


@register_norm
@dataclass(kw_only=True, slots=True)
class GatedNormConfig(AffineNormConfig):
    """y = rmsnorm(x) * gain + bias, then y * sigmoid(up silu(down y)), over the last axis.

    down is (R, D), up is (D, R). The paper gives no init for them; here each norm draws its own from N(0, std^2).
    Weight decay applies to them as to all matrices.
    """

    title: ClassVar[str] = "GatedNorm"
    module = GatedNorm
    formula: ClassVar[str] = "y * sigmoid(up silu(down y)), y = x / sqrt(mean(x^2) + eps) * gain"
    source: ClassVar[str] = "Qiu et al. 2026, arXiv:2601.22966, section 3.4"
    verified_by: ClassVar[str] = "torch's rms_norm, then linear, silu and glu"
    reference_kind: ClassVar[str] = "self"
    parameters: ClassVar[str] = "D + 2 * 16 * D"
    initial_values: ClassVar[Mapping[str, str]] = {"down": "std * normal(rank, D)", "up": "std * normal(D, rank)"}
    invariant_to: ClassVar[tuple[str, ...]] = ("scale",)
    equals: ClassVar[str] = "rmsnorm times 1/2, where up = 0"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "With small matrices the gate is initially near 1/2, which halves the output; some public code doubles it.",
        "The gated RMS norm of Qwen and Mamba is another norm: its gate is a second input, not computed from x.",
    )

    name: str = "gatednorm"
    eps: float = option(1e-6, "Added to the mean square, unit of x squared.", at_least=0)
    rank: int = option(16, "Rows of down, R.", at_least=1, at_most=2**17)
    std: float = option(0.02, "Initial standard deviation of both matrices.", above=0)
    gate_scale: float = option(1.0, "Factor on the gate; with 2 a gate of 1/2 has no effect.", above=0)

    def matmul_flops(self, shape: Sequence[int]) -> int:
        """Two products of R * D weights for each vector, 2 FLOPs per weight forward and 4 backward."""
        return 12 * self.rank * math.prod(shape)

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Torch's rms_norm and glu, which is the first half times the sigmoid of the second."""
        y_D = self.reference_affine(F.rms_norm(x_D, x_D.shape[-1:], eps=self.eps), weights)
        gate_D = F.linear(F.silu(F.linear(y_D, weights["down"])), weights["up"])
        return F.glu(torch.cat([self.gate_scale * y_D, gate_D], dim=-1))
