"""The ranks of a run: the processes, one for each device, that train it together.

Each rank takes its rows of every batch. Its loss is its share of the mean loss over the batch, so that all quantities
of the whole batch are sums, means or maxima over ranks. Without a process group there is one rank, and every function
here returns at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

    @torch.no_grad()
    def sum_(self, *tensors: Tensor) -> None:
        """Replace tensors by their sums over ranks, in place, by one all-reduce. All ranks get the same bits."""
        if self.count > 1:
            buffer = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(buffer)
            for tensor, part in zip(tensors, buffer.split([each.numel() for each in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    @torch.no_grad()
    def merge(self, values: Tensor, maxima: int) -> Tensor:
        """Return the maximum over ranks of the first `maxima` values, and the mean of the others."""
        if self.count == 1:
            return values
        largest, mean = values[:maxima].clone(), values[maxima:].clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.all_reduce(mean)
        return torch.cat([largest, mean / self.count])

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


def moments_over_ranks(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance over the tokens of all ranks, from those over the tokens of this rank.

    All ranks have the same number of tokens.

    The variance of all tokens is the mean over ranks of the variance within a rank, plus the squared distance of the
    rank's mean from the mean of all. A norm that takes statistics over the batch must call this function.
    """
    if ranks_of_statistics() == 1:
        return mean, var
    all_mean = _MeanOverRanks.apply(mean)
    return all_mean, _MeanOverRanks.apply(var + (mean - all_mean).square())  # pyright: ignore[reportReturnType]


def ranks_of_statistics() -> int:
    """Return the number of ranks over which norms take the statistics of a batch."""
    # One rank does not read the switch, or its changes would recompile a batch norm.
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() and _is_synchronised else 1


@contextlib.contextmanager
def local_statistics() -> Iterator[None]:
    """Let norms take the statistics of a batch over this rank only, in passes that the ranks do not share."""
    global _is_synchronised
    before, _is_synchronised = _is_synchronised, False
    try:
        yield
    finally:
        _is_synchronised = before
