"""Estimators of the noise over seeds, and of how often the whole procedure finds a difference where there is none."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from normlab.analysis.arms import CHOOSING_SEEDS, Arm, StudyRuns
from normlab.analysis.intervals import Replicate
from normlab.studies.estimators import Bounds, Estimate, contrast, mean_over_rates, share
from normlab.studies.measures import FINAL_LOSS

JUDGED = 8
"""Fewest judging seeds of a random half: the interval of 95 % of fewer than four has no bounds and excludes nothing."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """The standard deviation over judging seeds of the final loss at one learning rate; chi-squared interval."""

    where: str

    every_rate = False
    quantity = "standard deviation over seeds of the final validation loss, nats/token"

    @property
    def text(self) -> str:
        return f"{self.quantity}: [{self.where}]"

    def estimate(self, runs: StudyRuns) -> Estimate:
        arm = runs.arm(self.where)
        losses = [FINAL_LOSS.value(run) for run in arm.judged() if run.lr == arm.best_lr]
        return replace(deviation(losses), rates={self.where: [] if arm.best_lr is None else [arm.best_lr]})


@dataclass(frozen=True, slots=True)
class DeviationRatio:
    """The ratio of the standard deviations of two arms with one learning rate each; F interval.

    The interval assumes independent arms; it is too wide if equal seeds give similar losses.
    """

    where: str
    over: str

    every_rate = False
    quantity = "ratio of two standard deviations over seeds of the final validation loss"

    @property
    def text(self) -> str:
        return f"{self.quantity}: [{self.where}] over [{self.over}]"

    def estimate(self, runs: StudyRuns) -> Estimate:
        above, below = (Deviation(where).estimate(runs) for where in (self.where, self.over))
        if not (math.isfinite(above.value) and math.isfinite(below.value)):
            return Estimate(math.nan, n=min(above.n, below.n))
        ratio = above.value / below.value

        def interval(alpha: float) -> Bounds:
            from scipy.stats import f

            low, high = (ratio / math.sqrt(f.ppf(q, above.n - 1, below.n - 1)) for q in (1 - alpha / 2, alpha / 2))
            return low, high

        method = "F, at a fixed number of seeds"
        return Estimate(ratio, interval, min(above.n, below.n), method, rates={**above.rates, **below.rates})


def deviation(losses: Sequence[float]) -> Estimate:
    """Return the standard deviation of some losses with its chi-squared intervals; NaN if one is infinite."""
    from scipy.stats import chi2

    n = len(losses)
    if n < 2 or not all(map(math.isfinite, losses)):
        return Estimate(math.nan, n=n)
    sd = float(np.std(losses, ddof=1))

    def interval(alpha: float) -> Bounds:
        low, high = (sd * math.sqrt((n - 1) / float(chi2.ppf(q, n - 1))) for q in (1 - alpha / 2, alpha / 2))
        return low, high

    return Estimate(sd, interval, n, "chi-squared, at a fixed number of seeds")


@dataclass(frozen=True, slots=True)
class FalsePositives:
    """How often the whole procedure finds a difference between an arm and itself: its interval of 95 % excludes 0.

    The seeds are split at random into two groups. Each group chooses learning rates on its first seeds and is judged on
    the others, as two arms of a `Contrast`. The interval of the share is that of independent draws.
    """

    where: str
    draws: int = 1000

    every_rate = True
    quantity = "share of random splits with a difference"

    @property
    def text(self) -> str:
        return f"share of {self.draws} random splits of the seeds of [{self.where}] into two arms that differ"

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate; NaN with fewer than `JUDGED` judging seeds in a group."""
        arm = runs.arm(self.where)
        half = len(arm.seeds) // 2
        if half < CHOOSING_SEEDS + JUDGED:
            return Estimate(math.nan)
        rng = np.random.default_rng(0)
        rejected = 0
        for _ in range(self.draws):
            seeds = [arm.seeds[index] for index in rng.permutation(len(arm.seeds)).tolist()]
            found = contrast([_judged_by_position(arm, seeds[at : at + half]) for at in (0, half)], (1.0, -1.0))
            low, high = found.bounds
            rejected += low > 0 or high < 0
        return share(rejected, self.draws)


def _judged_by_position(arm: Arm, seeds: Sequence[Any]) -> dict[Replicate, float]:
    """Return the judged losses of some seeds of an arm by the position of the seed."""
    group = Arm(arm.where, [run for run in arm.runs if run.replicate[0] in seeds], seeds)
    losses = mean_over_rates(FINAL_LOSS, group.judged())
    return {(index, index): losses[seed, seed] for index, seed in enumerate(seeds) if (seed, seed) in losses}
