"""Dynamic tanh: a learned slope and a tanh in a norm's place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

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
    oracle: ClassVar[str] = "torch.tanh; the formula in numpy"

    name: str = "dyt"

    def build(self, width: int) -> nn.Module:
        """The module, for vectors of `width` numbers."""
        return Pointwise(width, self, torch.tanh)
