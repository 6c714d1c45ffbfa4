"""Validation loss over fixed windows.

Shapes: N windows, T time, R runs (only for stacked runs).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from normlab.model.runner import ModelRunner
from normlab.system.ranks import Ranks, local_statistics
from normlab.training.average import WeightAverage


@dataclass(frozen=True, slots=True)
class Validation:
    tokens_NT: Tensor
    targets_NT: Tensor
    batch_size: int
    """Windows per batch: the size of a micro-batch in training, because batch statistics depend on it."""
    autocast: Callable[[], AbstractContextManager]
    batch_statistics: bool
    """Whether the norm computes something else in training mode: then that loss is measured too."""
    ranks: Ranks = Ranks()
    """The ranks that share the batches of windows."""

    @torch.no_grad()
    def __call__(self, runner: ModelRunner, average: WeightAverage | None = None) -> dict[str, list[float]]:
        """Return the losses of each run in nats/token; running statistics do not change.

        `loss` is in evaluation mode. `loss_batch_statistics`, in training mode, is there with `batch_statistics`, and
        `loss_ema`, with the average of the weights, where there is one.
        """
        losses = {"loss": self._mean(runner, training=False)}
        if average is not None:
            with average.in_place_of(runner.params):
                losses["loss_ema"] = self._mean(runner, training=False)
        if self.batch_statistics:
            buffers = runner.buffers
            losses["loss_batch_statistics"] = self._mean(runner, training=True)
            runner.set_buffers(buffers)
        return losses

    def _mean(self, runner: ModelRunner, training: bool) -> list[float]:
        runner.train(training)
        total = torch.zeros(runner.run_shape, dtype=torch.float64, device=self.tokens_NT.device)
        pairs = list(zip(self.tokens_NT.split(self.batch_size), self.targets_NT.split(self.batch_size), strict=True))
        # Each rank evaluates whole batches, since batch statistics depend on the size of a batch.
        for tokens, targets in pairs[self.ranks.rank :: self.ranks.count]:
            with self.autocast(), local_statistics():
                stacked_tokens, stacked_targets = (x.expand(*runner.run_shape, -1, -1) for x in (tokens, targets))
                loss = runner.loss(stacked_tokens, stacked_targets).loss
            total += loss.double() * len(tokens)
        self.ranks.sum_(total)
        return (total / len(self.tokens_NT)).view(-1).tolist()
