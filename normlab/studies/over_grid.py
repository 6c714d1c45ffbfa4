"""Estimators from all runs of each seed: sensitivity to the learning rate, highest and best learning rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from normlab.analysis.arms import Arm, StudyRuns
from normlab.analysis.contrasts import slope_weights
from normlab.analysis.intervals import Replicate
from normlab.analysis.rate_range import HIGHEST, NEAR, complete_seeds, log_highest_rate, sensitivity
from normlab.base.errors import ConfigError, unknown
from normlab.store.record import RunRecord
from normlab.studies.estimate import (
    Bounds,
    Estimate,
    Estimator,
    exponential,
    ln_of_ratio,
    minus_text,
    outcomes,
    over_seeds,
)

NUMBERS = {
    "sensitivity": "mean of min(loss, ln V) over the grid, minus the lowest loss (for a seed that learns at no rate, "
    "that of the other arm), nats/token",
    "highest_rate": f"highest learning rate within {NEAR} nats/token of the lowest loss",
}


@dataclass(frozen=True, slots=True)
class OverGrid(Estimator):
    """One number of each seed from all of its runs in an arm, and its typical value; with `minus`, the difference.

    sensitivity: S = mean_r min(loss_r, ln V) - min_r loss_r over the runs r of a seed, which differ in learning rate
    and in the other options that the arm leaves free. A seed of which no run has learned is compared with the lowest
    loss of the other arm. It is the S of Wortsman et al. 2023 (arXiv:2309.14322), here of each seed, so that it has an
    interval over seeds.

    highest_rate: the ratio of the two arms' highest learning rates at which the loss of a seed is within `NEAR` of its
    lowest, interpolated between two rates of the grid: linearly in ln rate and in min(loss, ln V). If that is the
    highest learning rate of the grid, the ratio may be larger (of the arm `minus`, smaller), and the interval has no
    bound there; a seed that has learned at no rate counts one step below the grid, and removes the other bound.
    """

    number: str
    where: str
    minus: str | None = None

    def __post_init__(self) -> None:
        if self.number not in NUMBERS:
            raise ConfigError(f"OverGrid: {unknown('number', self.number, NUMBERS)}")

    @property
    def every_rate(self) -> bool:
        return True

    @property
    def text(self) -> str:
        minus = minus_text(self.minus)
        # Rates count as logarithms, and exp of a difference is a ratio.
        if self.number == "highest_rate":
            minus = minus.replace("minus", "over", 1)
        return f"{NUMBERS[self.number]}, typical value over seeds: [{self.where}]{minus}"

    @property
    def quantity(self) -> str:
        if self.number == "highest_rate":
            name = NUMBERS[self.number]
            return f"ratio of the {name}" if self.minus else name
        return "difference in S, nats/token" if self.minus else "S, nats/token"

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate over the seeds that have all runs of the grid.

        Raises:
            ConfigError: No run of an arm has learned: a flat curve would have a small S.
        """
        arms = [runs.arm_of_grid(self.where)]
        if self.minus is not None:
            arms.append(runs.arm_of_grid(self.minus))
        for arm in arms:
            is_started = any(run.has_loss for run in arm.runs)
            if is_started and not any(run.has_learned for run in arm.runs):
                raise ConfigError(f"no run of [{arm.where}] has learned")
        rates = {arm.where: arm.learning_rates for arm in arms}
        estimate = replace(over_seeds(self._values(arms)), rates=rates, **_outcomes_of(arms))
        if self.number == "highest_rate":
            return exponential(_open_ended(estimate, arms))
        return estimate

    def on_symmetric_scale(self, value: float) -> float:
        return ln_of_ratio(value) if self.number == "highest_rate" else value

    def _values(self, arms: Sequence[Arm]) -> dict[Replicate, float]:
        """Return the number of each seed that all arms have: of the first arm, minus that of the second."""
        number = log_highest_rate if self.number == "highest_rate" else sensitivity
        runs_by_seed = [complete_seeds(arm.runs) for arm in arms]
        values: dict[Replicate, float] = {}
        for seed in sorted(set.intersection(*map(set, runs_by_seed)), key=str):
            # A seed that learns nowhere in one arm is compared with the lowest loss of the other.
            first, last = runs_by_seed[0][seed], runs_by_seed[-1][seed]
            values[seed] = number(first, last)
            if len(arms) > 1:
                values[seed] -= number(last, first)
        return values


def _outcomes_of(arms: Sequence[Arm]) -> dict[str, int]:
    return outcomes([*chain.from_iterable(arm.runs for arm in arms)])


def _open_ended(estimate: Estimate, arms: Sequence[Arm]) -> Estimate:
    """Return the estimate without a bound on a side where the highest rate of an arm may be outside its grid."""
    may_be_below = may_be_above = False
    for index, arm in enumerate(arms):
        above, below = HIGHEST.cut_off(complete_seeds(arm.runs).values())
        if index > 0:  # the ratio falls where the rate of the second arm rises
            above, below = below, above
        may_be_above |= above
        may_be_below |= below

    def interval(alpha: float) -> Bounds:
        low, high = estimate.interval(alpha)
        if may_be_below:
            low = -math.inf
        if may_be_above:
            high = math.inf
        return low, high

    return replace(estimate, interval=interval)


@dataclass(frozen=True, slots=True)
class BestRateSlope(Estimator):
    """The typical value over seeds of the least-squares slope of ln(best learning rate) on ln(option).

    The best learning rate of a seed at a level of the option is the vertex of the parabola through the lowest loss and
    its two neighbours, in ln(rate); at the end of a grid it is that rate. A seed that learns nowhere at a level is left
    out. With `minus`, the slope of other arms is subtracted, seed by seed.
    """

    where: str
    over: str
    """The full name of a numeric option, such as `model.depth`."""
    minus: str | None = None

    @property
    def every_rate(self) -> bool:
        return True

    @property
    def text(self) -> str:
        return f"{self.quantity}, typical value over seeds: [{self.where}]{minus_text(self.minus)}"

    @property
    def quantity(self) -> str:
        return f"slope of ln(best learning rate) on ln({self.over})"

    def estimate(self, runs: StudyRuns) -> Estimate:
        arms, slopes = self._slopes(runs, self.where)
        subtracted: dict[Replicate, float] = {}
        if self.minus is not None:
            more_arms, subtracted = self._slopes(runs, self.minus)
            arms += more_arms
            slopes = {seed: slope for seed, slope in slopes.items() if seed in subtracted}
        values: dict[Replicate, float] = {}
        for seed in sorted(slopes, key=str):
            values[seed] = slopes[seed] - subtracted.get(seed, 0.0)
        complete = set.intersection(*(set(complete_seeds(arm.runs)) for arm in arms))
        rates = {arm.where: arm.learning_rates for arm in arms}
        left_out = len(complete) - len(values)
        return replace(over_seeds(values), rates=rates, left_out=left_out, **_outcomes_of(arms))

    def _slopes(self, runs: StudyRuns, where: str) -> tuple[list[Arm], dict[Replicate, float]]:
        """Return the arm of each level, and the slope of each seed that learns at all levels."""
        levels = runs.levels(where, self.over)
        arms = [runs.arm_of_grid(f"{where},{self.over}={level:.17g}") for level in levels]
        best = [_best_rates(arm) for arm in arms]
        weights = slope_weights(np.log(levels))
        slopes: dict[Replicate, float] = {}
        for seed in set.intersection(*map(set, best)):
            terms = [weight * rates[seed] for weight, rates in zip(weights, best, strict=True)]
            slopes[seed] = math.fsum(terms)
        return arms, slopes


def _best_rates(arm: Arm) -> dict[Replicate, float]:
    """Return ln of the best learning rate of each seed that has all runs of the arm and learns."""
    x = np.log(arm.learning_rates)
    best: dict[Replicate, float] = {}
    for seed, runs in complete_seeds(arm.runs).items():
        losses = [_loss_if_learned(run) for run in sorted(runs, key=lambda run: run.lr)]
        if not any(map(math.isfinite, losses)):
            continue
        i = int(np.argmin(losses))
        best[seed] = float(x[i])
        around = losses[max(i - 1, 0) : i + 2]
        # A parabola needs a loss on either side: at the end of a grid, or beside a run that has not learned, there is
        # none, and the rate of the grid stays.
        if len(around) == 3 and all(map(math.isfinite, around)):
            a, b, _ = np.polyfit(x[i - 1 : i + 2] - x[i], around, 2)
            if a > 0:
                best[seed] = float(x[i] - b / (2 * a))
    return best


def _loss_if_learned(run: RunRecord) -> float:
    return run.loss if run.has_learned else math.inf
