"""Dynamic erf: DyT with the error function and a learned shift.

Shapes: `*batch` any leading axes, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from normlab.norms.base import register_norm
from normlab.norms.pointwise import BoundedConfig, Pointwise


@register_norm
@dataclass(kw_only=True, slots=True)
class DerfConfig(BoundedConfig):
    """gain * erf(alpha x + shift) + bias; alpha and shift are learned scalars.

    In the paper's language-model code alpha has another initial value in attention than elsewhere, and the embeddings
    are multiplied by a learned scalar, initially sqrt(D). Neither is part of this norm.
    """

    formula: ClassVar[str] = "erf(alpha * x + shift) * gain + bias"
    source: ClassVar[str] = "Chen et al. 2025, arXiv:2512.10938"
    verified_by: ClassVar[str] = "torch's normal distribution: erf(z) = 2 ndtr(sqrt(2) z) - 1"
    reference_kind: ClassVar[str] = "identity"
    parameters: ClassVar[str] = "2 * D + 2"
    equals: ClassVar[str] = "pointwise with function=erf, shift=true"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "In the public language-model patch norm_type has no annotation and is no dataclass field: the published "
        "command raises a TypeError.",
        "Its slope at 0 is 2 / sqrt(pi) alpha, while that of dyt is alpha.",
    )

    name: str = "derf"
    shift: bool = True
    """Learn a scalar that is added to alpha x, initially 0."""

    def build(self, width: int) -> nn.Module:
        """Return the module for vectors of this width."""
        return Pointwise(width, self, torch.erf)

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """By the distribution function of the normal distribution."""
        inner_D = weights["alpha"] * x_D + weights.get("shift", 0.0)
        return self.reference_affine(2 * torch.special.ndtr(2**0.5 * inner_D) - 1, weights)
