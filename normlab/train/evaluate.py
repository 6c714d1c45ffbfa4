"""Validation loss over fixed windows.

Shapes: N windows, T time, R runs (absent for a lone run).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from normlab.train.bound import Bound


@dataclass(frozen=True, slots=True)
class Validation:
    """The windows, and how they are run."""

    tokens_NT: Tensor
    targets_NT: Tensor
    batch_size: int
    """Windows at a time: the training step's micro-batch, which batch statistics depend on."""
    autocast: Callable[[], AbstractContextManager]
    batch_statistics: bool
    """Whether the norm computes something else in training: then that loss is measured too."""

    @torch.no_grad()
    def __call__(self, bound: Bound) -> dict[str, list[float]]:
        """`loss` in evaluation mode and, where it differs by nature, `loss_batch_statistics` in training mode.

        Nats per token, of each run. Running statistics are left as they were.
        """
        losses = {"loss": self._mean(bound, training=False)}
        if self.batch_statistics:
            kept = bound.buffers
            losses["loss_batch_statistics"] = self._mean(bound, training=True)
            bound.set_buffers(kept)
        return losses

    def _mean(self, bound: Bound, training: bool) -> list[float]:
        bound.train(training)
        total = torch.zeros(bound.lead, dtype=torch.float64, device=self.tokens_NT.device)
        pairs = zip(self.tokens_NT.split(self.batch_size), self.targets_NT.split(self.batch_size), strict=True)
        for tokens, targets in pairs:
            with self.autocast():
                loss = bound.loss(tokens.expand(*bound.lead, -1, -1), targets.expand(*bound.lead, -1, -1)).loss
            total += loss.double() * len(tokens)
        return (total / len(self.tokens_NT)).view(-1).tolist()
