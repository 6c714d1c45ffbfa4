"""The extended statistics: a pass over a fixed batch, for what is too expensive in every measured step.

The forward pass takes the whole batch, in training mode. The backward pass takes one example at a time, which costs
the same and gives each example's gradient. The pass leaves no gradient and no running statistic behind.

Shapes: B examples, T time, P parameters, K statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normlab.model.gpt import GPT
from normlab.model.runner import SingleRun
from normlab.stats.instrument import select
from normlab.stats.measure.core import (
    Measurement,
    check_segments,
    check_statistics,
    parameter_column,
    segment_columns,
)
from normlab.stats.profiles import Column
from normlab.stats.registry import ADAM_STATISTICS, PER_EXAMPLE_STATISTICS

if TYPE_CHECKING:
    from normlab.training.optim import Optimizer

MOST_EXAMPLES = 8
"""Most examples of the fixed batch."""


def gradient_noise(mean_square: Tensor, square_of_mean: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return unbiased estimates of tr(S) and |G|^2, S the covariance and G the mean of an example's gradient.

    McCandlish et al. 2018, arXiv:1812.06162, appendix A.1, with batches of 1 and of `count` examples.

    Args:
        mean_square: mean_b |g_b|^2.
        square_of_mean: |mean_b g_b|^2.
        count: B >= 2, the number of examples.
    """
    trace = (mean_square - square_of_mean) * count / (count - 1)
    return trace, (count * square_of_mean - mean_square) / (count - 1)


@dataclass(slots=True)
class ExtendedPass:
    """Computes the extended statistics of a single run."""

    model: GPT
    names: frozenset[str]
    """The statistics; without those of single examples if the batch does not allow them."""
    tokens_BT: Tensor
    targets_BT: Tensor
    optimizer: Optimizer
    independent: bool = True
    """Whether an example's loss depends on that example alone; false for norms with batch statistics."""
    autocast: Callable[[], AbstractContextManager] = nullcontext
    _runner: SingleRun = field(init=False)

    def __post_init__(self) -> None:
        """Make an uncompiled runner of the model: a pass every two hundred steps does not repay compilation."""
        if not self.independent or len(self.tokens_BT) < 2:
            self.names -= set(PER_EXAMPLE_STATISTICS)
        self._runner = SingleRun(self.model, compiled=False)

    def __call__(self) -> Measurement:
        """Return the statistics of the model and the optimiser in their current state.

        Raises:
            StatisticsError: A statistic was not measured.
        """
        selection, buffers = select(self.names), self._runner.buffers
        self._runner.train(True)
        try:
            with torch.no_grad(), self.autocast():
                segments = self._runner.loss(self.tokens_BT, self.targets_BT, selection).statistics
            of_parameters = [*self._gradient_statistics(), *self._adam_statistics()]
        finally:
            self._runner.set_buffers(buffers)
        found = segment_columns(tuple(segment.names for segment in segments))
        check_segments(self.model, selection, set(found))
        values = [segment.values for segment in segments]
        selected = {column: value for column, value in of_parameters if column.statistic in self.names}
        found.extend(selected)
        check_statistics(self.names if self._adam() else self.names - set(ADAM_STATISTICS), found)
        if selected:
            values.append(torch.stack(list(selected.values())))
        return Measurement(tuple(found), torch.cat(values))

    def _gradient_statistics(self) -> Iterator[tuple[Column, Tensor]]:
        """Yield the cosine of each matrix with its gradient, and the noise of the examples' gradients."""
        if not self.names & {"radial_cos", *PER_EXAMPLE_STATISTICS}:
            return
        params = list(self._runner.params.values())
        count = len(self.tokens_BT) if self.independent else 1
        sums: list[Tensor] = []
        squares = torch.zeros(())
        for tokens, targets in zip(self.tokens_BT.chunk(count), self.targets_BT.chunk(count), strict=True):
            with self.autocast():
                loss = self._runner.loss(tokens, targets).loss
            grads = list(torch.autograd.grad(loss / count, params, materialize_grads=True))
            example_squares = torch.stack(torch._foreach_norm(grads)).square()
            if sums:
                torch._foreach_add_(sums, grads)
                squares = squares + example_squares
            else:
                sums, squares = grads, example_squares
        square_of_sum = torch.stack(torch._foreach_norm(sums)).square()
        depth = len(self.model.blocks)
        for index, (name, p, g) in enumerate(zip(self._runner.params, params, sums, strict=True)):
            if p.dim() >= 2:
                norms = torch.linalg.vector_norm(p.detach()) * torch.linalg.vector_norm(g)
                yield parameter_column(name, depth, "radial_cos"), (p.detach() * g).sum() / norms
            if count > 1:
                # These gradients are 1 / B of the examples': mean_b |g_b|^2 = B sum |g_b / B|^2.
                trace, square = gradient_noise(count * squares[index], square_of_sum[index], count)
                yield parameter_column(name, depth, "gns_trace"), trace
                yield parameter_column(name, depth, "gns_square"), square

    def _adam(self) -> tuple[float, float, float] | None:
        """Return beta1, beta2 and eps if the optimiser has the form of Adam and has made an update."""
        return self.optimizer.options.adam_constants if self.optimizer.count else None

    def _adam_statistics(self) -> Iterator[tuple[Column, Tensor]]:
        """Yield the size of Adam's update of each matrix, and the share of it that eps determines."""
        constants, count, depth = self._adam(), self.optimizer.count, len(self.model.blocks)
        if constants is None or not self.names & set(ADAM_STATISTICS):
            return
        beta1, beta2, eps = constants
        for name, p in self._runner.params.items():
            if p.dim() >= 2:
                mean, square = (self.optimizer.moments[kind][name] for kind in ("mean", "square"))
                root = (square / (1 - beta2**count)).sqrt()
                update = mean / (1 - beta1**count) / (root + eps)
                yield parameter_column(name, depth, "adam_rms"), update.square().mean().sqrt()
                yield parameter_column(name, depth, "adam_eps_frac"), (root < 10 * eps).to(root.dtype).mean()
