"""Estimators of a study: each returns an estimate with intervals over seeds, from the judged runs of some arms.

An estimator is data (a frozen dataclass), so that a criterion has a text and a hash. scipy and statsmodels compute the
intervals; where a run diverged, the signed-rank interval of `analysis/intervals.py` needs no finite loss.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Protocol

import numpy as np

from normlab.analysis.arms import Arm, StudyRuns
from normlab.analysis.cells import count_bad
from normlab.analysis.contrasts import fisher_p, slope_weights, weighted_sums
from normlab.analysis.intervals import Replicate, paired_test
from normlab.errors import ConfigError
from normlab.store.format import DIVERGED
from normlab.store.record import RunRecord
from normlab.studies.measures import FINAL_LOSS, Measure, values_of

BOUNDS = ("low", "high", "low90", "high90")


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate, with intervals of 95 and 90 %."""

    value: float
    low: float | None = None
    high: float | None = None
    low90: float | None = None
    high90: float | None = None
    n: int = 0
    """Number of seeds (of runs, for shares)."""
    p: float | None = None
    """Two-sided p-value of the hypothesis that the true value is 0."""
    method: str = ""
    deviation: float | None = None
    """Standard deviation over seeds of the quantity whose mean is `value`, for the power.

    If the interval is a union over learning rates, it is scaled by the union's width over that of the first interval.
    """
    seeds: Mapping[str, float] = field(default_factory=dict)
    diverged: int = 0
    bad: int = 0
    """Number of judged runs that diverged, are stuck or regressed; for a share, the number that counts."""
    undefined: int = 0
    """Number of seeds without the quantity: a run lacks the measure, or diverged on both sides."""
    rates: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def bounds(self) -> dict[str, Any]:
        return {name: bound for name in BOUNDS if (bound := getattr(self, name)) is not None}


class Estimator(Protocol):
    """Estimates one quantity from the runs of a study."""

    @property
    def chooses_rate(self) -> bool:
        """Whether a best learning rate at the edge of its grid makes the estimate meaningless."""
        ...

    @property
    def text(self) -> str: ...

    @property
    def quantity(self) -> str:
        """The name of the estimate with its unit, for an axis."""
        ...

    def estimate(self, runs: StudyRuns) -> Estimate: ...


def both_levels(interval: Callable[[float], tuple[Any, Any]]) -> dict[str, Any]:
    """Return the bounds of the 95 and the 90 % interval, given the interval at a significance level."""
    return dict(zip(BOUNDS, map(float, (*interval(0.05), *interval(0.10))), strict=True))


def over_seeds(values: Mapping[Replicate, float]) -> Estimate:
    """Return the mean of a quantity over seeds with its intervals.

    NaN without an interval if there is no seed, or if the quantity of one is NaN.
    """
    undefined = sum(map(math.isnan, values.values()))
    if undefined or not values:
        return Estimate(math.nan, n=len(values), undefined=undefined)
    wide, narrow = paired_test(values), paired_test(values, 0.90)
    is_finite = all(map(math.isfinite, values.values()))
    return Estimate(
        wide.estimate, wide.low, wide.high, narrow.low, narrow.high, wide.design.n, wide.p,
        "t over seeds" if wide.test == "paired t" else wide.test,
        float(np.std([*values.values()], ddof=1)) if is_finite and len(values) > 1 else None,
        {f"{a}" if a == b else f"{a}/{b}": value for (a, b), value in values.items()},
    )  # fmt: skip


def over_rates(
    tables: Sequence[Mapping[float | None, Mapping[Replicate, float]]], weights: Sequence[float]
) -> Estimate:
    """Return the contrast at the first learning rate of each arm, with the union of the intervals at all of them.

    A table has the values of an arm by learning rate and replicate.
    """
    found = [over_seeds(weighted_sums(weights, each)) for each in product(*(table.values() for table in tables))]
    if not found:
        return Estimate(math.nan)
    first = found[0]
    if undefined := max(each.undefined for each in found):
        return Estimate(math.nan, n=first.n, undefined=undefined)
    union: dict[str, Any] = {}
    for name in (*BOUNDS, "p"):
        bounds = [getattr(each, name) for each in found]
        union[name] = None if None in bounds else (min if name.startswith("low") else max)(bounds)
    both = replace(first, **union)
    if first.deviation is None or "low" not in both.bounds:
        return both
    narrow, wide = (each.bounds["high"] - each.bounds["low"] for each in (first, both))
    return replace(both, deviation=first.deviation * (wide / narrow)) if 0 < narrow < wide < math.inf else both


def exponential(estimate: Estimate) -> Estimate:
    """Return the estimate of exp(x) from that of x; the p-value is that of exp(x) = 1."""

    def exp(value: float) -> float:
        return math.exp(value) if value < 700 else math.inf

    bounds = {name: exp(bound) for name, bound in estimate.bounds.items()}
    seeds = {seed: exp(value) for seed, value in estimate.seeds.items()}
    return replace(estimate, value=exp(estimate.value), seeds=seeds, **bounds)


def outcomes(runs: Sequence[RunRecord]) -> dict[str, Any]:
    return {"diverged": sum(run.result == DIVERGED for run in runs), "bad": count_bad(runs)}


def minus_text(other: str | None) -> str:
    return f", minus that of [{other}]" if other else ""


@dataclass(frozen=True, slots=True)
class Contrast:
    """The mean over seeds of sum_a w_a m_a, for arms a with weights w_a and a measure m.

    The interval is that of the paired t test (`paired_test`), for all learning rates that are not worse than the best
    one of their arm (`plausible_lrs`). With a single arm of weight 1 it is the mean of the measure, with weights +1 and
    -1 a paired difference, with +1, -1, -1, +1 a difference of differences.
    """

    weights: Mapping[str, float]
    measure: Measure = FINAL_LOSS
    lr: str = "best"
    """best: each arm at its best learning rate. common: all at the rate with the best mean rank."""
    is_ratio: bool = False
    """Whether the measure is a logarithm, and the estimate exp of the contrast: a ratio."""

    def __post_init__(self) -> None:
        if self.lr not in ("best", "common"):
            raise ConfigError(f"Contrast: lr={self.lr!r}: choose 'best' or 'common'")

    @property
    def chooses_rate(self) -> bool:
        return self.lr == "best"

    @property
    def text(self) -> str:
        terms = " ".join(
            f"{'+' if w > 0 else '-'} {'' if abs(w) == 1 else f'{abs(w):g} '}[{arm}]" for arm, w in self.weights.items()
        )
        name = f"{'exp of the ' if self.is_ratio else ''}mean over seeds of {self.measure.text}"
        at = "each arm at its best learning rate" if self.lr == "best" else "at a common learning rate"
        return f"{name}: {terms.removeprefix('+ ')}; {at}"

    @property
    def quantity(self) -> str:
        what, arms = self.measure.text, len(self.weights)
        if not self.is_ratio:
            differences = {1: "", 2: "difference in ", 4: "difference of differences in "}
            return differences.get(arms, "contrast of ") + what
        ratios = {1: "", 2: "ratio of ", 4: "ratio of ratios of "}
        return ratios.get(arms, "exp of a contrast of ") + what.removeprefix("ln(").removesuffix(")")

    def estimate(self, runs: StudyRuns) -> Estimate:
        arms = [runs.arm(where) for where in self.weights]
        rates = runs.rate_of(arms, self.lr)
        tables = [
            {rate: values_of(self.measure, arm.judged(rate)) for rate in lrs}
            for arm in arms
            for lrs in [arm.plausible_lrs if self.lr == "best" else [rates[arm.where]]]
        ]
        judged = [run for arm in arms for run in arm.judged(rates[arm.where])]
        found = replace(over_rates(tables, [*self.weights.values()]), rates=rates, **outcomes(judged))
        return exponential(found) if self.is_ratio else found


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

    chooses_rate = True

    @property
    def text(self) -> str:
        return f"{self.quantity}, mean over seeds: [{self.where}]{minus_text(self.minus)}"

    @property
    def quantity(self) -> str:
        return f"slope of {self.measure.text} on {f'ln({self.over})' if self.is_log else self.over}"

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the contrast of all levels that is the least-squares slope."""
        weights: dict[str, float] = {}
        for where, sign in ((self.where, 1.0), *([(self.minus, -1.0)] if self.minus is not None else [])):
            levels = runs.levels(where, self.over)
            for level, slope in zip(levels, slope_weights(np.log(levels) if self.is_log else levels), strict=True):
                weights[",".join(filter(None, [where, f"{self.over}={level:.17g}"]))] = sign * slope
        return Contrast(weights, self.measure).estimate(runs)


@dataclass(frozen=True, slots=True)
class Share:
    """The share of judged runs that have not learned, by the exact binomial interval.

    A run has learned if it finished with a loss below the band around the unigram entropy. With `minus`, the difference
    of two shares; p is that of Fisher's exact test, and the interval Newcombe's.
    """

    where: str
    minus: str | None = None
    lr: str = "best"
    """best: runs at the best learning rate. every: seeds; one counts if it has not learned at any learning rate."""
    states: tuple[str, ...] = ()
    """Count the runs with one of these outcomes instead."""

    chooses_rate = False

    def __post_init__(self) -> None:
        if self.lr not in ("best", "every"):
            raise ConfigError(f"Share: lr={self.lr!r}: choose 'best' or 'every'")

    @property
    def text(self) -> str:
        what = f"are {' or '.join(self.states)}" if self.states else "have not learned"
        who = f"runs that {what}, at the best learning rate"
        if self.lr == "every":
            who = f"seeds whose runs all {what}" if self.states else "seeds that learn at no learning rate"
        return f"share of {who}: [{self.where}]{minus_text(self.minus)}"

    @property
    def quantity(self) -> str:
        return ("difference in the " if self.minus else "") + self.text.partition(":")[0]

    def estimate(self, runs: StudyRuns) -> Estimate:
        from statsmodels.stats.proportion import confint_proportions_2indep

        select = runs.arm if self.lr == "best" else runs.arm_of_grid
        arms = [select(where) for where in (self.where, self.minus) if where is not None]
        rates = {arm.where: arm.best_lr if self.lr == "best" else None for arm in arms}
        judged = [completed(arm) if self.lr == "every" else arm.judged(arm.best_lr) for arm in arms]
        groups = [self._counted(each) for each in judged]
        if not all(groups):
            return Estimate(math.nan, rates=rates)
        counts = [(sum(group), len(group)) for group in groups]
        found = binomial(*counts[0])
        if len(counts) > 1:
            (bad, n), (other, others) = counts
            bounds = both_levels(
                lambda alpha: confint_proportions_2indep(bad, n, other, others, method="newcomb", alpha=alpha)
            )
            method = f"Fisher's exact test, {bad} of {n} and {other} of {others}"
            p = fisher_p(bad, n, other, others)
            found = Estimate(bad / n - other / others, n=n + others, p=p, method=method, **bounds)
        diverged = sum(run.result == DIVERGED for each in judged for run in each)
        return replace(found, rates=rates, bad=sum(count for count, _ in counts), diverged=diverged)

    def _counted(self, runs: Sequence[RunRecord]) -> list[bool]:
        return [
            all(run.result in self.states if self.states else not run.has_learned for run in each)
            for each in by_seed(runs).values()
        ]


def binomial(count: int, n: int) -> Estimate:
    """Return the share count / n with its exact binomial intervals."""
    from statsmodels.stats.proportion import proportion_confint

    bounds = both_levels(lambda alpha: proportion_confint(count, n, alpha, "beta"))
    return Estimate(count / n, n=n, method=f"exact binomial, {count} of {n}", **bounds)


def completed(arm: Arm) -> list[RunRecord]:
    return [run for run in arm.runs if run.has_loss]


def by_seed(runs: Sequence[RunRecord]) -> dict[Replicate, list[RunRecord]]:
    found: dict[Replicate, list[RunRecord]] = {}
    for run in runs:
        found.setdefault(run.replicate, []).append(run)
    return found


# Contrasts with a name


def difference(arm: str, other: str, measure: Measure = FINAL_LOSS, lr: str = "best") -> Contrast:
    """Return the estimator of a paired difference: `arm` minus `other`."""
    return Contrast({arm: 1.0, other: -1.0}, measure, lr)


def interaction(a: str, b: str, c: str, d: str, measure: Measure = FINAL_LOSS, lr: str = "best") -> Contrast:
    """Return the estimator of a difference of differences: (a - b) - (c - d)."""
    return Contrast({a: 1.0, b: -1.0, c: -1.0, d: 1.0}, measure, lr)
