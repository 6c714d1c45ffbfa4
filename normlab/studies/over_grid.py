"""An estimator from all runs of each seed: the sensitivity to the learning rate, or the highest rate that learns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from normlab.analysis.arms import Arm, StudyRuns
from normlab.analysis.contrasts import slope_weights
from normlab.analysis.intervals import Replicate
from normlab.analysis.rate_range import HIGHEST, NEAR, complete_seeds, log_highest_rate, sensitivity
from normlab.base.errors import ConfigError, unknown
from normlab.studies.estimators import (
    Bounds,
    Estimate,
    cut_at,
    exponential,
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
class OverGrid:
    """One number of each seed from all of its runs in an arm, and the mean over seeds; with `minus`, the difference.

    sensitivity: S = mean_r min(loss_r, ln V) - min_r loss_r over the runs r of a seed, which differ in learning rate
    and in the other options that the arm leaves free. A seed of which no run has learned is compared with the lowest
    loss of the other arm. It is the S of Wortsman et al. 2023 (arXiv:2309.14322) for each seed, so that the interval is
    that of a mean over seeds.

    highest_rate: the ratio of the two arms' highest learning rates at which the loss of a seed is within `NEAR` of its
    lowest, interpolated between two rates of the grid: linearly in ln rate and in min(loss, ln V). If that is the
    highest learning rate of the grid, the ratio may be larger (of the arm `minus`, smaller), and the interval has no
    bound there; a seed that has learned at no rate counts one step below the grid, and removes the other bound.
    """

    number: str
    where: str
    minus: str | None = None

    every_rate = True

    def __post_init__(self) -> None:
        if self.number not in NUMBERS:
            raise ConfigError(f"OverGrid: {unknown('number', self.number, NUMBERS)}")

    @property
    def text(self) -> str:
        mean, minus = "mean", minus_text(self.minus)
        if self.number == "highest_rate":
            mean, minus = "geometric mean", minus.replace("minus", "over", 1)
        return f"{NUMBERS[self.number]}, {mean} over seeds: [{self.where}]{minus}"

    @property
    def quantity(self) -> str:
        if self.number == "highest_rate":
            return f"{'ratio of the ' if self.minus else ''}{NUMBERS[self.number]}"
        return f"{'difference in ' if self.minus else ''}S, nats/token"

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate over the seeds that have all runs of the grid.

        Raises:
            ConfigError: No run of an arm has learned: a flat curve would have a small S.
        """
        arms = [runs.arm_of_grid(where) for where in (self.where, self.minus) if where is not None]
        for arm in arms:
            if any(run.has_loss for run in arm.runs) and not any(run.has_learned for run in arm.runs):
                raise ConfigError(f"no run of [{arm.where}] has learned")
        by_arm = [complete_seeds(arm.runs) for arm in arms]
        number = log_highest_rate if self.number == "highest_rate" else sensitivity
        values: dict[Replicate, float] = {}
        for seed in sorted(set.intersection(*map(set, by_arm)), key=str):
            of_seed = [each[seed] for each in by_arm]
            found = [number(each, other) for each, other in zip(of_seed, [*of_seed[1:], of_seed[0]], strict=True)]
            values[seed] = found[0] - sum(found[1:])
        rates = {arm.where: arm.learning_rates for arm in arms}
        estimate = replace(over_seeds(values), rates=rates, **outcomes([run for arm in arms for run in arm.runs]))
        if self.number == "highest_rate":
            return exponential(_open_ended(estimate, arms))
        return estimate if self.minus else cut_at(estimate, 0.0)


def _open_ended(estimate: Estimate, arms: Sequence[Arm]) -> Estimate:
    """Return the estimate without a bound on a side where the highest rate of an arm may be outside its grid."""
    above, below = zip(*(HIGHEST.cut_off(complete_seeds(arm.runs).values()) for arm in arms), strict=True)

    def interval(alpha: float) -> Bounds:
        low, high = estimate.interval(alpha)
        return -math.inf if below[0] or any(above[1:]) else low, math.inf if above[0] or any(below[1:]) else high

    return replace(estimate, interval=interval)


@dataclass(frozen=True, slots=True)
class BestRateSlope:
    """The mean over seeds of the least-squares slope of ln(best learning rate) on ln(option).

    The best learning rate of a seed at a level of the option is the vertex of the parabola through the lowest loss and
    its two neighbours, in ln(rate); at the end of a grid it is that rate. A seed that learns nowhere at a level is left
    out. With `minus`, the slope of other arms is subtracted, seed by seed.
    """

    where: str
    over: str
    """The full name of a numeric option, such as `model.depth`."""
    minus: str | None = None

    every_rate = True

    @property
    def text(self) -> str:
        return f"{self.quantity}, mean over seeds: [{self.where}]{minus_text(self.minus)}"

    @property
    def quantity(self) -> str:
        return f"slope of ln(best learning rate) on ln({self.over})"

    def estimate(self, runs: StudyRuns) -> Estimate:
        slopes, rates, used = [], {}, []
        for where in (self.where, self.minus):
            if where is None:
                continue
            levels = runs.levels(where, self.over)
            arms = [runs.arm_of_grid(f"{where},{self.over}={level:.17g}") for level in levels]
            used += [run for arm in arms for run in arm.runs]
            rates |= {arm.where: arm.learning_rates for arm in arms}
            best = [_best_rates(arm) for arm in arms]
            weights = slope_weights(np.log(levels))
            shared = set.intersection(*map(set, best))
            slopes.append({seed: math.fsum(w * b[seed] for w, b in zip(weights, best, strict=True)) for seed in shared})
        seeds = sorted(set.intersection(*map(set, slopes)), key=str)
        values = {seed: slopes[0][seed] - sum(slope[seed] for slope in slopes[1:]) for seed in seeds}
        return replace(over_seeds(values), rates=rates, **outcomes(used))


def _best_rates(arm: Arm) -> dict[Replicate, float]:
    """Return ln of the best learning rate of each seed that has all runs of the arm and learns."""
    x = np.log(arm.learning_rates)
    found: dict[Replicate, float] = {}
    for seed, runs in complete_seeds(arm.runs).items():
        losses = [run.loss if run.has_learned else math.inf for run in sorted(runs, key=lambda run: run.lr)]
        if not any(map(math.isfinite, losses)):
            continue
        i = int(np.argmin(losses))
        around = losses[max(i - 1, 0) : i + 2]
        if len(around) < 3 or not all(map(math.isfinite, around)):
            found[seed] = float(x[i])
            continue
        a, b, _ = np.polyfit(x[i - 1 : i + 2] - x[i], around, 2)
        found[seed] = float(x[i] - b / (2 * a)) if a > 0 else float(x[i])
    return found
