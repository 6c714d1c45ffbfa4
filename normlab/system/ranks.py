"""The ranks of a run: the processes, one for each device, that train it together.

Each rank takes its rows of every batch. Its loss is its share of the mean loss over the batch, so that all quantities
of the whole batch are sums, means or maxima over ranks. Without a process group there is one rank, and every function
here returns at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
_is_synchronised = True


@dataclass(frozen=True, slots=True)
class Ranks:
    count: int = 1
    rank: int = 0

    @classmethod
    def current(cls) -> Ranks:
        """Return the ranks of the process group that this process has joined; a single one if there is none."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_world_size(), dist.get_rank())
        return cls()

    def sum_(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over ranks, in place. All ranks get the same bits."""
        if self.count > 1:
            dist.all_reduce(tensor)

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the maximum over ranks of each number."""
        if self.count == 1:
            return tensor
        largest = tensor.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest

    @torch.no_grad()
    def merge(self, values: Tensor, maxima: int) -> Tensor:
        """Return the maximum over ranks of the first `maxima` values, and the mean of the others."""
        if self.count == 1:
            return values
        mean = values[maxima:].clone()
        dist.all_reduce(mean)
        return torch.cat([self.largest(values[:maxima]), mean / self.count])

    def any(self, value: bool, device: torch.device | str = "cpu") -> bool:
        if self.count == 1:
            return value
        flag = torch.tensor(int(value), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def broadcast(self, value: T, tensors: Sequence[Tensor] = ()) -> T:
        """Return rank 0's value, and copy rank 0's tensors into those of the other ranks."""
        if self.count == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values)
        for tensor in tensors:
            dist.broadcast(tensor.detach(), 0)
        return values[0]


class SumInBackward:
    """Sums the gradients of one segment over ranks as soon as the backward pass has computed all of them.

    Each gradient moves into one buffer when it is known. The all-reduce of the buffer runs beside the rest of the
    backward pass. `DistributedDataParallel` does the same, but only for `backward`, and the step calls `autograd.grad`.

    Args:
        params: The segment's parameters, by name.
        sums: As for `sum_in_backward`.
    """

    def __init__(self, params: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> None:
        self._params, self._sums = params, sums
        self._missing = dict.fromkeys(params)
        self._buffer: Tensor | None = None
        self._views: dict[str, Tensor] = {}
        self._work: dist.Work | None = None
        self._hooks = [p.register_hook(partial(self._add, name)) for name, p in params.items()]

    @torch.no_grad()
    def _add(self, name: str, gradient: Tensor) -> Tensor:
        """Move a gradient into the buffer, and return its view, which replaces it in the backward pass."""
        # Not earlier: at the start of the backward pass memory is scarce.
        if self._buffer is None:
            sizes = [p.numel() for p in self._params.values()]
            self._buffer = gradient.new_empty(sum(sizes))
            parts = zip(self._params.items(), self._buffer.split(sizes), strict=True)
            self._views = {name: part.view(p.shape) for (name, p), part in parts}
        view = self._views[name]
        if name in self._sums:
            torch.add(self._sums[name], gradient, out=view)
        else:
            view.copy_(gradient)
        del self._missing[name]
        if not self._missing:
            self._work = dist.all_reduce(self._buffer, async_op=True)
        return view

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def wait(self) -> dict[str, Tensor]:
        """Return the sums by name, once the all-reduce has ended. On a GPU the stream waits, and not the host."""
        # The loss does not depend on these parameters, but the all-reduce starts only with all gradients.
        for name in list(self._missing):
            self._add(name, torch.zeros_like(self._params[name]))
        assert self._work is not None
        self._work.wait()
        return self._views


@contextlib.contextmanager
def sum_in_backward(
    segments: Iterable[Mapping[str, Tensor]], sums: Mapping[str, Tensor]
) -> Iterator[list[SumInBackward]]:
    """Sum the gradients of the parameters of each segment over ranks in the backward pass of this context.

    Args:
        segments: The parameters of each segment, by name.
        sums: The sums of the gradients of earlier micro-batches, by name, which are added; may be empty.
    """
    buffers = [SumInBackward(params, sums) for params in segments if params]
    try:
        yield buffers
    finally:
        for buffer in buffers:
            buffer.remove_hooks()


# Statistics of the batch, for norms in training mode.


class _MeanOverRanks(torch.autograd.Function):
    """The mean of a tensor over ranks, whose gradient is the mean of the gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()


def mean_over_ranks(x: Tensor) -> Tensor:
    """Return the mean over ranks of a mean over the tokens of this rank; all ranks have the same number of tokens."""
    return x if ranks_of_statistics() == 1 else _MeanOverRanks.apply(x)  # pyright: ignore[reportReturnType]


def moments_over_ranks(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance over the tokens of all ranks, from those over the tokens of this rank.

    All ranks have the same number of tokens.

    The variance of all tokens is the mean over ranks of the variance within a rank, plus the squared distance of the
    rank's mean from the mean of all. A norm that takes statistics over the batch must call this function.
    """
    if ranks_of_statistics() == 1:
        return mean, var
    all_mean = mean_over_ranks(mean)
    return all_mean, mean_over_ranks(var + (mean - all_mean).square())


def ranks_of_statistics() -> int:
    """Return the number of ranks over which norms take the statistics of a batch."""
    # One rank does not read the switch, or its changes would recompile a batch norm.
    if dist.is_available() and dist.is_initialized() and _is_synchronised:
        return dist.get_world_size()
    return 1


@contextlib.contextmanager
def local_statistics() -> Iterator[None]:
    """Let norms take the statistics of a batch over this rank only, in passes that the ranks do not share."""
    global _is_synchronised
    before, _is_synchronised = _is_synchronised, False
    try:
        yield
    finally:
        _is_synchronised = before
