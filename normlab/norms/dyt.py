"""Dynamic tanh: a learned slope and a tanh in a norm's place.

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

    The paper's language models start alpha lower the wider the model is, higher in attention than elsewhere,
    have no bias, and multiply the embeddings by a learned scalar that starts at sqrt(D). None of that is done
    unasked: alpha is one number for all sites here.
    """

    formula: ClassVar[str] = "tanh(alpha * x) * gain + bias"
    source: ClassVar[str] = "Zhu, Chen, He, LeCun & Liu 2025, arXiv:2503.10622"
    oracle: ClassVar[str] = "torch.sigmoid: tanh(z) = 2 sigmoid(2 z) - 1"
    oracle_kind: ClassVar[str] = "identity"
    parameters: ClassVar[str] = "2 * D + 1"
    equals: ClassVar[str] = "pointwise with function=tanh"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "It is no drop-in: the paper's language models have their own alpha for attention and for the rest, and a "
        "learned scale after the embeddings.",
        "It holds back a large stream by saturating: where |alpha x| is large the gradient is all but 0.",
        "At RMSNorm's learning rate it can diverge: Qiu et al. 2026 (arXiv:2601.22966) took the lowest of four.",
    )

    name: str = "dyt"

    def build(self, width: int) -> nn.Module:
        """The module, for vectors of `width` numbers."""
        return Pointwise(width, self, torch.tanh)

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """By the sigmoid."""
        inner_D = weights["alpha"] * x_D + weights.get("shift", 0.0)
        return self.reference_affine(2 * torch.sigmoid(2 * inner_D) - 1, weights)
