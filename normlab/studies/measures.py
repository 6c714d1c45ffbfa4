"""Measures: one number of a run, which the estimators of a study compare over seeds.

A measure is data, not code, so that a study's criterion has a text and a hash. `value` returns NaN if the run lacks the
number, and infinity if the run diverged and the measure counts that as the worst value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from normlab.analysis.intervals import Replicate
from normlab.base.errors import ConfigError, NormlabError
from normlab.report.histories import History, history, read_statistics
from normlab.store.record import RunRecord
from normlab.store.series import evaluations


class Measure(Protocol):
    @property
    def text(self) -> str:
        """What is measured, with its unit; `ln(...)` for a logarithm."""
        ...

    def value(self, run: RunRecord) -> float: ...


@dataclass(frozen=True, slots=True)
class FinalLoss:
    """The final loss of a run that has learned; infinite for a run that has not."""

    text = "final validation loss of runs that have learned, nats/token"

    def value(self, run: RunRecord) -> float:
        return run.loss if run.has_learned else math.inf


FINAL_LOSS = FinalLoss()


@dataclass(frozen=True, slots=True)
class StepsTo:
    """The natural logarithm of the steps until an evaluation has at most a loss; infinite if none has.

    The steps are interpolated linearly between the two evaluations around the loss.
    """

    loss: float

    @property
    def text(self) -> str:
        return f"ln(steps to validation loss {self.loss:g})"

    def value(self, run: RunRecord) -> float:
        before = None
        for each in evaluations(run.folder):
            if each.loss <= self.loss:
                share = 1.0
                if before is not None and before.loss > each.loss:
                    share = (before.loss - self.loss) / (before.loss - each.loss)
                start = each.step if before is None else before.step
                return math.log(max(start + share * (each.step - start), 1))
            before = each
        return math.inf


@dataclass(frozen=True, slots=True)
class TokenTime:
    """The natural logarithm of the seconds per token in training: the median over the logged intervals of a run.

    Without the first interval, which includes the start; NaN with fewer than three.
    """

    text = "ln(training time per token)"

    def value(self, run: RunRecord) -> float:
        paces = [row["tokens_per_s"] for row in run.folder.rows("pace").rows[1:]]
        return -math.log(float(np.median(paces))) if len(paces) > 1 else math.nan


@dataclass(frozen=True, slots=True)
class BatchStatisticsLoss:
    """The final loss on the validation windows with the norms in training mode (batch statistics).

    NaN for a norm that computes the same in both modes, whose record has none.
    """

    text = "final validation loss with batch statistics, nats/token"

    def value(self, run: RunRecord) -> float:
        loss = run.status.val_loss_batch_statistics
        return loss if loss is not None else run.loss if math.isinf(run.loss) else math.nan


@dataclass(frozen=True, slots=True)
class EvalGap:
    """The validation loss minus that of the same windows with the norms in training mode (batch statistics).

    Also of a run that counts as diverged because its validation loss is too high. NaN for a norm that computes the same
    in both modes.
    """

    text = "validation loss minus the same with batch statistics, nats/token"

    def value(self, run: RunRecord) -> float:
        loss, in_training = run.status.val_loss, BatchStatisticsLoss().value(run)
        return run.loss if loss is None or math.isinf(in_training) else loss - in_training


REDUCTIONS = {
    "last": "last block",
    "median": "median over layers",
    "max": "max over layers",
    "last/first": "last block over first",
    "growth": "factor per block",
    "exponent": "exponent of its growth with the number of blocks",
}
"""The reductions of a statistic over layers, and how they are named. growth: (last / first)^(1 / (L - 1)). exponent:
the least-squares slope of ln(value) on ln(blocks before it), without the first block, which has none before it."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """A statistic of a run at one measured step, reduced over layers (and sites) to one number.

    NaN if the run has not measured it.
    """

    name: str
    site: str = ""
    over: str = "median"
    at: str = "last"
    log: bool = False

    def __post_init__(self) -> None:
        if self.over not in REDUCTIONS or self.at not in ("first", "last"):
            raise ConfigError(f"Statistic({self.name}): over is one of {', '.join(REDUCTIONS)}, at is first or last")

    @property
    def text(self) -> str:
        site = f" of {self.site}" if self.site else ""
        name = f"{self.name}{site}, {REDUCTIONS[self.over]}, at the {self.at} measured step"
        return f"ln({name})" if self.log else name

    def value(self, run: RunRecord) -> float:
        try:
            found = history(read_statistics(run.folder, [], self.name), self.name)
        except NormlabError:  # the arm's verdict is void
            return math.nan
        index = {"first": 0, "last": -1}[self.at]
        values = [
            float(value)
            for each in found
            if self.site in ("", each.site) and each.steps
            for value in np.atleast_1d(each.values[index])[_blocks(each)]
        ]
        reduced = self._reduce(values) if values else math.nan
        if not self.log:
            return reduced
        return math.log(reduced) if reduced > 0 else math.nan

    def _reduce(self, values: list[float]) -> float:
        if self.over == "last":
            return values[-1]
        if self.over in ("median", "max"):
            return float({"median": np.nanmedian, "max": np.nanmax}[self.over](values))
        if self.over == "exponent":
            slope = np.polyfit(np.log(np.arange(1, len(values))), np.log(values[1:]), 1)[0]
            return float(slope)
        ratio = values[-1] / values[0] if values[0] else math.nan
        if self.over == "last/first" or len(values) < 2:
            return ratio
        return ratio ** (1 / (len(values) - 1)) if ratio > 0 else math.nan


def _blocks(each: History) -> list[int]:
    """Return the layers that are blocks, in order; layer 0 is the embeddings, the last layer the head."""
    if each.values.ndim == 1:
        return [0]
    return [layer for layer in each.layers if 0 < layer < each.values.shape[1] - 1] or each.layers


NON_NEGATIVE = (
    "_rms", "_absmax", "_crest", "_kurt", "_uniform", "_ratio", "_norm", "_sink", "_frac", "_nonfinite", "_share",
)  # fmt: skip
"""Endings of the names of statistics that have no negative values."""


def least_of(measure: Measure) -> float:
    """Return the lowest possible value of a measure, or -inf if none is known."""
    if isinstance(measure, FinalLoss | BatchStatisticsLoss):
        return 0.0
    if isinstance(measure, StepsTo):
        return 0.0  # ln of one step
    if isinstance(measure, Statistic):
        is_signed = measure.log or measure.over == "exponent" or not measure.name.endswith(NON_NEGATIVE)
        return -math.inf if is_signed else 0.0
    return -math.inf


def values_of(measure: Measure, runs: Sequence[RunRecord]) -> dict[Replicate, float]:
    """Return the measure of each run by replicate; NaN for a run that lacks it."""
    return {run.replicate: measure.value(run) for run in runs}
