"""The mean of the weights over the updates, evaluated beside the weights themselves.

Shapes: R runs; `...R` marks an axis that only stacked runs have.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from normlab.model.stack import Stack, storages, zeros_like


class WeightAverage:
    """A mean of the parameters after each update, in which those of step s count d^(t - s) at step t.

    mean_t = mean_(t-1) + (1 - d) / (1 - d^t) (w_t - mean_(t-1)), so that the initial weights do not count. The moments
    of Adam have this correction too (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1).
    """

    def __init__(self, params: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self.tensors = zeros_like(params)
        """By name, in a stack if the parameters are in one."""
        for mean, values in zip(storages(self.tensors), storages(params), strict=True):
            mean.copy_(values.detach())

    @torch.no_grad()
    def add(self, params: Mapping[str, Tensor], count: Tensor, updated: Tensor) -> None:
        """Add the parameters after update number `count`, shape (), of the runs that were updated, (...R)."""
        means, values = storages(self.tensors), storages(params)
        weight = (1 - self.decay) / (1 - self.decay ** count.double())  # float32 has few digits of 1 - d
        weight = weight.where(updated, 0.0).to(means[0].dtype)
        if isinstance(params, Stack):
            means[0].lerp_(values[0], weight[:, None])
            return
        changes = torch._foreach_sub(values, means)
        torch._foreach_mul_(changes, weight)
        torch._foreach_add_(means, changes)

    @contextmanager
    def in_place_of(self, params: Mapping[str, Tensor]) -> Iterator[None]:
        """Exchange the parameters and their mean while the block runs."""
        self._exchange(params)
        try:
            yield
        finally:
            self._exchange(params)

    @torch.no_grad()
    def _exchange(self, params: Mapping[str, Tensor]) -> None:
        for mean, values in zip(storages(self.tensors), storages(params), strict=True):
            values_before = values.clone()
            values.copy_(mean)
            mean.copy_(values_before)
