"""Mutants of norms and modules: a wrong default, a doubled output, a buffer of zeros."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from mutants.mutant import Mutant
from normlab.catalogue.norms.base import NORMS
from normlab.verify.variants import option_fields, other_values

WIDTH = 16


def norm_mutants(entry: str, name: str) -> Iterator[Mutant]:
    """Yield a mutant for each default of a norm, and one with a doubled output."""
    options: Any = NORMS[name]()  # pyright: ignore[reportCallIssue]
    for field in option_fields(options):
        if (changed := next(other_values(options, field, WIDTH), None)) is not None:
            value = getattr(changed, field.name)
            text = f"default: {name} has {field.name}={value}"
            yield Mutant(entry, text, partial(_set_default, name, field.name, value))
    yield Mutant(entry, f"module: {name} gives twice as much", partial(_double_output, name))


def _set_default(name: str, option: str, value: object) -> None:
    defaults = NORMS[name].__init__.__kwdefaults__
    assert defaults is not None  # the options of a norm are keyword-only
    defaults[option] = value


def _double(module: nn.Module, inputs: tuple[Any, ...], y_D: torch.Tensor) -> torch.Tensor:
    return 2 * y_D


def _double_output(name: str) -> None:
    kind = NORMS[name]
    build = kind.build

    def build_doubled(self: Any, width: int) -> nn.Module:
        module = build(self, width)
        module.register_forward_hook(_double)
        return module

    kind.build = build_doubled


def buffer_mutants(entry: str, model: nn.Module) -> Iterator[Mutant]:
    """Yield a mutant for each buffer of a module's class, set to zero as after `to_empty` without a checkpoint."""
    kinds = {(type(module), name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)}
    for kind, name in sorted(kinds, key=str):
        yield Mutant(entry, f"buffer: {kind.__name__}.{name} is all zeros", partial(_zero_buffer, kind, name))


def _zero_buffer(kind: type[nn.Module], zeroed: str) -> None:
    def register(self: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        if name == zeroed and tensor is not None:
            tensor = torch.zeros_like(tensor)
        nn.Module.register_buffer(self, name, tensor, persistent)

    kind.register_buffer = register
