"""The extended statistics: a pass over a fixed batch, for what is too expensive in every measured step.

The forward pass takes the whole batch, in training mode. The backward pass gives the gradient of each example of each
run, in as many operations for any number of both, unless their memory is limited (`GRADIENT_NUMBERS`). The pass leaves
no gradient and no running statistic behind, and the host does not wait for it.

Shapes: R runs, B examples, T time; `...R` marks an axis that only stacked runs have.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from normlab.catalogue.optimizers.options import OptimConfig
from normlab.catalogue.statistics.profiles import StatisticColumn
from normlab.catalogue.statistics.registry import ADAM_STATISTICS, PER_EXAMPLE_STATISTICS
from normlab.data.batches import send
from normlab.model.instrument import select
from normlab.model.runner import ModelRunner, Replicas
from normlab.model.views import TINY
from normlab.training.measure.core import Measurement, parameter_column
from normlab.training.optim import Optimizer

MOST_EXAMPLES = 8
"""Most examples of the fixed batch."""
GRADIENT_NUMBERS = 2**26
"""Numbers of the gradients and logits of the examples that are computed together, of all runs: 256 MiB in float32. One
example of each run may exceed it."""


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
    runner: ModelRunner
    names: frozenset[str]
    """The statistics; without those of single examples if the batch does not allow them."""
    tokens_BT: Tensor
    targets_BT: Tensor
    optimizer: Optimizer
    options: Sequence[OptimConfig]
    """Those of each run."""
    independent: bool = True
    """Whether an example's loss depends on that example alone; false for norms with batch statistics."""
    autocast: Callable[[], AbstractContextManager] = nullcontext

    def __post_init__(self) -> None:
        """Take an uncompiled runner: a pass every two hundred steps is not worth compiling."""
        if not self.independent or len(self.tokens_BT) < 2:
            self.names -= set(PER_EXAMPLE_STATISTICS)
        self.runner = self.runner.uncompiled()

    def __call__(self, step: int) -> Measurement:
        """Return the statistics of the model and the optimiser after `step` updates."""
        selection, buffers, runs = select(self.names), self.runner.buffers, self.runner.run_shape
        self.runner.train(True)
        try:
            with torch.no_grad(), self.autocast():
                batch = (self.tokens_BT.expand(*runs, -1, -1), self.targets_BT.expand(*runs, -1, -1))
                values = self.runner.loss(*batch, selection).statistics
        finally:
            self.runner.set_buffers(buffers)
        of_parameters = self._gradient_statistics()
        if self.options[0].adam_constants is not None and step > 0:
            of_parameters |= self._adam_statistics()
        # The passes compute some statistics together, of which only one may be selected.
        for column, value in of_parameters.items():
            if column.statistic in self.names:
                values[column] = value
        if not values:
            return Measurement((), torch.zeros(0, device=self.tokens_BT.device))
        return Measurement(tuple(values), torch.stack([*values.values()]))

    def _gradient_statistics(self) -> dict[StatisticColumn, Tensor]:
        if not self.names & {"radial_cos", *PER_EXAMPLE_STATISTICS}:
            return {}
        runs, params, depth = self.runner.run_shape, self.runner.params, len(self.runner.model.blocks)

        # The sum of all examples' gradients of each parameter, and of their squared norms.
        sums: list[Tensor] = []
        squares: list[Tensor] = []
        for tokens_CBT, targets_CBT in self._parts():
            copies = tokens_CBT.shape[0]
            replicas = Replicas(self.runner, copies)
            batch = [x.expand(*runs, *x.shape).flatten(0, len(runs)) for x in (tokens_CBT, targets_CBT)]
            with self.autocast():
                gradients = replicas.gradients(*batch)
            grads = [g.reshape(*runs, copies, -1) for g in gradients]
            squares_of_part = [torch.linalg.vector_norm(g, dim=-1).square().sum(-1) for g in grads]
            sums_of_part = [g.sum(-2) for g in grads]
            del gradients, grads
            if sums:
                torch._foreach_add_(squares, squares_of_part)
                torch._foreach_add_(sums, sums_of_part)
            else:
                squares, sums = squares_of_part, sums_of_part

        # The angle between each matrix and its gradient.
        norms = torch.stack([torch.linalg.vector_norm(g, dim=-1) for g in sums])
        values: dict[StatisticColumn, Tensor] = {}
        for (name, p), g, norm in zip(params.items(), sums, norms, strict=True):
            if p.dim() >= 2 + len(runs):
                w = p.detach().reshape(*runs, -1)
                cosine = torch.linalg.vecdot(w, g) / (torch.linalg.vector_norm(w, dim=-1) * norm).clamp(min=TINY)
                values[parameter_column(name, depth, "radial_cos")] = cosine

        # The noise of the gradient, of each parameter.
        if self.names & set(PER_EXAMPLE_STATISTICS):
            count = len(self.tokens_BT)
            noise = gradient_noise(torch.stack(squares) / count, (norms / count).square(), count)
            for statistic, estimates in zip(("gns_trace", "gns_square"), noise, strict=True):
                for name, estimate in zip(params, estimates, strict=True):
                    values[parameter_column(name, depth, statistic)] = estimate
        return values

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tokens and targets, (C, 1, T), of C examples at once.

        The whole batch is one part, (1, B, T), if an example's loss depends on the others.
        """
        if not self.independent:
            yield self.tokens_BT[None], self.targets_BT[None]
            return
        model, runs = self.runner.model, math.prod(self.runner.run_shape)
        numbers = sum(p.numel() for p in model.parameters()) + self.tokens_BT.shape[1] * len(model.head.weight)
        size = max(1, GRADIENT_NUMBERS // (runs * numbers))
        for tokens_CT, targets_CT in zip(self.tokens_BT.split(size), self.targets_BT.split(size), strict=True):
            yield tokens_CT[:, None], targets_CT[:, None]

    def _adam_statistics(self) -> dict[StatisticColumn, Tensor]:
        if not self.names & set(ADAM_STATISTICS):
            return {}
        lead, depth = len(self.runner.run_shape), len(self.runner.model.blocks)
        values: dict[StatisticColumn, Tensor] = {}
        constants = [of_run.adam_constants or (0.0, 0.0, 0.0) for of_run in self.options]
        numbers = send(torch.tensor(constants, dtype=torch.float64).T, self.tokens_BT.device)
        numbers[:2] = 1 - numbers[:2] ** self.optimizer.count  # not of the steps: some make no update in float16
        for name, p in self.runner.params.items():
            if p.dim() >= 2 + lead:
                # The update of Adam, m^ / (sqrt(v^) + eps), and where eps rules it.
                shape = [-1] * lead + [1] * (p.dim() - lead)
                of_mean, of_square, eps = (x.view(shape).to(p.dtype) for x in numbers)
                mean, square = self.optimizer.moments["mean"][name], self.optimizer.moments["square"][name]
                root = (square / of_square).sqrt()
                update = mean / of_mean / (root + eps)
                rms, share = update.square(), (root < 10 * eps).to(root.dtype)
                values[parameter_column(name, depth, "adam_rms")] = rms.flatten(lead).mean(-1).sqrt()
                # Not defined before the first update, which an overflow in float16 may delay.
                share = share.flatten(lead).mean(-1).where(self.optimizer.count > 0, math.nan)
                values[parameter_column(name, depth, "adam_eps_frac")] = share
        return values
