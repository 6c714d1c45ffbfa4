"""Plugin files of the tests of several areas."""

from __future__ import annotations

NORM = """
from dataclasses import dataclass
from torch import nn
from normlab.norms.base import NormConfig, register_norm

@register_norm
@dataclass(kw_only=True, slots=True)
class Mine(NormConfig):
    name: str = "mine"

    def build(self, width):
        return nn.Tanh()
"""
"""A plugin that registers the norm `mine`."""
