"""The tensors of stacked runs in one buffer: an operation on all parameters of all runs is one kernel.

Shapes: R runs, N numbers of a run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normlab.config.memory import ALIGNMENT


class _Place(NamedTuple):
    """Where a tensor is in a row of the buffer."""

    name: str
    is_transposed: bool
    start: int
    padding: int
    shape: tuple[int, ...]
    """Without the axis of runs."""
    strides: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Columns of the buffer, padding included."""
        return math.prod(self.shape) + self.padding


class Stack(dict[str, Tensor]):
    """Tensors of R runs by name, shape (R, ...), each a view of one buffer (R, N).

    vmap copies the matrix of an embedding for each forward pass, because its rows of several runs do not follow each
    other in the buffer.

    Args:
        tensors: The values to copy, by name; iteration keeps their order.
        order: The names in the order of the buffer, so that parameters that are updated together are adjacent; by
            default the matrices come first.
        transposed: The matrices whose memory has the order of the transpose. The gradient of a linear layer's weight
            comes in that order from a batched product, so it needs no copy.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], transposed: Collection[str] = (), order: Iterable[str] | None = None
    ) -> None:
        self._places: list[_Place] = []
        if order is None:
            order = sorted(tensors, key=lambda name: tensors[name].dim() < 3)
        start = 0
        for name in order:
            shape, is_transposed = tensors[name].shape[1:], name in transposed
            # A tensor without values tells the strides: of the shape itself, or of a matrix stored column by column.
            if is_transposed:
                strides = tensors[name].new_empty(shape[::-1], device="meta").mT.stride()
            else:
                strides = tensors[name].new_empty(shape, device="meta").stride()
            size = math.prod(shape)
            padding = -size % ALIGNMENT
            self._places.append(_Place(name, is_transposed, start, padding, shape, strides))
            start += size + padding
        first = next(iter(tensors.values()))
        self._zeros = first.new_zeros(len(first), ALIGNMENT, requires_grad=False)
        self._fill(tensors, self._cat(tensors))

    def zeros(self) -> Stack:
        return self._with_buffer(torch.zeros_like(self.buffer))

    def only(self, names: Collection[str]) -> Stack:
        """Return a copy of some of the tensors, in the same order and with the same strides."""
        kept = [place for place in self._places if place.name in names]
        transposed = [place.name for place in kept if place.is_transposed]
        order = [place.name for place in kept]
        return Stack({name: self[name] for name in self if name in names}, transposed, order)

    def empty_on_host(self) -> Stack:
        return self._with_buffer(_empty_on_host(self.buffer))

    def gather(self, tensors: Sequence[Tensor]) -> Stack:
        """Return a stack with the same layout of tensors in the order of iteration, copied by one operation."""
        return self._with_buffer(self._cat(dict(zip(self, tensors, strict=True))))

    @property
    def order(self) -> list[str]:
        """The names in the order of the buffer."""
        return [place.name for place in self._places]

    def columns(self, names: Collection[str]) -> int:
        """Return the number of columns of the named tensors."""
        return sum(place.columns for place in self._places if place.name in names)

    def slice(self, names: Sequence[str]) -> Tensor:
        """Return the columns of the named tensors, which must be adjacent, in their order: a view of the buffer."""
        numbers = {place.name: number for number, place in enumerate(self._places)}
        first = numbers[names[0]]
        assert [numbers[name] for name in names] == [*range(first, first + len(names))]
        start = self._places[first].start
        return self.buffer[:, start : start + self.columns(set(names))]

    def norms(self) -> Tensor:
        """Return the L2 norm of each tensor of each run, in the order of iteration: (P, R) for P tensors."""
        names_of_size: dict[int, list[str]] = {}
        for place in self._places:
            names_of_size.setdefault(place.columns, []).append(place.name)
        # One operation for each size, and not for each tensor: copy the tensors of a size side by side, (R, P, size).
        pieces = dict(zip(self.order, self.buffer.split([place.columns for place in self._places], 1), strict=True))
        sorted_pieces: list[Tensor] = []
        widths: list[int] = []
        for size, names in names_of_size.items():
            sorted_pieces += [pieces[name] for name in names]
            widths.append(size * len(names))
        groups = torch.cat(sorted_pieces, 1).split(widths, 1)
        norms: dict[str, Tensor] = {}
        for group, (size, names) in zip(groups, names_of_size.items(), strict=True):
            # The padding of each tensor is 0, so that it adds nothing to the norm.
            norms_RP = torch.linalg.vector_norm(group.unflatten(1, (-1, size)), dim=-1)
            norms.update(zip(names, norms_RP.unbind(1), strict=True))
        return torch.stack([norms[name] for name in self])

    def _with_buffer(self, buffer: Tensor) -> Stack:
        stack = Stack.__new__(Stack)
        stack._places, stack._zeros = self._places, self._zeros
        stack._fill(self, buffer)
        return stack

    def _fill(self, names: Iterable[str], buffer: Tensor) -> None:
        self.buffer = buffer
        runs, row = buffer.shape
        views: dict[str, Tensor] = {}
        for place in self._places:
            views[place.name] = buffer.as_strided((runs, *place.shape), (row, *place.strides), place.start)
        # The order of the names is that of iteration, which may differ from the order in the buffer.
        for name in names:
            self[name] = views[name]

    def _cat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        pieces: list[Tensor] = []
        for place in self._places:
            tensor = tensors[place.name].detach()
            if place.is_transposed:
                tensor = tensor.mT
            pieces.append(tensor.reshape(len(tensor), -1))
            if place.padding:
                pieces.append(self._zeros[:, : place.padding])
        return torch.cat(pieces, dim=1)


def storages(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the tensors that hold all values: the buffer of a stack, or each tensor of a single run."""
    if isinstance(tensors, Stack):
        return [tensors.buffer]
    return list(tensors.values())


def empty_on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return uninitialised tensors by name in the host's memory, page-locked for a GPU, in a stack if these are."""
    if isinstance(tensors, Stack):
        return tensors.empty_on_host()
    return {name: _empty_on_host(tensor) for name, tensor in tensors.items()}


def _empty_on_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)


def zeros_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros by name, in a stack if the tensors are in one."""
    if isinstance(tensors, Stack):
        return tensors.zeros()
    return {name: torch.zeros_like(tensor, requires_grad=False) for name, tensor in tensors.items()}


@torch.no_grad()
def norms_of_each(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the L2 norm of each tensor, (P,), or of each tensor of each run, (P, R)."""
    if isinstance(tensors, Stack):
        return tensors.norms()
    return torch.stack(torch._foreach_norm(list(tensors.values())))


def stacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b for stacked runs.

    Under vmap, `F.linear` with a bias multiplies it by 1 in both passes, and its result is not in autocast's dtype.
    """
    y = x @ weight.T
    if bias is None:
        return y
    # In the dtype of autocast: the sum with a float32 bias would be float32, with twice the memory.
    return y + bias.to(y.dtype)


class StackedLinear(nn.Linear):
    """A linear layer of stacked runs, under vmap."""

    def forward(self, input: Tensor) -> Tensor:
        return stacked_linear(input, self.weight, self.bias)
