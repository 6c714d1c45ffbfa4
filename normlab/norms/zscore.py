"""Z-score: a token brought to mean 0 and standard deviation 1.

Shapes: `*batch` any leading axes, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from normlab.norms.affine import Affine, working_dtype
from normlab.norms.base import AffineNormConfig, register_norm
from normlab.options import option


@register_norm
@dataclass(kw_only=True, slots=True)
class ZScoreConfig(AffineNormConfig):
    """(x - mean) / (sigma + eps) over the last axis; the statistician's normalisation, of one token.

    With eps=0 it is the plain formula, which is NaN for a token whose channels are all the same.
    """

    formula: ClassVar[str] = "(x - mean(x)) / (sigma(x) + eps)"
    source: ClassVar[str] = "the textbook's standard score"
    oracle: ClassVar[str] = "numpy's mean and std; layernorm with eps_mode=outside"

    name: str = "zscore"
    eps: float = option(1e-6, at_least=0)
    """Added to sigma, unit of x."""
    sigma: str = option("population", choices=("population", "sample"))
    """Over D, or over D - 1."""
    gain: bool = False
    """Learn a gain per channel."""

    def build(self, width: int) -> nn.Module:
        """The module, for vectors of `width` numbers."""
        return ZScore(width, self)


class ZScore(nn.Module):
    """The module of `ZScoreConfig`. Maps (*batch, D) to the same shape and dtype; rounds once, at the end."""

    def __init__(self, width: int, options: ZScoreConfig):
        super().__init__()
        self.eps = options.eps
        # One channel has no sample deviation: keep the population's (0) rather than divide by nothing.
        self.freedom = max(1, width - 1) if options.sigma == "sample" else width
        self.affine = Affine(width, gain=options.gain, bias=options.bias, unit_offset=options.unit_offset)

    def forward(self, x_D: Tensor) -> Tensor:
        """Normalise the last axis."""
        work_D = x_D.to(working_dtype(x_D.dtype))
        centred_D = work_D - work_D.mean(-1, keepdim=True)
        # vector_norm has the subgradient 0 at a constant token, where the root would give NaN.
        sigma = torch.linalg.vector_norm(centred_D, dim=-1, keepdim=True) * self.freedom**-0.5
        return self.affine(centred_D / (sigma + self.eps)).to(x_D.dtype)
