"""Dynamic erf: as dyt, with the error function and a learned shift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from normlab.norms.base import register_norm
from normlab.norms.pointwise import BoundedConfig, Pointwise


@register_norm
@dataclass(kw_only=True, slots=True)
class DerfConfig(BoundedConfig):
    """gain * erf(alpha x + shift) + bias; alpha and shift are learned scalars.

    In the paper's language-model code alpha starts apart for attention and the rest, and the embeddings are
    multiplied by a learned scalar that starts at sqrt(D). None of that is done unasked.
    """

    formula: ClassVar[str] = "erf(alpha * x + shift) * gain + bias"
    source: ClassVar[str] = "Chen et al. 2025, arXiv:2512.10938"
    oracle: ClassVar[str] = "torch.erf; the formula in numpy"

    name: str = "derf"
    shift: bool = True
    """Learn a scalar that is added to alpha x, started at 0."""

    def build(self, width: int) -> nn.Module:
        """The module, for vectors of `width` numbers."""
        return Pointwise(width, self, torch.erf)
