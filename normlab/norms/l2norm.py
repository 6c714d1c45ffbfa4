"""L2 norm: a token brought to a given length.

Shapes: `*batch` any leading axes, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from normlab.norms.affine import working_dtype
from normlab.norms.base import NormConfig, register_norm
from normlab.options import option


@register_norm
@dataclass(kw_only=True, slots=True)
class L2NormConfig(NormConfig):
    """radius * x / max(|x|, eps), |x| the Euclidean length over the last axis.

    The output's length is the radius, so its rms is radius / sqrt(D): with the default of 1 a pre-norm block
    sees very small numbers. Code that calls an rms norm "L2Norm" means radius = sqrt(D).
    """

    formula: ClassVar[str] = "radius * x / max(|x|, eps)"
    source: ClassVar[str] = "Loshchilov et al. 2024, arXiv:2410.01131 (nGPT), where it normalises the hidden states"
    oracle: ClassVar[str] = "torch.nn.functional.normalize"

    name: str = "l2norm"
    eps: float = option(1e-12, at_least=0)
    """Least length that is divided by, unit of x."""
    radius: float | None = option(1.0, above=0)
    """Length of the output; null for the root of the width."""
    learn_radius: bool = False
    """Learn the radius, one scalar, started there."""

    def build(self, width: int) -> nn.Module:
        """The module, for vectors of `width` numbers."""
        return L2Norm(width, self)


class L2Norm(nn.Module):
    """The module of `L2NormConfig`. Maps (*batch, D) to the same shape and dtype; rounds once, at the end."""

    def __init__(self, width: int, options: L2NormConfig):
        super().__init__()
        self.eps = options.eps
        radius = width**0.5 if options.radius is None else options.radius
        self.radius = nn.Parameter(torch.tensor(radius)) if options.learn_radius else radius

    def forward(self, x_D: Tensor) -> Tensor:
        """Bring each vector to the radius."""
        work_D = x_D.to(working_dtype(x_D.dtype))
        length = torch.linalg.vector_norm(work_D, dim=-1, keepdim=True).clamp(min=self.eps)
        radius = self.radius.to(work_D.dtype) if isinstance(self.radius, Tensor) else self.radius
        return (work_D / length * radius).to(x_D.dtype)
