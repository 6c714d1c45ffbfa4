"""Estimators of the noise over seeds, which says what a size can decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from normlab.analysis.cells import Cell
from normlab.analysis.intervals import Replicate
from normlab.studies.arms import CHOOSING_SEEDS, Arm, StudyRuns, plausible_lrs
from normlab.studies.estimators import Estimate, binomial, over_rates

ALPHA = 0.05


@dataclass(frozen=True, slots=True)
class Deviation:
    """The standard deviation over seeds of the final loss at the best learning rate, with the chi-squared interval."""

    where: str

    chooses_rate = True

    @property
    def text(self) -> str:
        """What is estimated."""
        return f"{self.quantity}: [{self.where}]"

    @property
    def quantity(self) -> str:
        """The name of the estimate with its unit, for an axis."""
        return "standard deviation over seeds of the final validation loss, nats/token"

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate."""
        arm = runs.arm(self.where)
        losses = [run.loss for run in arm.judged(arm.best_lr)]
        return replace(deviation(losses), rates={self.where: arm.best_lr})


def deviation(losses: Sequence[float]) -> Estimate:
    """Return the standard deviation of some losses with its chi-squared intervals; NaN if one is infinite."""
    from scipy.stats import chi2

    n = len(losses)
    if n < 2 or not all(map(math.isfinite, losses)):
        return Estimate(math.nan, n=n)
    sd = float(np.std(losses, ddof=1))
    low, low90, high90, high = (sd * math.sqrt((n - 1) / float(chi2.ppf(q, n - 1))) for q in (0.975, 0.95, 0.05, 0.025))
    return Estimate(sd, low, high, low90, high90, n, method="chi-squared")


@dataclass(frozen=True, slots=True)
class FalsePositives:
    """How often the whole procedure finds a difference between an arm and itself.

    The seeds are split at random into two groups. Each group chooses its learning rate on its first seeds and is judged
    on the others, as two arms of a `Contrast`; the test rejects at 5 %. The interval is binomial, for the draws.
    """

    where: str
    draws: int = 1000

    chooses_rate = False
    quantity = "share of random splits with p < 0.05"

    @property
    def text(self) -> str:
        """What is estimated."""
        return f"share of {self.draws} random splits of the seeds of [{self.where}] into two arms with p < {ALPHA:g}"

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate; NaN with fewer than two judging seeds in a group."""
        arm = runs.arm(self.where)
        half = len(arm.seeds) // 2
        if half < CHOOSING_SEEDS + 2:
            return Estimate(math.nan)
        rng = np.random.default_rng(0)
        rejected = 0
        for _ in range(self.draws):
            order = rng.permutation(len(arm.seeds)).tolist()
            tables = [self._table(arm, order[start : start + half]) for start in (0, half)]
            estimate = over_rates(tables, lambda values: values[0] - values[1])
            rejected += estimate.p is not None and estimate.p < ALPHA
        return binomial(rejected, self.draws)

    def _table(self, arm: Arm, members: Sequence[int]) -> dict[float | None, dict[Replicate, float]]:
        """Return the losses of a group's judging seeds, at the learning rates that are plausible for the group."""
        number = {arm.seeds[member]: position for position, member in enumerate(members)}
        runs = [run for run in arm.runs if run.replicate[0] in number]
        cell = Cell((), (), runs)
        choice = Arm(arm.where, [run for run in runs if number[run.replicate[0]] < CHOOSING_SEEDS])
        if choice.best_lr is None:
            return {}
        return {
            lr: {
                (number[seed], number[seed]): loss
                for (seed, _), loss in cell.losses[lr].items()
                if number[seed] >= CHOOSING_SEEDS
            }
            for lr in plausible_lrs(choice.best_lr, cell.losses, cell.bad_lrs)
        }
