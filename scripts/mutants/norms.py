"""Mutants of a norm as a whole: a default that is another, and an output that is twice what it should be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from mutants.mutant import Mutant
from normlab.norms.base import NORMS
from normlab.verify.variants import LABELS, others

WIDTH = 16


def norm_mutants(entry: str, name: str) -> Iterator[Mutant]:
    """Those of a norm."""
    options: Any = NORMS[name]()  # pyright: ignore[reportCallIssue]
    for field in dataclasses.fields(options):
        other = next(others(options, field, WIDTH), None) if field.name not in LABELS else None
        if other is not None:
            value = getattr(other, field.name)
            yield Mutant(entry, f"default: {name} has {field.name}={value}", partial(_set, name, field.name, value))
    yield Mutant(entry, f"module: {name} gives twice as much", partial(_double, name))


def _set(name: str, option: str, value: object) -> None:
    NORMS[name].__init__.__kwdefaults__[option] = value


def _double(name: str) -> None:
    kind = NORMS[name]
    build = kind.build

    def doubled(self: Any, width: int) -> nn.Module:
        module = build(self, width)
        module.register_forward_hook(lambda module, given, y_D: 2 * y_D)
        return module

    kind.build = doubled
