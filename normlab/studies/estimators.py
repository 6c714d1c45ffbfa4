"""Estimators of a study: each returns an estimate with intervals over seeds, from the judged runs of some arms.

An estimator is data (a frozen dataclass), so that a criterion has a text and a hash. scipy and statsmodels compute the
intervals; where a run diverged, the signed-rank interval of `analysis/intervals.py` needs no finite loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any, Protocol

import numpy as np

from normlab.analysis.arms import CHOOSING_SEEDS, Arm, StudyRuns, plausible_lrs
from normlab.analysis.cells import Cell, count_bad
from normlab.analysis.contrasts import fisher_p, slope_weights
from normlab.analysis.intervals import Replicate, paired_test
from normlab.analysis.results import RunResult
from normlab.errors import ConfigError, unknown
from normlab.store.format import DIVERGED
from normlab.studies.measures import FINAL_LOSS, Measure, StepsTo, values_of

BOUNDS = ("low", "high", "low90", "high90")
"""The bounds of the intervals of 95 and 90 %."""


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
    """The quantity of each seed."""
    diverged: int = 0
    """Number of judged runs that diverged."""
    bad: int = 0
    """Number of judged runs that diverged, are stuck or regressed; for a share, the number that counts."""
    undefined: int = 0
    """Number of seeds without the quantity: a run lacks the measure, or diverged on both sides."""
    rates: Mapping[str, float | None] = field(default_factory=dict)
    """The learning rate of each arm."""

    @property
    def bounds(self) -> dict[str, Any]:
        """The bounds that the estimate has, by name."""
        return {name: bound for name in BOUNDS if (bound := getattr(self, name)) is not None}


def both_levels(interval: Callable[[float], tuple[Any, Any]]) -> dict[str, Any]:
    """Return the bounds of the 95 and the 90 % interval, given the interval at a significance level."""
    return dict(zip(BOUNDS, map(float, (*interval(0.05), *interval(0.10))), strict=True))


class Estimator(Protocol):
    """Estimates one quantity from the runs of a study."""

    @property
    def chooses_rate(self) -> bool:
        """Whether a best learning rate at the edge of its grid makes the estimate meaningless."""
        ...

    @property
    def text(self) -> str:
        """What is estimated."""
        ...

    @property
    def quantity(self) -> str:
        """The name of the estimate with its unit, for an axis."""
        ...

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate."""
        ...


def over_seeds(values: Mapping[Replicate, float]) -> Estimate:
    """Return the mean of a quantity over seeds with its intervals.

    NaN without an interval if there is no seed, or if the quantity of one is NaN.
    """
    undefined = sum(map(math.isnan, values.values()))
    if undefined or not values:
        return Estimate(math.nan, n=len(values), undefined=undefined)
    wide, narrow = paired_test(values), paired_test(values, 0.90)
    finite = [value for value in values.values() if math.isfinite(value)]
    return Estimate(
        wide.estimate, wide.low, wide.high, narrow.low, narrow.high, wide.design.n, wide.p,
        "t over seeds" if wide.test == "paired t" else wide.test,
        float(np.std(finite, ddof=1)) if len(finite) == len(values) > 1 else None,
        {f"{a}" if a == b else f"{a}/{b}": value for (a, b), value in values.items()},
    )  # fmt: skip


def over_rates(
    tables: Sequence[Mapping[float | None, Mapping[Replicate, float]]], combine: Callable[[Sequence[float]], float]
) -> Estimate:
    """Return the estimate at the first learning rate of each arm, with the union of the intervals at all of them.

    Args:
        tables: For each arm its values by learning rate and replicate.
        combine: Returns the quantity of a seed from the values of the arms.
    """
    found: list[Estimate] = []
    for values in product(*(table.values() for table in tables)):
        common = sorted(set(values[0]).intersection(*values[1:]), key=str)
        found.append(over_seeds({seed: combine([each[seed] for each in values]) for seed in common}))
    if not found:
        return Estimate(math.nan)
    first = found[0]
    if any(each.undefined for each in found):
        return Estimate(math.nan, n=first.n, undefined=max(each.undefined for each in found))
    union: dict[str, Any] = {}
    for name in (*BOUNDS, "p"):
        known = [bound for each in found if (bound := getattr(each, name)) is not None]
        union[name] = (min if name.startswith("low") else max)(known) if len(known) == len(found) else None
    both = replace(first, **union)
    widths = [each.high - each.low for each in (first, both) if each.low is not None and each.high is not None]
    if first.deviation is not None and len(widths) == 2 and 0 < widths[0] < widths[1] < math.inf:
        both = replace(both, deviation=first.deviation * (widths[1] / widths[0]))
    return both


def exponential(estimate: Estimate) -> Estimate:
    """Return the estimate of exp(x) from that of x; the p-value is that of exp(x) = 1."""

    def exp(value: float) -> float:
        return math.exp(value) if value < 700 else math.inf

    bounds = {name: exp(bound) for name, bound in estimate.bounds.items()}
    seeds = {seed: exp(value) for seed, value in estimate.seeds.items()}
    return replace(estimate, value=exp(estimate.value), seeds=seeds, **bounds)


def _outcomes(runs: Sequence[RunResult]) -> dict[str, Any]:
    return {"diverged": sum(run.state == DIVERGED for run in runs), "bad": count_bad(runs)}


def _minus(other: str | None) -> str:
    return f", minus that of [{other}]" if other else ""


@dataclass(frozen=True, slots=True)
class Contrast:
    """The mean over seeds of sum_a w_a m_a, for arms a with weights w_a and a measure m.

    The interval is that of the paired t test (`paired_test`), for all learning rates that are not worse than the best
    one of their arm (`plausible_lrs`). With a single arm of weight 1 it is the mean of the
    measure, with weights +1 and -1 a paired difference, with +1, -1, -1, +1 a difference of differences.
    """

    weights: Mapping[str, float]
    """The weight of each arm, by its conditions."""
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
        """Whether a best learning rate at the edge of its grid makes the estimate meaningless."""
        return self.lr == "best"

    @property
    def text(self) -> str:
        """What is estimated."""
        terms = " ".join(
            f"{'+' if w > 0 else '-'} {'' if abs(w) == 1 else f'{abs(w):g} '}[{arm}]" for arm, w in self.weights.items()
        )
        name = f"{'exp of the ' if self.is_ratio else ''}mean over seeds of {self.measure.text}"
        at = "each arm at its best learning rate" if self.lr == "best" else "at a common learning rate"
        return f"{name}: {terms.removeprefix('+ ')}; {at}"

    @property
    def quantity(self) -> str:
        """The name of the estimate with its unit, for an axis."""
        if not self.is_ratio:
            differences = {1: "", 2: "difference in ", 4: "difference of differences in "}
            return differences.get(len(self.weights), "contrast of ") + self.measure.text
        ratios = {1: "", 2: "ratio of ", 4: "ratio of ratios of "}
        measure = self.measure.text.removeprefix("ln(").removesuffix(")")
        return ratios.get(len(self.weights), "exp of a contrast of ") + measure

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate."""
        arms = [runs.arm(where) for where in self.weights]
        rates = runs.rate_of(arms, self.lr)
        tables = [
            {
                rate: values_of(self.measure, arm.judged(rate))
                for rate in (arm.plausible_lrs if self.lr == "best" else [rates[arm.where]])
            }
            for arm in arms
        ]
        judged = [run for arm in arms for run in arm.judged(rates[arm.where])]
        found = replace(over_rates(tables, self._sum), rates=rates, **_outcomes(judged))
        return exponential(found) if self.is_ratio else found

    def _sum(self, values: Sequence[float]) -> float:
        """Return sum_a w_a m_a; NaN if terms of both signs are infinite."""
        return sum(weight * value for weight, value in zip(self.weights.values(), values, strict=True) if weight)


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
        """What is estimated."""
        return f"{self.quantity}, mean over seeds: [{self.where}]{_minus(self.minus)}"

    @property
    def quantity(self) -> str:
        """The name of the estimate with its unit, for an axis."""
        return f"slope of {self.measure.text} on {f'ln({self.over})' if self.is_log else self.over}"

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate: that of the contrast of all levels that is the least-squares slope."""
        weights: dict[str, float] = {}
        for where, sign in ((self.where, 1.0), (self.minus, -1.0)):
            if where is not None:
                levels = runs.levels(where, self.over)
                slope = slope_weights(np.log(levels) if self.is_log else levels)
                conditions = [",".join(filter(None, [where, f"{self.over}={level:.17g}"])) for level in levels]
                weights |= dict(zip(conditions, (sign * weight for weight in slope), strict=True))
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
        """What is estimated."""
        what = f"are {' or '.join(self.states)}" if self.states else "have not learned"
        who = f"runs that {what}, at the best learning rate"
        if self.lr == "every":
            who = f"seeds whose runs all {what}" if self.states else "seeds that learn at no learning rate"
        return f"share of {who}: [{self.where}]{_minus(self.minus)}"

    @property
    def quantity(self) -> str:
        """The name of the estimate with its unit, for an axis."""
        return ("difference in the " if self.minus else "") + self.text.partition(":")[0]

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate."""
        from statsmodels.stats.proportion import confint_proportions_2indep

        select = runs.arm if self.lr == "best" else runs.arm_of_grid
        arms = [select(where) for where in (self.where, self.minus) if where is not None]
        rates = {arm.where: arm.best_lr if self.lr == "best" else None for arm in arms}
        groups = [self._outcomes(arm) for arm in arms]
        if not all(groups):
            return Estimate(math.nan, rates=rates)
        (bad, n), *others = [(sum(group), len(group)) for group in groups]
        found = binomial(bad, n)
        for other_bad, other_n in others:
            bounds = both_levels(
                lambda alpha: confint_proportions_2indep(bad, n, other_bad, other_n, method="newcomb", alpha=alpha)  # noqa: B023
            )
            p = fisher_p(bad, n, other_bad, other_n)
            method = f"Fisher's exact test, {bad} of {n} and {other_bad} of {other_n}"
            found = Estimate(bad / n - other_bad / other_n, n=n + other_n, p=p, method=method, **bounds)
        diverged = sum(run.state == DIVERGED for arm in arms for run in self._runs(arm))
        return replace(found, rates=rates, bad=sum(map(sum, groups)), diverged=diverged)

    def _runs(self, arm: Arm) -> list[RunResult]:
        return arm.judged(arm.best_lr) if self.lr == "best" else [run for run in arm.runs if run.has_loss]

    def _outcomes(self, arm: Arm) -> list[bool]:
        """Return whether each run (or seed) counts."""
        by_seed: dict[Replicate, list[bool]] = {}
        for run in self._runs(arm):
            counts = run.state in self.states if self.states else not run.has_learned
            by_seed.setdefault(run.replicate, []).append(counts)
        return [all(each) for each in by_seed.values()]


def binomial(count: int, n: int) -> Estimate:
    """Return the share count / n with its exact binomial intervals."""
    from statsmodels.stats.proportion import proportion_confint

    bounds = both_levels(lambda alpha: proportion_confint(count, n, alpha, "beta"))
    return Estimate(count / n, n=n, method=f"exact binomial, {count} of {n}", **bounds)


NUMBERS = {
    "sensitivity": "mean of min(loss, ln V) over the grid, minus the lowest loss, nats/token",
    "highest_rate": "highest learning rate that has learned",
}


@dataclass(frozen=True, slots=True)
class OverGrid:
    """One number of each seed from all of its runs in an arm, and the mean over seeds; with `minus`, the difference.

    sensitivity: S = mean_r min(loss_r, ln V) - min_r loss_r over the runs r of a seed, which differ in learning rate
    and in the other options that the arm leaves free. A seed of which no run has learned is compared with the lowest
    loss of the other arm. It is the S of Wortsman et al. 2023 (arXiv:2309.14322) for each seed, so that the interval is
    the t interval over seeds: with six seeds the interval of a percentile bootstrap is too narrow.

    highest_rate: the ratio of the two arms' highest learning rates at which a run has learned. The grid resolves it to
    one step, by which the interval is wider at each end. If a seed learns at the highest learning rate of the grid, the
    interval has no bound on that side.
    """

    number: str
    where: str
    minus: str | None = None

    chooses_rate = False

    def __post_init__(self) -> None:
        if self.number not in NUMBERS:
            raise ConfigError(f"OverGrid: {unknown('number', self.number, NUMBERS)}")

    @property
    def text(self) -> str:
        """What is estimated."""
        mean, minus = "mean", _minus(self.minus)
        if self.number == "highest_rate":
            mean, minus = "geometric mean", minus.replace("minus", "over", 1)
        return f"{NUMBERS[self.number]}, {mean} over seeds: [{self.where}]{minus}"

    @property
    def quantity(self) -> str:
        """The name of the estimate with its unit, for an axis."""
        if self.number == "highest_rate":
            return f"{'ratio of the ' if self.minus else ''}{NUMBERS[self.number]}"
        return f"{'difference in ' if self.minus else ''}S, nats/token"

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate."""
        arms = [runs.arm_of_grid(where) for where in (self.where, self.minus) if where is not None]
        by_arm = [self._by_seed(arm) for arm in arms]
        seeds = sorted(set(by_arm[0]).intersection(*by_arm[1:]), key=str)
        values = {seed: self._value(*(each[seed] for each in by_arm)) for seed in seeds}
        estimate = replace(over_seeds(values), **_outcomes([run for arm in arms for run in arm.runs]))
        return exponential(self._widen(estimate, arms)) if self.number == "highest_rate" else estimate

    def _widen(self, estimate: Estimate, arms: Sequence[Arm]) -> Estimate:
        """Return the estimate of a highest learning rate with the resolution of the grid in its interval."""
        top = [any(run.has_learned and run.lr == arm.learning_rates[-1] for run in arm.runs) for arm in arms]
        step = max(_step(arm.learning_rates) for arm in arms)
        below = -math.inf if len(top) > 1 and top[1] else -step
        above = math.inf if top[0] else step
        bounds = estimate.bounds
        if len(bounds) < len(BOUNDS):
            return estimate
        wider = {name: bound + (below if name.startswith("low") else above) for name, bound in bounds.items()}
        return replace(estimate, **wider)

    def _by_seed(self, arm: Arm) -> dict[Replicate, list[RunResult]]:
        """Return the runs of each seed that has all runs of the grid."""
        by_seed: dict[Replicate, list[RunResult]] = {}
        for run in arm.runs:
            if run.has_loss:
                by_seed.setdefault(run.replicate, []).append(run)
        most = max(map(len, by_seed.values()), default=0)
        return {seed: each for seed, each in by_seed.items() if len(each) == most}

    def _value(self, runs: Sequence[RunResult], others: Sequence[RunResult] = ()) -> float:
        number = self._highest_rate if self.number == "highest_rate" else self._sensitivity
        return number(runs, others) - (number(others, runs) if others else 0.0)

    def _highest_rate(self, runs: Sequence[RunResult], _: Sequence[RunResult]) -> float:
        """Return ln of the highest learning rate that has learned; below the grid by one step if none has."""
        rates = sorted({run.lr for run in runs})
        learned = [run.lr for run in runs if run.has_learned]
        return math.log(max(learned)) if learned else math.log(rates[0]) - _step(rates)

    def _sensitivity(self, runs: Sequence[RunResult], others: Sequence[RunResult]) -> float:
        start = max(run.record.corpus.baselines.uniform for run in runs)
        reference = runs if any(run.has_learned for run in runs) else [*runs, *others]
        lowest = min(run.loss for run in reference)
        return float(np.mean([min(run.loss, start) for run in runs])) - lowest if lowest < math.inf else math.nan


def _step(rates: Sequence[float]) -> float:
    """Return the logarithm of the largest ratio of successive learning rates."""
    return max((math.log(b / a) for a, b in pairwise(rates)), default=0.0)


# The noise over seeds, which says what a size can decide


@dataclass(frozen=True, slots=True)
class Deviation:
    """The standard deviation over seeds of the final loss at the best learning rate, with the chi-squared interval."""

    where: str

    chooses_rate = True
    quantity = "standard deviation over seeds of the final validation loss, nats/token"

    @property
    def text(self) -> str:
        """What is estimated."""
        return f"{self.quantity}: [{self.where}]"

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

    def bound(q: float) -> float:
        return sd * math.sqrt((n - 1) / float(chi2.ppf(q, n - 1)))

    bounds = both_levels(lambda alpha: (bound(1 - alpha / 2), bound(alpha / 2)))
    return Estimate(sd, n=n, method="chi-squared", **bounds)


@dataclass(frozen=True, slots=True)
class FalsePositives:
    """How often the whole procedure finds a difference between an arm and itself, with p < 0.05.

    The seeds are split at random into two groups. Each group chooses its learning rate on its first seeds and is judged
    on the others, as two arms of a `Contrast`. The interval is binomial, for the draws.
    """

    where: str
    draws: int = 1000

    chooses_rate = False
    quantity = "share of random splits with p < 0.05"

    @property
    def text(self) -> str:
        """What is estimated."""
        return f"share of {self.draws} random splits of the seeds of [{self.where}] into two arms with p < 0.05"

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
            rejected += estimate.p is not None and estimate.p < 0.05
        return binomial(rejected, self.draws)

    def _table(self, arm: Arm, members: Sequence[int]) -> dict[float | None, dict[Replicate, float]]:
        """Return the losses of a group's judging seeds, at the learning rates that are plausible for the group."""
        number = {arm.seeds[member]: position for position, member in enumerate(members)}
        cell = Cell((), (), [run for run in arm.runs if run.replicate[0] in number])
        choice = Cell((), (), [run for run in cell.runs if number[run.replicate[0]] < CHOOSING_SEEDS])
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


# Contrasts with a name


def difference(arm: str, other: str, measure: Measure = FINAL_LOSS, lr: str = "best") -> Contrast:
    """Return the estimator of a paired difference: `arm` minus `other`."""
    return Contrast({arm: 1.0, other: -1.0}, measure, lr)


def interaction(a: str, b: str, c: str, d: str, measure: Measure = FINAL_LOSS, lr: str = "best") -> Contrast:
    """Return the estimator of a difference of differences: (a - b) - (c - d)."""
    return Contrast({a: 1.0, b: -1.0, c: -1.0, d: 1.0}, measure, lr)


def ratio_of_steps(arm: str, other: str, loss: float) -> Contrast:
    """Return the estimator of the ratio of the steps that two arms need to reach a loss."""
    return Contrast({arm: 1.0, other: -1.0}, StepsTo(loss), is_ratio=True)
