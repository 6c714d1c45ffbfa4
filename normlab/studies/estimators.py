"""The estimators of most claims: contrasts of arms, slopes over an option, and shares of seeds.

Others are in `over_grid.py` (from all runs of each seed), `over_sizes.py` (from models of several sizes) and `noise.py`
(of the noise over seeds).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from normlab.analysis.arms import Arm, StudyRuns
from normlab.analysis.contrasts import slope_weights, weighted_sums
from normlab.analysis.rate_range import by_seed, complete_seeds
from normlab.analysis.settings import LR
from normlab.base.errors import ConfigError
from normlab.store.format import DIVERGED
from normlab.store.record import RunRecord
from normlab.studies.estimate import (
    Bounds,
    Estimate,
    Estimator,
    contrast,
    exponential,
    ln_of_ratio,
    mean_over_rates,
    minus_text,
    outcomes,
    share,
)
from normlab.studies.measures import FINAL_LOSS, Measure, values_of

DIFFERENCES = {1: "", 2: "difference in ", 4: "difference of differences in "}
RATIOS = {1: "", 2: "ratio of ", 4: "ratio of ratios of "}
"""What a contrast is called, by its number of arms."""


@dataclass(frozen=True, slots=True)
class Contrast(Estimator):
    """The typical value over seeds of sum_a w_a m_a, for arms a with weights w_a and a measure m.

    An arm's value is the mean over its chosen learning rates (`Arm.chosen_lrs`). Seeds are left out of which a run
    diverged or, for the final loss, has not learned: `Share` counts these. With a single arm of weight 1 it is that
    of the measure, with weights +1 and -1 a paired difference, with +1, -1, -1, +1 a difference of differences.
    """

    weights: Mapping[str, float]
    measure: Measure = FINAL_LOSS
    is_ratio: bool = False
    """Whether the measure is a logarithm, and the estimate exp of the contrast: a ratio."""

    @property
    def text(self) -> str:
        terms: list[str] = []
        for arm, weight in self.weights.items():
            sign = "+" if weight > 0 else "-"
            factor = "" if abs(weight) == 1 else f"{abs(weight):g} "
            terms.append(f"{sign} {factor}[{arm}]")
        exp = "exp of the " if self.is_ratio else ""
        total = " ".join(terms).removeprefix("+ ")
        return f"{exp}typical value over seeds of {self.measure.text}: {total}; mean over the chosen learning rates"

    @property
    def quantity(self) -> str:
        measured, arms = self.measure.text, len(self.weights)
        if not self.is_ratio:
            return DIFFERENCES.get(arms, "contrast of ") + measured
        return RATIOS.get(arms, "exp of a contrast of ") + measured.removeprefix("ln(").removesuffix(")")

    def estimate(self, runs: StudyRuns) -> Estimate:
        arms = self._arms(runs)
        return self._mean(arms, [arm.judged() for arm in arms])

    def estimate_at_best(self, runs: StudyRuns) -> Estimate:
        arms = self._arms(runs)
        judged: list[list[RunRecord]] = []
        for arm in arms:
            judged.append([run for run in arm.judged() if run.lr == arm.best_lr])
        return self._mean(arms, judged)

    def at_a_common_rate(self, runs: StudyRuns) -> tuple[float, float] | None:
        """Return the contrast of the choosing seeds with all arms at one learning rate, and that rate.

        None with fewer than two arms, and where a value is missing or infinite.
        """
        arms = self._arms(runs)
        lr = runs.common_lr(arms)
        if lr is None or len(arms) < 2:
            return None
        tables = [values_of(self.measure, arm.choice.runs_at(lr)) for arm in arms]
        sums = [*weighted_sums([*self.weights.values()], tables).values()]
        if not sums or not all(map(math.isfinite, sums)):
            return None
        mean = math.fsum(sums) / len(sums)
        return math.exp(mean) if self.is_ratio else mean, lr

    @property
    def has_power(self) -> bool:
        return True

    def pilot(self, runs: StudyRuns) -> list[float]:
        """Return the contrast of each choosing seed; where arms have one rate, of the first seeds, which judge too."""
        tables = []
        for arm in self._arms(runs):
            chosen_runs: list[RunRecord] = []
            for lr in arm.chosen_lrs:
                chosen_runs += arm.choice.runs_at(lr)
            tables.append(mean_over_rates(self.measure, chosen_runs))
        return [*weighted_sums([*self.weights.values()], tables).values()]

    def on_symmetric_scale(self, value: float) -> float:
        return ln_of_ratio(value) if self.is_ratio else value

    def _arms(self, runs: StudyRuns) -> list[Arm]:
        return [runs.arm(where) for where in self.weights]

    def _mean(self, arms: Sequence[Arm], judged: Sequence[Sequence[RunRecord]]) -> Estimate:
        """Return the contrast of some runs of each arm."""
        tables = [mean_over_rates(self.measure, runs) for runs in judged]
        estimate = contrast(tables, [*self.weights.values()])
        rates = {arm.where: arm.chosen_lrs for arm in arms}
        estimate = replace(estimate, rates=rates, **outcomes([*chain(*judged)]))
        return exponential(estimate) if self.is_ratio else estimate


@dataclass(frozen=True, slots=True)
class Slope(Estimator):
    """The typical value over seeds of the least-squares slope of a measure on ln(option), or on the option itself."""

    where: str
    over: str
    """The full name of a numeric option, such as `model.depth` or `optim.lr`."""
    measure: Measure = FINAL_LOSS
    is_log: bool = True
    minus: str | None = None
    """Conditions of other arms whose slope is subtracted, seed by seed."""

    @property
    def text(self) -> str:
        return f"{self.quantity}, typical value over seeds: [{self.where}]{minus_text(self.minus)}"

    @property
    def quantity(self) -> str:
        x = f"ln({self.over})" if self.is_log else self.over
        return f"slope of {self.measure.text} on {x}"

    def estimate(self, runs: StudyRuns) -> Estimate:
        return self._contrast(runs).estimate(runs)

    def estimate_at_best(self, runs: StudyRuns) -> Estimate:
        return self._contrast(runs).estimate_at_best(runs)

    def _contrast(self, runs: StudyRuns) -> Contrast:
        """Return the contrast of all levels that is the least-squares slope."""
        weights = self._weights(runs, self.where, 1.0)
        if self.minus is not None:
            weights |= self._weights(runs, self.minus, -1.0)
        return Contrast(weights, self.measure)

    def _weights(self, runs: StudyRuns, where: str, sign: float) -> dict[str, float]:
        """Return the weight of the arm of each level: w_i = (x_i - mean x) / sum_j (x_j - mean x)^2, times a sign."""
        if self.over == LR:
            runs.arm_of_grid(where)  # so that a best learning rate at the edge of this range makes the claim void
        levels = runs.levels(where, self.over)
        x = np.log(levels) if self.is_log else levels
        weights: dict[str, float] = {}
        for level, weight in zip(levels, slope_weights(x), strict=True):
            # All digits: the condition must select the level exactly.
            of_level = f"{self.over}={level:.17g}"
            weights[f"{where},{of_level}" if where else of_level] = sign * weight
        return weights


@dataclass(frozen=True, slots=True)
class Share(Estimator):
    """The share of seeds that have not learned.

    A run has learned if it finished with a loss below the band around the unigram entropy. With `minus`, the difference
    of two shares; its interval at level alpha combines their intervals at level alpha / 2.
    """

    where: str
    minus: str | None = None
    lr: str = "chosen"
    """chosen: a seed counts if it has learned at none of the chosen learning rates. every: at none of the grid."""
    states: tuple[str, ...] = ()
    """Unless empty: a seed counts if all its runs at these learning rates have one of these outcomes."""

    @property
    def every_rate(self) -> bool:
        return self.lr == "every"

    def __post_init__(self) -> None:
        if self.lr not in ("chosen", "every"):
            raise ConfigError(f"Share: lr={self.lr!r}: choose 'chosen' or 'every'")

    @property
    def text(self) -> str:
        rate = "learning rate" if self.every_rate else "chosen learning rate"
        seeds = f"that learn at no {rate}"
        if self.states:
            seeds = f"whose runs at every {rate} are {' or '.join(self.states)}"
        return f"share of seeds {seeds}: [{self.where}]{minus_text(self.minus)}"

    @property
    def quantity(self) -> str:
        name = self.text.partition(":")[0]
        return f"difference in the {name}" if self.minus else name

    def estimate(self, runs: StudyRuns) -> Estimate:
        arms = [self._arm(runs, self.where)]
        if self.minus is not None:
            arms.append(self._arm(runs, self.minus))
        judged = [self._judged(arm) for arm in arms]
        rates = {arm.where: arm.chosen_lrs for arm in arms}
        if self.every_rate:
            rates = {arm.where: arm.learning_rates for arm in arms}
        counted = [self._counted(runs_of_arm) for runs_of_arm in judged]
        if not all(counted):
            return Estimate(math.nan, rates=rates)
        shares = [share(sum(seeds), len(seeds)) for seeds in counted]
        estimate = shares[0] if self.minus is None else _difference(*shares)
        diverged = sum(run.result == DIVERGED for run in chain(*judged))
        return replace(estimate, rates=rates, bad=sum(map(sum, counted)), diverged=diverged)

    def _arm(self, runs: StudyRuns, where: str) -> Arm:
        # At every rate of the grid an arm may leave an option free: its runs count together.
        return runs.arm_of_grid(where) if self.every_rate else runs.arm(where)

    def _judged(self, arm: Arm) -> list[RunRecord]:
        if not self.every_rate:
            return arm.judged()
        # No seed is set apart where nothing is chosen; a seed that lacks a rate may have learned there.
        return [*chain(*complete_seeds(arm.runs).values())]

    def _counted(self, runs: Sequence[RunRecord]) -> list[bool]:
        """Return of each seed whether it counts."""
        counted: list[bool] = []
        for seed_runs in by_seed(runs).values():
            if self.states:
                counted.append(all(run.result in self.states for run in seed_runs))
            else:
                counted.append(not any(run.has_learned for run in seed_runs))
        return counted


def _difference(share: Estimate, subtracted: Estimate) -> Estimate:
    def interval(alpha: float) -> Bounds:
        # By Bonferroni's inequality both intervals hold with a probability of 1 - alpha or more.
        low, high = share.interval(alpha / 2)
        subtracted_low, subtracted_high = subtracted.interval(alpha / 2)
        return low - subtracted_high, high - subtracted_low

    method = f"{share.method} minus {subtracted.method.rpartition(', ')[2]}"
    return Estimate(share.value - subtracted.value, interval, share.n + subtracted.n, method)


# Contrasts with a name


def difference(arm: str, baseline: str, measure: Measure = FINAL_LOSS) -> Contrast:
    """Return the estimator of a paired difference: `arm` minus `baseline`."""
    return Contrast({arm: 1.0, baseline: -1.0}, measure)


def interaction(a: str, b: str, c: str, d: str, measure: Measure = FINAL_LOSS) -> Contrast:
    """Return the estimator of a difference of differences: (a - b) - (c - d)."""
    return Contrast({a: 1.0, b: -1.0, c: -1.0, d: 1.0}, measure)
