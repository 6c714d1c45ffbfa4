"""Mutants of built modules: a buffer that is all zeros."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from mutants.mutant import Mutant


def buffer_mutants(entry: str, model: nn.Module) -> Iterator[Mutant]:
    """Each buffer of a module's own class zero, as `to_empty` may leave what no checkpoint and no init fills."""
    kinds = {(type(module), name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)}
    for kind, name in sorted(kinds, key=str):
        yield Mutant(entry, f"buffer: {kind.__name__}.{name} is all zeros", partial(_lose, kind, name))


def _lose(kind: type[nn.Module], lost: str) -> None:
    def register(self: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        if name == lost and tensor is not None:
            tensor = torch.zeros_like(tensor)
        nn.Module.register_buffer(self, name, tensor, persistent)

    kind.register_buffer = register
