"""Layer norm: mean and variance over one token's channels.

Shapes: `*batch` any leading axes, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.norms.affine import Affine, working_dtype
from normlab.norms.base import AffineNormConfig, register_norm
from normlab.options import option


@register_norm
@dataclass(kw_only=True, slots=True)
class LayerNormConfig(AffineNormConfig):
    """(x - mean) / sqrt(var + eps) * gain + bias over the last axis, with the biased variance.

    `eps_mode=outside` is the other form in print, (x - mean) / (sigma + eps); its gradient at constant x is
    finite (the root's subgradient there is 0).
    """

    formula: ClassVar[str] = "(x - mean(x)) / sqrt(var(x) + eps) * gain + bias"
    source: ClassVar[str] = "Ba, Kiros & Hinton 2016, arXiv:1607.06450, eq. 4"
    oracle: ClassVar[str] = "torch.nn.LayerNorm; the seed articles' code and formulas"

    name: str = "layernorm"
    eps: float = option(1e-5, at_least=0)
    """Unit of x squared inside the root, of x outside it."""
    eps_mode: str = option("inside", choices=("inside", "outside"))
    """Inside the root, added to the variance; or outside, added to sigma."""
    bias: bool = True
    """Learn a bias per channel, started at 0."""

    def build(self, width: int) -> nn.Module:
        """The module, for vectors of `width` numbers."""
        return LayerNorm(width, self)


class LayerNorm(nn.Module):
    """The module of `LayerNormConfig`. Maps (*batch, D) to the same shape and dtype; rounds once, at the end."""

    def __init__(self, width: int, options: LayerNormConfig):
        super().__init__()
        self.eps = options.eps
        self.inside = options.eps_mode == "inside"
        self.affine = Affine(width, gain=options.gain, bias=options.bias, unit_offset=options.unit_offset)

    def forward(self, x_D: Tensor) -> Tensor:
        """Normalise the last axis."""
        work_D = x_D.to(working_dtype(x_D.dtype))
        width = x_D.shape[-1]
        if self.inside:
            # One fused kernel for what Affine and the formula would do in seven.
            gain_D, bias_D = self.affine.effective_gain(work_D.dtype), self.affine.bias
            bias_D = bias_D if bias_D is None else bias_D.to(work_D.dtype)
            return F.layer_norm(work_D, (width,), gain_D, bias_D, self.eps).to(x_D.dtype)
        centred_D = work_D - work_D.mean(-1, keepdim=True)
        sigma = torch.linalg.vector_norm(centred_D, dim=-1, keepdim=True) * width**-0.5
        return self.affine(centred_D / (sigma + self.eps)).to(x_D.dtype)
