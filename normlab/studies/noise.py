"""Estimators of the noise over seeds, and of how often the whole procedure finds a difference where there is none."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from normlab.analysis.arms import CHOOSING_SEEDS, Arm, StudyRuns
from normlab.analysis.intervals import Replicate
from normlab.store.record import Setting
from normlab.studies.estimate import Bounds, Estimate, Estimator, contrast, mean_over_rates, share
from normlab.studies.measures import FINAL_LOSS

JUDGED = 8
"""Fewest judging seeds of a random half: the interval of 95 % of fewer than six has no bounds and excludes nothing."""


@dataclass(frozen=True, slots=True)
class Deviation(Estimator):
    """The standard deviation over judging seeds of the final loss at one learning rate; chi-squared interval."""

    where: str

    @property
    def quantity(self) -> str:
        return "standard deviation over seeds of the final validation loss, nats/token"

    @property
    def text(self) -> str:
        return f"{self.quantity}: [{self.where}]"

    def estimate(self, runs: StudyRuns) -> Estimate:
        arm = runs.arm(self.where)
        losses = [FINAL_LOSS.value(run) for run in arm.judged() if run.lr == arm.best_lr]
        return replace(deviation(losses), rates={self.where: [] if arm.best_lr is None else [arm.best_lr]})


@dataclass(frozen=True, slots=True)
class DeviationRatio(Estimator):
    """The ratio of the standard deviations of two arms with one learning rate each; F interval.

    The interval assumes independent arms; it is too wide if equal seeds give similar losses.
    """

    where: str
    over: str

    @property
    def quantity(self) -> str:
        return "ratio of two standard deviations over seeds of the final validation loss"

    @property
    def text(self) -> str:
        return f"{self.quantity}: [{self.where}] over [{self.over}]"

    def estimate(self, runs: StudyRuns) -> Estimate:
        above, below = Deviation(self.where).estimate(runs), Deviation(self.over).estimate(runs)
        n = min(above.n, below.n)
        if not (math.isfinite(above.value) and math.isfinite(below.value)):
            return Estimate(math.nan, n=n, stays_undefined=above.stays_undefined or below.stays_undefined)
        if below.value == 0:  # equal losses of all seeds
            return Estimate(math.nan, n=n)
        ratio = above.value / below.value

        def interval(alpha: float) -> Bounds:
            from scipy.stats import f

            # The ratio of the variances, over that of the true ones, has an F distribution with n - 1 degrees of
            # freedom each: its upper quantile gives the lower bound.
            upper = f.ppf(1 - alpha / 2, above.n - 1, below.n - 1)
            lower = f.ppf(alpha / 2, above.n - 1, below.n - 1)
            return ratio / math.sqrt(upper), ratio / math.sqrt(lower)

        method = "F, at a fixed number of seeds"
        return Estimate(ratio, interval, n, method, rates={**above.rates, **below.rates})


def deviation(losses: Sequence[float]) -> Estimate:
    """Return the standard deviation of some losses with its chi-squared intervals; NaN if one is infinite."""
    from scipy.stats import chi2

    n = len(losses)
    has_infinite = any(map(math.isinf, losses))
    if n < 2 or has_infinite:
        return Estimate(math.nan, n=n, stays_undefined=has_infinite)
    sd = float(np.std(losses, ddof=1))

    def interval(alpha: float) -> Bounds:
        # (n - 1) sd^2, over the true variance, has a chi-squared distribution with n - 1 degrees of freedom.
        upper, lower = float(chi2.ppf(1 - alpha / 2, n - 1)), float(chi2.ppf(alpha / 2, n - 1))
        return sd * math.sqrt((n - 1) / upper), sd * math.sqrt((n - 1) / lower)

    return Estimate(sd, interval, n, "chi-squared, at a fixed number of seeds")


@dataclass(frozen=True, slots=True)
class FalsePositives(Estimator):
    """How often the whole procedure finds a difference between an arm and itself: its interval of 95 % excludes 0.

    The seeds are split at random into two groups. Each group chooses learning rates on its first seeds and is judged on
    the others, as two arms of a `Contrast`. The interval of the share is that of independent draws.
    """

    where: str
    draws: int = 1000

    @property
    def every_rate(self) -> bool:
        return True

    @property
    def quantity(self) -> str:
        return "share of random splits with a difference"

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
            halves = seeds[:half], seeds[half : 2 * half]
            difference = contrast([_judged_by_position(arm, group) for group in halves], (1.0, -1.0))
            low, high = difference.bounds
            rejected += low > 0 or high < 0
        return share(rejected, self.draws)


def _judged_by_position(arm: Arm, seeds: Sequence[Setting]) -> dict[Replicate, float]:
    """Return the judged losses of some seeds of an arm by the position of the seed."""
    group = Arm(arm.where, [run for run in arm.runs if run.replicate[0] in seeds], seeds)
    losses = mean_over_rates(FINAL_LOSS, group.judged())
    # A contrast pairs equal seeds, and the two halves have none in common: their positions are paired instead.
    by_position: dict[Replicate, float] = {}
    for position, seed in enumerate(seeds):
        if (seed, seed) in losses:
            by_position[position, position] = losses[seed, seed]
    return by_position
