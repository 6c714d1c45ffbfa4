"""Measures: one number of a run, which the estimators of a study compare over seeds.

A measure is data (a frozen dataclass), not a function, so that a study's criterion has a text and a hash.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from normlab.analysis.intervals import Replicate
from normlab.base.errors import ConfigError, NormlabError
from normlab.report.histories import History, history, read_statistics
from normlab.store.record import RunRecord
from normlab.store.series import evaluations


class Measure(ABC):
    """One number of a run. The first paragraph of its docstring is its line in `normlab list estimators`."""

    @property
    @abstractmethod
    def text(self) -> str:
        """What is measured, with its unit; `ln(...)` for a logarithm."""

    @abstractmethod
    def value(self, run: RunRecord) -> float:
        """Return the number of a run.

        NaN if the run lacks it; infinity if the run diverged and the measure counts that as the worst value.
        """


@dataclass(frozen=True, slots=True)
class FinalLoss(Measure):
    """The final loss of a run that has learned; infinite for a run that has not."""

    @property
    def text(self) -> str:
        return "final validation loss of runs that have learned, nats/token"

    def value(self, run: RunRecord) -> float:
        return run.loss if run.has_learned else math.inf


FINAL_LOSS = FinalLoss()


@dataclass(frozen=True, slots=True)
class StepsTo(Measure):
    """The natural logarithm of the steps until an evaluation has at most a loss; infinite if none has.

    The steps are interpolated linearly between the two evaluations around the loss.
    """

    loss: float

    @property
    def text(self) -> str:
        return f"ln(steps to validation loss {self.loss:g})"

    def value(self, run: RunRecord) -> float:
        before = None
        for evaluation in evaluations(run.folder):
            if evaluation.loss <= self.loss:
                # The loss before is above the target, or NaN, between which and the target no line can be drawn.
                share = 1.0
                if before is not None and before.loss > evaluation.loss:
                    share = (before.loss - self.loss) / (before.loss - evaluation.loss)
                start = evaluation.step if before is None else before.step
                return math.log(max(start + share * (evaluation.step - start), 1))
            before = evaluation
        return math.inf


@dataclass(frozen=True, slots=True)
class TokenTime(Measure):
    """The natural logarithm of the seconds per token in training: the median over the logged intervals of a run.

    Without the first interval, which includes the start; NaN with fewer than three.
    """

    @property
    def text(self) -> str:
        return "ln(training time per token)"

    def value(self, run: RunRecord) -> float:
        paces = [row["tokens_per_s"] for row in run.folder.rows("pace").rows[1:]]
        if len(paces) < 2:
            return math.nan
        return -math.log(float(np.median(paces)))


@dataclass(frozen=True, slots=True)
class BatchStatisticsLoss(Measure):
    """The final loss on the validation windows with the norms in training mode (batch statistics).

    NaN for a norm that computes the same in both modes, whose record has none.
    """

    @property
    def text(self) -> str:
        return "final validation loss with batch statistics, nats/token"

    def value(self, run: RunRecord) -> float:
        loss = run.status.val_loss_batch_statistics
        if loss is not None:
            return loss
        # A diverged run may lack it. Infinity leaves its seed out; NaN would leave the whole estimate undefined.
        return run.loss if math.isinf(run.loss) else math.nan


@dataclass(frozen=True, slots=True)
class EvalGap(Measure):
    """The validation loss minus that of the same windows with the norms in training mode (batch statistics).

    Also of a run that counts as diverged because its validation loss is too high. NaN for a norm that computes the same
    in both modes.
    """

    @property
    def text(self) -> str:
        return "validation loss minus the same with batch statistics, nats/token"

    def value(self, run: RunRecord) -> float:
        # `run.loss` is infinite for every diverged run; the status has the loss that was evaluated.
        loss, in_training = run.status.val_loss, BatchStatisticsLoss().value(run)
        if loss is None or math.isinf(in_training):
            return run.loss
        return loss - in_training


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
class Statistic(Measure):
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
            histories = history(read_statistics(run.folder, [], self.name), self.name)
        except NormlabError:  # the arm's verdict is void
            return math.nan
        index = {"first": 0, "last": -1}[self.at]
        values: list[float] = []
        for site_history in histories:
            if self.site in ("", site_history.site) and site_history.steps:
                by_layer = np.atleast_1d(site_history.values[index])
                values += by_layer[_blocks(site_history)].tolist()
        reduced = self._reduce(values) if values else math.nan
        if not self.log:
            return reduced
        return math.log(reduced) if reduced > 0 else math.nan

    def _reduce(self, values: list[float]) -> float:
        if self.over == "last":
            return values[-1]
        if self.over == "median":
            return float(np.nanmedian(values))
        if self.over == "max":
            return float(np.nanmax(values))
        if self.over == "exponent":
            slope = np.polyfit(np.log(np.arange(1, len(values))), np.log(values[1:]), 1)[0]
            return float(slope)
        ratio = values[-1] / values[0] if values[0] else math.nan
        if self.over == "last/first" or len(values) < 2:
            return ratio
        return ratio ** (1 / (len(values) - 1)) if ratio > 0 else math.nan


def _blocks(site_history: History) -> list[int]:
    """Return the layers that are blocks, in order; layer 0 is the embeddings, the last layer the head."""
    if site_history.values.ndim == 1:
        return [0]
    head = site_history.values.shape[1] - 1
    blocks = [layer for layer in site_history.layers if 0 < layer < head]
    # A site of the embeddings or of the head alone has no block.
    return blocks or site_history.layers


def values_of(measure: Measure, runs: Sequence[RunRecord]) -> dict[Replicate, float]:
    """Return the measure of each run by replicate; NaN for a run that lacks it."""
    return {run.replicate: measure.value(run) for run in runs}
