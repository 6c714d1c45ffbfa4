"""The tensors of stacked runs in one buffer: an operation on all parameters of all runs is one kernel.

Shapes: R runs, N numbers of a run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

ALIGNMENT = 8
"""Numbers, to a multiple of which each tensor is padded: kernels read up to 16 bytes at once."""


class Stack(dict[str, Tensor]):
    """Tensors of R runs by name, shape (R, ...), each a view of one buffer (R, N).

    Matrices come first in the buffer, so the parameters with weight decay are its first columns.

    Args:
        tensors: The values to copy, by name; iteration keeps their order.
        transposed: The matrices whose memory has the order of the transpose. The gradient of a linear layer's weight
            comes in that order from a batched product, so it needs no copy.
    """

    def __init__(self, tensors: Mapping[str, Tensor], transposed: Collection[str] = ()) -> None:
        self.transposed = frozenset(transposed)
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        first = next(iter(tensors.values()))
        self._padding = first.new_zeros(len(first), ALIGNMENT - 1, requires_grad=False)
        self._fill(torch.cat(self._pieces(tensors), dim=1))

    def zeros(self) -> Stack:
        """Return a stack of zeros with the same layout."""
        return self._with_buffer(torch.zeros_like(self.buffer))

    def gather(self, tensors: Sequence[Tensor]) -> Stack:
        """Return a stack with the same layout of tensors in the order of iteration, copied by one operation."""
        return self._with_buffer(torch.cat(self._pieces(dict(zip(self, tensors, strict=True))), dim=1))

    def columns(self, names: Collection[str]) -> int:
        """Return the number of columns of the named tensors, which must be the first in the buffer."""
        first = self._order()[: len(names)]
        assert set(first) == set(names), f"the tensors of {names} are not the first ones"
        return sum(map(self._width, first))

    def _with_buffer(self, buffer: Tensor) -> Stack:
        stack = Stack.__new__(Stack)
        stack.transposed, stack._shapes, stack._padding = self.transposed, self._shapes, self._padding
        stack._fill(buffer)
        return stack

    def _fill(self, buffer: Tensor) -> None:
        """Take the buffer, and make the views."""
        self.buffer = buffer
        widths = dict(zip(self._order(), buffer.split([*map(self._width, self._order())], dim=1), strict=True))
        for name, shape in self._shapes.items():
            columns = widths[name][:, : math.prod(shape[1:])]
            memory = (shape[0], *shape[:0:-1]) if name in self.transposed else shape
            self[name] = _transpose_if(columns.view(memory), name in self.transposed)

    def _order(self) -> list[str]:
        return sorted(self._shapes, key=lambda name: len(self._shapes[name]) < 3)  # without the axis of runs: < 2

    def _width(self, name: str) -> int:
        return math.ceil(math.prod(self._shapes[name][1:]) / ALIGNMENT) * ALIGNMENT

    def _pieces(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        pieces: list[Tensor] = []
        for name in self._order():
            tensor = _transpose_if(tensors[name].detach(), name in self.transposed)
            pieces.append(tensor.reshape(len(tensor), -1))
            if missing := self._width(name) - pieces[-1].shape[1]:
                pieces.append(self._padding[:, :missing])
        return pieces


def _transpose_if(tensor: Tensor, condition: bool) -> Tensor:
    return tensor.transpose(1, 2) if condition else tensor


def storages(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the tensors that hold all values: the buffer of a stack, or each tensor of a single run."""
    return [tensors.buffer] if isinstance(tensors, Stack) else list(tensors.values())
