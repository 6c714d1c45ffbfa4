"""No norm: the control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from normlab.norms.base import NormConfig, register_norm


@register_norm
@dataclass(kw_only=True, slots=True)
class NoNormConfig(NormConfig):
    """y = x. Whether it trains depends on the init rule: quiet at 0.02, explosive with Xavier at depth 24."""

    formula: ClassVar[str] = "x"
    source: ClassVar[str] = "the control; cf. Zhang, Dauphin & Ma 2019, arXiv:1901.09321 (Fixup)"
    oracle: ClassVar[str] = "the input itself"

    name: str = "none"

    def build(self, width: int) -> nn.Module:
        """The identity; `width` has no effect."""
        return nn.Identity()
