"""Dynamic tanh: tanh with a learned slope in place of a norm.

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
class DyTConfig(BoundedConfig):
    """gain * tanh(alpha x) + bias; alpha is a learned scalar.

    The paper's language models use a smaller initial alpha in wider models and a larger one in attention, have no
    bias, and multiply the embeddings by a learned scalar, initially sqrt(D). None of these is a default here: all
    sites have the same initial alpha.
    """

    formula: ClassVar[str] = "tanh(alpha * x) * gain + bias"
    source: ClassVar[str] = "Zhu, Chen, He, LeCun & Liu 2025, arXiv:2503.10622"
    verified_by: ClassVar[str] = "torch.sigmoid: tanh(z) = 2 sigmoid(2 z) - 1"
    reference_kind: ClassVar[str] = "identity"
    parameters: ClassVar[str] = "2 * D + 1"
    equals: ClassVar[str] = "pointwise with function=tanh"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "It is no drop-in replacement: the paper's language models have another alpha in attention than elsewhere, and "
        "a learned scale after the embeddings.",
        "It bounds a large stream by saturation: where |alpha x| is large the gradient is almost 0.",
        "At RMSNorm's learning rate it can diverge: Qiu et al. 2026 (arXiv:2601.22966) used the lowest of four.",
    )

    name: str = "dyt"

    def build(self, width: int) -> nn.Module:
        """Return the module for vectors of this width."""
        return Pointwise(width, self, torch.tanh)

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """By torch's sigmoid."""
        inner_D = weights["alpha"] * x_D + weights.get("shift", 0.0)
        return self.reference_affine(2 * torch.sigmoid(2 * inner_D) - 1, weights)
