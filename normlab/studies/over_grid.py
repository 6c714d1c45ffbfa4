"""An estimator from all runs of each seed: the sensitivity to the learning rate, or the highest rate that learns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from normlab.analysis.arms import Arm, StudyRuns
from normlab.analysis.intervals import Replicate
from normlab.errors import ConfigError, unknown
from normlab.store.record import RunRecord
from normlab.studies.estimators import (
    Bounds,
    Estimate,
    complete_seeds,
    exponential,
    minus_text,
    outcomes,
    over_seeds,
)

NEAR = 0.1
"""How far from the lowest loss of its seed a run may be that has trained well, nats/token."""
NUMBERS = {
    "sensitivity": "mean of min(loss, ln V) over the grid, minus the lowest loss, nats/token",
    "highest_rate": f"highest learning rate within {NEAR} nats/token of the lowest loss",
}


@dataclass(frozen=True, slots=True)
class OverGrid:
    """One number of each seed from all of its runs in an arm, and the mean over seeds; with `minus`, the difference.

    sensitivity: S = mean_r min(loss_r, ln V) - min_r loss_r over the runs r of a seed, which differ in learning rate
    and in the other options that the arm leaves free. A seed of which no run has learned is compared with the lowest
    loss of the other arm. It is the S of Wortsman et al. 2023 (arXiv:2309.14322) for each seed, so that the interval is
    that of a mean over seeds.

    highest_rate: the ratio of the two arms' highest learning rates at which a run has learned, to within `NEAR` of the
    lowest loss of its seed and arm. The grid resolves it to one step, by which the interval is wider at each end. If
    that is the highest learning rate of the grid, the interval has no bound on that side.
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
        """Return the estimate over the seeds that have all runs of the grid."""
        arms = [runs.arm_of_grid(where) for where in (self.where, self.minus) if where is not None]
        by_arm = [complete_seeds(arm) for arm in arms]
        number = _highest_rate if self.number == "highest_rate" else _sensitivity
        values: dict[Replicate, float] = {}
        for seed in sorted(set.intersection(*map(set, by_arm)), key=str):
            of_seed = [each[seed] for each in by_arm]
            found = [number(each, other) for each, other in zip(of_seed, [*of_seed[1:], of_seed[0]], strict=True)]
            values[seed] = found[0] - sum(found[1:])
        rates = {arm.where: arm.learning_rates for arm in arms}
        estimate = replace(over_seeds(values), rates=rates, **outcomes([run for arm in arms for run in arm.runs]))
        return exponential(_widen(estimate, arms)) if self.number == "highest_rate" else estimate


def _widen(estimate: Estimate, arms: Sequence[Arm]) -> Estimate:
    """Return the estimate of a highest learning rate with the resolution of the grid in its interval."""
    top = [any(arm.learning_rates[-1] in _good(runs) for runs in complete_seeds(arm).values()) for arm in arms]
    step = max(_step(arm.learning_rates) for arm in arms)
    below, above = -math.inf if any(top[1:]) else -step, math.inf if top[0] else step

    def interval(alpha: float) -> Bounds:
        low, high = estimate.interval(alpha)
        return low + below, high + above

    return replace(estimate, interval=interval)


def _highest_rate(runs: Sequence[RunRecord], _: Sequence[RunRecord]) -> float:
    """Return ln of the highest learning rate that trains well; below the grid by one step if none does."""
    rates = sorted({run.lr for run in runs})
    good = _good(runs)
    return math.log(max(good)) if good else math.log(rates[0]) - _step(rates)


def _good(runs: Sequence[RunRecord]) -> list[float]:
    """Return the learning rates of the runs of a seed that have learned, to within `NEAR` of its lowest loss."""
    learned = {run.lr: run.loss for run in runs if run.has_learned}
    return [lr for lr, loss in learned.items() if loss <= min(learned.values()) + NEAR]


def _sensitivity(runs: Sequence[RunRecord], others: Sequence[RunRecord]) -> float:
    start = max(run.corpus.baselines.uniform for run in runs)
    reference = runs if any(run.has_learned for run in runs) else [*runs, *others]
    lowest = min(run.loss for run in reference)
    return float(np.mean([min(run.loss, start) for run in runs])) - lowest if lowest < math.inf else math.nan


def _step(rates: Sequence[float]) -> float:
    """Return the logarithm of the largest ratio of successive learning rates."""
    return max((math.log(b / a) for a, b in pairwise(rates)), default=0.0)
