"""Measures: one number of a run, which the estimators of a study compare over seeds.

A measure is data, not code, so that a study's criterion has a text and a hash. `value` returns NaN if the run lacks the
number, and infinity if the run diverged and the measure counts that as the worst value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from normlab.analysis.intervals import Replicate
from normlab.analysis.results import RunResult
from normlab.errors import ConfigError, NormlabError
from normlab.report.histories import History, history, read_statistics
from normlab.store.series import evaluations


class Measure(Protocol):
    """One number of a run."""

    @property
    def text(self) -> str:
        """What is measured, with its unit; `ln(...)` for a logarithm."""
        ...

    def value(self, run: RunResult) -> float:
        """Return the number; NaN if the run has none."""
        ...


@dataclass(frozen=True, slots=True)
class FinalLoss:
    """The final validation loss; infinite if the run diverged."""

    text = "final validation loss, nats/token"

    def value(self, run: RunResult) -> float:
        """Return the loss in nats/token."""
        return run.loss


FINAL_LOSS = FinalLoss()


@dataclass(frozen=True, slots=True)
class StepsTo:
    """The natural logarithm of the steps until an evaluation has at most a loss; infinite if none has."""

    loss: float

    @property
    def text(self) -> str:
        """The name of the measure."""
        return f"ln(steps to validation loss {self.loss:g})"

    def value(self, run: RunResult) -> float:
        """Return ln(steps), interpolated linearly between the two evaluations around the loss."""
        before = None
        for each in evaluations(run.record.folder):
            if each.loss <= self.loss:
                if before is None or before.loss <= each.loss:
                    return math.log(max(each.step, 1))
                share = (before.loss - self.loss) / (before.loss - each.loss)
                return math.log(max(before.step + share * (each.step - before.step), 1))
            before = each
        return math.inf


@dataclass(frozen=True, slots=True)
class TokenTime:
    """The natural logarithm of the seconds per token in training: the median over the logged intervals of a run."""

    text = "ln(training time per token)"

    def value(self, run: RunResult) -> float:
        """Return ln(seconds), without the first interval, which includes the start; NaN with fewer than three."""
        rows = run.record.folder.rows("pace").rows[1:]
        paces = [row["tokens_per_s"] for row in rows]
        return -math.log(float(np.median(paces))) if len(paces) > 1 else math.nan


@dataclass(frozen=True, slots=True)
class BatchStatisticsLoss:
    """The final loss on the validation windows with the norms in training mode (batch statistics)."""

    text = "final validation loss with batch statistics, nats/token"

    def value(self, run: RunResult) -> float:
        """Return the loss; NaN for a norm that computes the same in both modes, whose record has none."""
        loss = run.record.status.val_loss_batch_statistics
        return loss if loss is not None else run.loss if math.isinf(run.loss) else math.nan


@dataclass(frozen=True, slots=True)
class EvalGap:
    """The validation loss minus that of the same windows with the norms in training mode (batch statistics)."""

    text = "validation loss minus the same with batch statistics, nats/token"

    def value(self, run: RunResult) -> float:
        """Return the gap, also of a run that counts as diverged because its validation loss is too high.

        NaN for a norm that computes the same in both modes.
        """
        loss, in_training = run.record.status.val_loss, BatchStatisticsLoss().value(run)
        return run.loss if loss is None or math.isinf(in_training) else loss - in_training


REDUCTIONS = ("first", "last", "median", "max", "last/first", "growth")


@dataclass(frozen=True, slots=True)
class Statistic:
    """A statistic of a run at one measured step, reduced over layers (and sites) to one number.

    first, last: the first or last block. median, max: over all layers. last/first: their ratio. growth:
    (last / first)^(1 / (L - 1)), the factor per block.
    """

    name: str
    site: str = ""
    over: str = "median"
    at: str = "last"
    """first or last measured step."""
    log: bool = False
    """Whether to take the natural logarithm."""

    def __post_init__(self) -> None:
        """Reject an unknown reduction or step."""
        if self.over not in REDUCTIONS or self.at not in ("first", "last"):
            raise ConfigError(f"Statistic({self.name}): over is one of {', '.join(REDUCTIONS)}, at is first or last")

    @property
    def text(self) -> str:
        """The name of the measure."""
        of = {"first": "first block", "last": "last block", "last/first": "last block over first"}.get(
            self.over, {"growth": "factor per block"}.get(self.over, f"{self.over} over layers")
        )
        name = f"{self.name}{f' of {self.site}' if self.site else ''}, {of}, at the {self.at} measured step"
        return f"ln({name})" if self.log else name

    def value(self, run: RunResult) -> float:
        """Return the reduced statistic; NaN if the run has not measured it."""
        try:
            found = history(read_statistics(run.record.folder, []), self.name)
        except NormlabError:  # the arm's verdict is void
            return math.nan
        chosen = [each for each in found if self.site in ("", each.site) and each.steps]
        reduced = self._reduce(chosen)
        if not self.log:
            return reduced
        return math.log(reduced) if reduced > 0 else math.nan

    def _reduce(self, chosen: list[History]) -> float:
        index = {"first": 0, "last": -1}[self.at]
        values = [
            float(value)
            for each in chosen
            for value in ([each.values[index]] if each.values.ndim == 1 else self._blocks(each, index))
        ]
        if not values:
            return math.nan
        if self.over == "first":
            return values[0]
        if self.over == "last":
            return values[-1]
        if self.over in ("median", "max"):
            return float({"median": np.nanmedian, "max": np.nanmax}[self.over](values))
        ratio = values[-1] / values[0] if values[0] else math.nan
        if self.over == "last/first" or len(values) < 2:
            return ratio
        return ratio ** (1 / (len(values) - 1)) if ratio > 0 else math.nan

    def _blocks(self, each: History, index: int) -> list[float]:
        """Return the values of the blocks, in order; layer 0 is the embeddings, the last layer the head."""
        last = each.values.shape[1] - 1
        inside = [layer for layer in each.layers if 0 < layer < last] or each.layers
        return [float(each.values[index, layer]) for layer in inside]


def values_of(measure: Measure, runs: Sequence[RunResult]) -> dict[Replicate, float]:
    """Return the measure of each run by replicate; NaN for a run that lacks it."""
    return {run.replicate: measure.value(run) for run in runs}
