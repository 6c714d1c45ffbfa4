"""The extended statistics: a pass over a fixed batch, for what is too expensive in every measured step.

The forward pass takes the whole batch, in training mode. The backward pass takes one example at a time, which costs
the same and gives each example's gradient. The pass leaves no gradient and no running statistic behind.

Shapes: B examples, T time, P parameters, K statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normlab.config.schema import AdamW
from normlab.model.runner import SingleRun
from normlab.stats.instrument import Selection, select
from normlab.stats.measure.columns import (
    Measurement,
    check_segments,
    check_statistics,
    parameter_column,
    segment_columns,
)
from normlab.stats.profiles import Column
from normlab.stats.registry import ADAM_STATISTICS, PER_EXAMPLE_STATISTICS

if TYPE_CHECKING:
    from normlab.train.optim import Optimizer

MOST_EXAMPLES = 8
"""Most examples of the fixed batch."""
GRADIENT_STATISTICS = ("radial_cos", *PER_EXAMPLE_STATISTICS)


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

    runner: SingleRun
    names: frozenset[str]
    """The statistics; without those of single examples if the batch does not allow them."""
    tokens_BT: Tensor
    targets_BT: Tensor
    optimizer: Optimizer
    independent: bool = True
    """Whether an example's loss depends on that example alone; false for norms with batch statistics."""
    autocast: Callable[[], AbstractContextManager] = nullcontext
    selection: Selection = field(init=False)
    _eager: SingleRun = field(init=False)

    def __post_init__(self) -> None:
        """Make an uncompiled runner of the model: a pass every two hundred steps does not repay compilation."""
        if not self.independent or len(self.tokens_BT) < 2:
            self.names -= set(PER_EXAMPLE_STATISTICS)
        self.selection = select(self.names)
        self._eager = SingleRun(self.runner.model, compiled=False)

    def __call__(self) -> Measurement:
        """Return the statistics of the model and the optimiser in their current state.

        Raises:
            StatisticsError: A statistic was not measured.
        """
        buffers = self.runner.buffers
        self.runner.train(True)
        try:
            return self._measure()
        finally:
            self.runner.set_buffers(buffers)

    def _measure(self) -> Measurement:
        with torch.no_grad(), self.autocast():
            segments = self._eager.loss(self.tokens_BT, self.targets_BT, self.selection).statistics
        columns = segment_columns(tuple(segment.names for segment in segments))
        check_segments(self.runner.model, self.selection, set(columns))
        values = [segment.values for segment in segments]
        by_column = dict[Column, Tensor]()
        if self.names & set(GRADIENT_STATISTICS):
            by_column |= self._gradient_statistics()
        undefined = set[str]()
        if not isinstance(self.optimizer.options, AdamW) or not self.optimizer.count:  # Adam has made no update yet
            undefined = set(ADAM_STATISTICS)
        elif self.names & set(ADAM_STATISTICS):
            by_column |= self._adam_statistics(self.optimizer.options)
        columns.extend(by_column)
        check_statistics(self.names - undefined, columns)
        if by_column:
            values.append(torch.stack(list(by_column.values())))
        return Measurement(tuple(columns), torch.cat(values))

    def _gradient_statistics(self) -> dict[Column, Tensor]:
        """Return the cosine of each matrix with its gradient, and the noise of the examples' gradients."""
        params = list(self.runner.params.values())
        count = len(self.tokens_BT) if self.independent else 1
        sums: list[Tensor] = []
        squares = torch.zeros(())
        for tokens, targets in zip(self.tokens_BT.chunk(count), self.targets_BT.chunk(count), strict=True):
            with self.autocast():
                loss = self._eager.loss(tokens, targets).loss
            grads = list(torch.autograd.grad(loss / count, params, materialize_grads=True))
            example_squares = torch.stack(torch._foreach_norm(grads)).square()
            if sums:
                torch._foreach_add_(sums, grads)
                squares = squares + example_squares
            else:
                sums, squares = grads, example_squares
        square_of_sum = torch.stack(torch._foreach_norm(sums)).square()
        by_column: dict[Column, Tensor] = {}
        depth = len(self.runner.model.blocks)
        for index, (name, p, g) in enumerate(zip(self.runner.params, params, sums, strict=True)):
            column = parameter_column(name, depth)
            if "radial_cos" in self.names and p.dim() >= 2:
                norms = torch.linalg.vector_norm(p.detach()) * torch.linalg.vector_norm(g)
                by_column[column._replace(statistic="radial_cos")] = (p.detach() * g).sum() / norms
            if self.names & set(PER_EXAMPLE_STATISTICS):
                # These gradients are 1 / B of the examples': mean_b |g_b|^2 = B sum |g_b / B|^2.
                trace, square = gradient_noise(count * squares[index], square_of_sum[index], count)
                for statistic, value in (("gns_trace", trace), ("gns_square", square)):
                    if statistic in self.names:
                        by_column[column._replace(statistic=statistic)] = value
        return by_column

    @torch.no_grad()
    def _adam_statistics(self, options: AdamW) -> dict[Column, Tensor]:
        """Return the size of Adam's update of each matrix, and the share of it that eps determines."""
        by_column: dict[Column, Tensor] = {}
        count, depth = self.optimizer.count, len(self.runner.model.blocks)
        for name, p in self.runner.params.items():
            if p.dim() < 2:
                continue
            mean, square = (self.optimizer.moments[kind][name] for kind in ("mean", "square"))
            root = (square / (1 - options.beta2**count)).sqrt()
            update = mean / (1 - options.beta1**count) / (root + options.eps)
            for statistic, value in (
                ("adam_rms", update.square().mean().sqrt()),
                ("adam_eps_frac", (root < 10 * options.eps).to(root.dtype).mean()),
            ):
                if statistic in self.names:
                    by_column[parameter_column(name, depth)._replace(statistic=statistic)] = value
        return by_column
