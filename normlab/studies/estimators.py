"""Estimators of a study: each returns an estimate with its confidence sequence, from the judged runs of some arms.

An estimator is data (a frozen dataclass), so that a criterion has a text and a hash. Its intervals hold at every number
of seeds at once (`analysis/sequences.py`), so that a study may stop when its claims are decided.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Protocol

import numpy as np

from normlab.analysis.arms import StudyRuns
from normlab.analysis.cells import count_bad
from normlab.analysis.contrasts import slope_weights, weighted_sums
from normlab.analysis.intervals import Replicate, design_of
from normlab.analysis.rate_range import by_seed, complete_seeds
from normlab.analysis.sequences import mean_sequence, share_sequence
from normlab.analysis.settings import LR
from normlab.base.errors import ConfigError
from normlab.store.format import DIVERGED
from normlab.store.record import RunRecord
from normlab.studies.measures import FINAL_LOSS, Measure, least_of, values_of

Bounds = tuple[float, float]
T_SEQUENCE = "confidence sequence of the mean, t with a normal prior of variance 5 (Lai 1976)"
BETS = "confidence sequence of a share, by bets (Robbins 1970)"


def no_bounds(alpha: float) -> Bounds:
    return -math.inf, math.inf


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    interval: Callable[[float], Bounds] = no_bounds
    """The interval at a significance level: of 95 % at 0.05."""
    n: int = 0
    """Number of seeds (of runs, for shares)."""
    method: str = ""
    """What the interval is."""
    deviation: float | None = None
    """Standard deviation over seeds of the quantity whose mean is `value`."""
    seeds: Mapping[str, float] = field(default_factory=dict)
    diverged: int = 0
    bad: int = 0
    """Number of judged runs that diverged, are stuck or regressed; for a share, the number that counts."""
    left_out: int = 0
    """Number of seeds that are not in the mean, because a run diverged or has not learned."""
    undefined: int = 0
    """Number of seeds without the quantity, because a run lacks the measure."""
    rates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The learning rates that were used, by arm."""

    @property
    def bounds(self) -> Bounds:
        """The interval of 95 %."""
        return self.interval(0.05)


class Estimator(Protocol):
    """Estimates one quantity from the runs of a study."""

    @property
    def every_rate(self) -> bool:
        """Whether it needs the runs of the judging seeds at every learning rate of the grid."""
        ...

    @property
    def text(self) -> str: ...

    @property
    def quantity(self) -> str:
        """The name of the estimate with its unit, for an axis."""
        ...

    def estimate(self, runs: StudyRuns) -> Estimate: ...


def over_seeds(values: Mapping[Replicate, float]) -> Estimate:
    """Return the mean of a quantity over independent seeds.

    NaN without an interval if there is no seed, or if the quantity of one is NaN.

    Raises:
        ConfigError: Seeds of weights and of data are crossed, so that the values depend on each other.
    """
    if design_of(values).crossed:
        raise ConfigError("a study needs independent seeds: leave out data.seed, or give each run its own")
    numbers, undefined = list(values.values()), sum(map(math.isnan, values.values()))
    if undefined or not numbers:
        return Estimate(math.nan, n=len(numbers), undefined=undefined)
    return Estimate(
        math.fsum(numbers) / len(numbers), partial(mean_sequence, numbers), len(numbers), T_SEQUENCE,
        float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None,
        {f"{a}" if a == b else f"{a}/{b}": value for (a, b), value in values.items()},
    )  # fmt: skip


def contrast(tables: Sequence[Mapping[Replicate, float]], weights: Sequence[float]) -> Estimate:
    """Return the mean over seeds of the weighted sum of the arms' values.

    A seed of which a value is infinite is left out.
    """
    shared = set.intersection(*map(set, tables))
    finite = {seed for seed in shared if not any(math.isinf(arm[seed]) for arm in tables)}
    kept = [{seed: value for seed, value in arm.items() if seed in finite} for arm in tables]
    return replace(over_seeds(weighted_sums(weights, kept)), left_out=len(shared) - len(finite))


def mean_over_rates(measure: Measure, runs: Sequence[RunRecord]) -> dict[Replicate, float]:
    """Return the mean of a measure over the learning rates of each seed that has all of them."""
    rates = sorted({run.lr for run in runs})
    by_rate = [values_of(measure, [run for run in runs if run.lr == lr]) for lr in rates]
    shared = set.intersection(*map(set, by_rate)) if by_rate else set()
    return {seed: math.fsum(values[seed] for values in by_rate) / len(rates) for seed in sorted(shared, key=str)}


def cut_at(estimate: Estimate, least: float) -> Estimate:
    """Return the estimate with intervals that end at the lowest possible value; they hold the truth as often as before.

    They stay as they are where no lowest value is known (-inf).
    """
    if math.isinf(least) or not estimate.method:
        return estimate

    def interval(alpha: float) -> Bounds:
        low, high = estimate.interval(alpha)
        return max(low, least), high

    method = f"{estimate.method}, cut at {least:g}, the lowest possible value"
    return replace(estimate, interval=interval, method=method)


def exponential(estimate: Estimate) -> Estimate:
    """Return the estimate of exp(x) from that of x."""

    def exp(value: float) -> float:
        return math.exp(value) if value < 700 else math.inf

    def interval(alpha: float) -> Bounds:
        low, high = estimate.interval(alpha)
        return exp(low), exp(high)

    seeds = {seed: exp(value) for seed, value in estimate.seeds.items()}
    return replace(estimate, value=exp(estimate.value), seeds=seeds, interval=interval)


def outcomes(runs: Sequence[RunRecord]) -> dict[str, int]:
    return {"diverged": sum(run.result == DIVERGED for run in runs), "bad": count_bad(runs)}


def minus_text(other: str | None) -> str:
    return f", minus that of [{other}]" if other else ""


@dataclass(frozen=True, slots=True)
class Contrast:
    """The mean over seeds of sum_a w_a m_a, for arms a with weights w_a and a measure m.

    An arm's value is the mean over its chosen learning rates (`Arm.chosen_lrs`). Seeds are left out of which a run
    diverged or, for the final loss, has not learned: `Share` counts these. With a single arm of weight 1 it is the mean
    of the measure, with weights +1 and -1 a paired difference, with +1, -1, -1, +1 a difference of differences.
    """

    weights: Mapping[str, float]
    measure: Measure = FINAL_LOSS
    is_ratio: bool = False
    """Whether the measure is a logarithm, and the estimate exp of the contrast: a ratio."""

    every_rate = False

    @property
    def text(self) -> str:
        terms = " ".join(
            f"{'+' if w > 0 else '-'} {'' if abs(w) == 1 else f'{abs(w):g} '}[{arm}]" for arm, w in self.weights.items()
        )
        name = f"{'exp of the ' if self.is_ratio else ''}mean over seeds of {self.measure.text}"
        return f"{name}: {terms.removeprefix('+ ')}; mean over the chosen learning rates"

    @property
    def quantity(self) -> str:
        what, arms = self.measure.text, len(self.weights)
        if not self.is_ratio:
            differences = {1: "", 2: "difference in ", 4: "difference of differences in "}
            return differences.get(arms, "contrast of ") + what
        ratios = {1: "", 2: "ratio of ", 4: "ratio of ratios of "}
        return ratios.get(arms, "exp of a contrast of ") + what.removeprefix("ln(").removesuffix(")")

    @property
    def least(self) -> float:
        """The lowest possible value of the mean of a single arm, before exp; -inf for differences."""
        return least_of(self.measure) if [*self.weights.values()] == [1.0] else -math.inf

    def estimate(self, runs: StudyRuns, *, best_only: bool = False) -> Estimate:
        """Return the estimate; with `best_only` that of the best learning rate of each arm alone."""
        arms = [runs.arm(where) for where in self.weights]
        judged = [[run for run in arm.judged() if not best_only or run.lr == arm.best_lr] for arm in arms]
        found = contrast([mean_over_rates(self.measure, runs) for runs in judged], [*self.weights.values()])
        found = cut_at(found, self.least)
        rates = {arm.where: arm.chosen_lrs for arm in arms}
        found = replace(found, rates=rates, **outcomes([run for runs in judged for run in runs]))
        return exponential(found) if self.is_ratio else found

    def pilot(self, runs: StudyRuns) -> list[float]:
        """Return the contrast of each choosing seed; where arms have one rate, of the first seeds, which judge too."""
        arms = [runs.arm(where) for where in self.weights]
        chosen = ([run for lr in arm.chosen_lrs for run in arm.choice.runs_at(lr)] for arm in arms)
        tables = [mean_over_rates(self.measure, runs) for runs in chosen]
        return [*weighted_sums([*self.weights.values()], tables).values()]

    def at_a_common_rate(self, runs: StudyRuns) -> tuple[float, float] | None:
        """Return the contrast of the choosing seeds with all arms at one learning rate, and that rate.

        None with fewer than two arms, and where a value is missing or infinite.
        """
        arms = [runs.arm(where) for where in self.weights]
        lr = runs.common_lr(arms)
        if lr is None or len(arms) < 2:
            return None
        sums = weighted_sums(
            [*self.weights.values()], [values_of(self.measure, arm.choice.runs_at(lr)) for arm in arms]
        )
        value = math.fsum(sums.values()) / len(sums) if sums and all(map(math.isfinite, sums.values())) else math.nan
        return None if math.isnan(value) else (math.exp(value) if self.is_ratio else value, lr)


@dataclass(frozen=True, slots=True)
class Slope:
    """The mean over seeds of the least-squares slope of a measure on ln(option), or on the option itself."""

    where: str
    over: str
    """The full name of a numeric option, such as `model.depth` or `optim.lr`."""
    measure: Measure = FINAL_LOSS
    is_log: bool = True
    minus: str | None = None
    """Conditions of other arms whose slope is subtracted, seed by seed."""

    every_rate = False

    @property
    def text(self) -> str:
        return f"{self.quantity}, mean over seeds: [{self.where}]{minus_text(self.minus)}"

    @property
    def quantity(self) -> str:
        return f"slope of {self.measure.text} on {f'ln({self.over})' if self.is_log else self.over}"

    def estimate(self, runs: StudyRuns, *, best_only: bool = False) -> Estimate:
        """Return the contrast of all levels that is the least-squares slope; `best_only` as for `Contrast`."""
        weights: dict[str, float] = {}
        for where, sign in ((self.where, 1.0), *([(self.minus, -1.0)] if self.minus is not None else [])):
            if self.over == LR:
                runs.arm_of_grid(where)  # so that a best learning rate at the edge of this range makes the claim void
            levels = runs.levels(where, self.over)
            for level, slope in zip(levels, slope_weights(np.log(levels) if self.is_log else levels), strict=True):
                weights[",".join(filter(None, [where, f"{self.over}={level:.17g}"]))] = sign * slope
        return Contrast(weights, self.measure).estimate(runs, best_only=best_only)


@dataclass(frozen=True, slots=True)
class Share:
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
        rate = "learning rate" if self.lr == "every" else "chosen learning rate"
        seeds = (
            f"whose runs at every {rate} are {' or '.join(self.states)}" if self.states else f"that learn at no {rate}"
        )
        return f"share of seeds {seeds}: [{self.where}]{minus_text(self.minus)}"

    @property
    def quantity(self) -> str:
        return ("difference in the " if self.minus else "") + self.text.partition(":")[0]

    def estimate(self, runs: StudyRuns) -> Estimate:
        select = runs.arm if self.lr == "chosen" else runs.arm_of_grid
        arms = [select(where) for where in (self.where, self.minus) if where is not None]
        judged = [[*chain(*complete_seeds(arm.runs).values())] if self.lr == "every" else arm.judged() for arm in arms]
        rates = {arm.where: arm.learning_rates if self.lr == "every" else arm.chosen_lrs for arm in arms}
        groups = [self._counted(each) for each in judged]
        if not all(groups):
            return Estimate(math.nan, rates=rates)
        shares = [share(sum(group), len(group)) for group in groups]
        found = shares[0] if len(shares) == 1 else _difference(*shares)
        diverged = sum(run.result == DIVERGED for each in judged for run in each)
        return replace(found, rates=rates, bad=sum(map(sum, groups)), diverged=diverged)

    def _counted(self, runs: Sequence[RunRecord]) -> list[bool]:
        return [
            all(run.result in self.states if self.states else not run.has_learned for run in each)
            for each in by_seed(runs).values()
        ]


def share(count: int, n: int) -> Estimate:
    return Estimate(count / n, partial(share_sequence, count, n), n, f"{BETS}, {count} of {n}")


def _difference(share: Estimate, other: Estimate) -> Estimate:
    def interval(alpha: float) -> Bounds:
        (low, high), (other_low, other_high) = share.interval(alpha / 2), other.interval(alpha / 2)
        return low - other_high, high - other_low

    method = f"{share.method} minus {other.method.rpartition(', ')[2]}"
    return Estimate(share.value - other.value, interval, share.n + other.n, method)


# Contrasts with a name


def difference(arm: str, other: str, measure: Measure = FINAL_LOSS) -> Contrast:
    """Return the estimator of a paired difference: `arm` minus `other`."""
    return Contrast({arm: 1.0, other: -1.0}, measure)


def interaction(a: str, b: str, c: str, d: str, measure: Measure = FINAL_LOSS) -> Contrast:
    """Return the estimator of a difference of differences: (a - b) - (c - d)."""
    return Contrast({a: 1.0, b: -1.0, c: -1.0, d: 1.0}, measure)
