"""Plugin files of the tests of several areas."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from hydra.core.config_store import ConfigStore

from normlab.catalogue.norms.base import NORMS
from normlab.catalogue.placements.algebra import ROWS_BY_NAME
from normlab.catalogue.placements.base import PLACEMENTS
from normlab.catalogue.placements.init_rules import INIT_RULES
from normlab.config.compose import register

NORM = """
from dataclasses import dataclass
from torch import nn
from normlab.catalogue.norms.base import NormConfig, register_norm

@register_norm
@dataclass(kw_only=True, slots=True)
class Mine(NormConfig):
    formula = "tanh(x)"
    name: str = "mine"

    def build(self, width):
        return nn.Tanh()
"""
"""A plugin that registers the norm `mine`."""


@contextlib.contextmanager
def forget_plugins() -> Iterator[None]:
    """Forget at the end what plugins have registered."""
    register()  # the package's own first
    groups: dict[str, Any] = ConfigStore.instance().repo
    registries: list[dict[str, Any]] = [
        NORMS,
        PLACEMENTS,
        ROWS_BY_NAME,
        INIT_RULES,
        groups["norm"],
        groups["placement"],
    ]
    before, modules = [dict(registry) for registry in registries], set(sys.modules)
    yield
    for registry, content in zip(registries, before, strict=True):
        registry.clear()
        registry.update(content)
    for name in set(sys.modules) - modules:
        if name.startswith("normlab_plugin_"):
            del sys.modules[name]
