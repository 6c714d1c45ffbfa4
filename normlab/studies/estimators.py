"""Estimators of a study: each returns an estimate with intervals over seeds, from the judged runs of some arms.

An estimator is data (a frozen dataclass), so that a criterion has a text and a hash. scipy and statsmodels compute the
intervals; where a run diverged, the signed-rank interval of `analysis/intervals.py` is used, which needs no finite loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Protocol

import numpy as np

from normlab.analysis.cells import BAD_OUTCOMES
from normlab.analysis.intervals import Replicate, paired_test
from normlab.analysis.results import RunResult
from normlab.errors import ConfigError, unknown
from normlab.store.format import DIVERGED
from normlab.studies.arms import Arm, StudyRuns
from normlab.studies.measures import FINAL_LOSS, Measure, StepsTo, values_of


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
        {_name(replicate): value for replicate, value in values.items()},
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
        return replace(Estimate(math.nan), n=first.n, undefined=max(each.undefined for each in found))
    low, low90 = (_extreme(min, [getattr(each, name) for each in found]) for name in ("low", "low90"))
    high, high90, p = (_extreme(max, [getattr(each, name) for each in found]) for name in ("high", "high90", "p"))
    widths = [
        high - low for low, high in ((first.low, first.high), (low, high)) if low is not None and high is not None
    ]
    deviation = first.deviation
    if deviation is not None and len(widths) == 2 and 0 < widths[0] < widths[1] < math.inf:
        deviation *= widths[1] / widths[0]
    return replace(first, low=low, high=high, low90=low90, high90=high90, p=p, deviation=deviation)


def _extreme(choose: Callable[[Iterable[float]], float], values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return choose(numbers) if len(numbers) == len(values) else None


def _name(replicate: Replicate) -> str:
    seed, data_seed = replicate
    return f"{seed}" if seed == data_seed else f"{seed}/{data_seed}"


def _counted(estimate: Estimate, arms: Sequence[Arm], rates: Mapping[str, float | None]) -> Estimate:
    """Return the estimate with the learning rates of its arms, and the number of judged runs with a bad outcome."""
    states = [run.state for arm in arms for run in arm.judged(rates[arm.where])]
    bad = sum(state in BAD_OUTCOMES for state in states)
    return replace(estimate, rates=dict(rates), diverged=states.count(DIVERGED), bad=bad)


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
        """Reject an unknown choice of learning rates."""
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
        name = (
            f"exp of the mean over seeds of {self.measure.text}"
            if self.is_ratio
            else f"mean over seeds of {self.measure.text}"
        )
        at = "each arm at its best learning rate" if self.lr == "best" else "at a common learning rate"
        return f"{name}: {terms.removeprefix('+ ')}; {at}"

    @property
    def quantity(self) -> str:
        """The name of the estimate with its unit, for an axis."""
        measure = self.measure.text
        differences = {1: "", 2: "difference in ", 4: "difference of differences in "}
        if not self.is_ratio:
            return differences.get(len(self.weights), "contrast of ") + measure
        ratios = {1: "", 2: "ratio of ", 4: "ratio of ratios of "}
        return ratios.get(len(self.weights), "exp of a contrast of ") + measure.removeprefix("ln(").removesuffix(")")

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
        result = _counted(over_rates(tables, self._sum), arms, rates)
        return exponential(result) if self.is_ratio else result

    def _sum(self, values: Sequence[float]) -> float:
        """Return sum_a w_a m_a; NaN if terms of both signs are infinite."""
        return sum(weight * value for weight, value in zip(self.weights.values(), values, strict=True) if weight)


def exponential(estimate: Estimate) -> Estimate:
    """Return the estimate of exp(x) from that of x; the p-value is that of exp(x) = 1."""

    def exp(value: float | None) -> float | None:
        return value if value is None else math.exp(value) if value < 700 else math.inf

    return replace(
        estimate, value=exp(estimate.value), low=exp(estimate.low), high=exp(estimate.high),
        low90=exp(estimate.low90), high90=exp(estimate.high90),
        seeds={seed: exp(value) for seed, value in estimate.seeds.items()},
    )  # fmt: skip


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
        x = f"ln({self.over})" if self.is_log else self.over
        minus = f", minus that of [{self.minus}]" if self.minus else ""
        return f"slope of {self.measure.text} on {x}, mean over seeds: [{self.where}]{minus}"

    @property
    def quantity(self) -> str:
        """The name of the estimate with its unit, for an axis."""
        return f"slope of {self.measure.text} on {f'ln({self.over})' if self.is_log else self.over}"

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate: that of the contrast of all levels that is the least-squares slope."""
        weights = self._weights(runs, self.where, 1.0)
        if self.minus:
            weights |= self._weights(runs, self.minus, -1.0)
        return Contrast(weights, self.measure).estimate(runs)

    def _weights(self, runs: StudyRuns, where: str, sign: float) -> dict[str, float]:
        """Return the weight (x_k - mean x) / sum_j (x_j - mean x)^2 of each level k, by its conditions."""
        levels = runs.levels(where, self.over)
        x = np.log(levels) if self.is_log else np.array(levels)
        centred = x - x.mean()
        weights = sign * centred / max(float((centred**2).sum()), 1e-300)
        conditions = [",".join(filter(None, [where, f"{self.over}={level:.17g}"])) for level in levels]
        return dict(zip(conditions, weights.tolist(), strict=True))


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
        """Reject an unknown choice of learning rates."""
        if self.lr not in ("best", "every"):
            raise ConfigError(f"Share: lr={self.lr!r}: choose 'best' or 'every'")

    @property
    def text(self) -> str:
        """What is estimated."""
        what = f"are {' or '.join(self.states)}" if self.states else "have not learned"
        who = f"runs that {what}, at the best learning rate"
        if self.lr == "every":
            who = f"seeds whose runs all {what}" if self.states else "seeds that learn at no learning rate"
        minus = f", minus that of [{self.minus}]" if self.minus else ""
        return f"share of {who}: [{self.where}]{minus}"

    @property
    def quantity(self) -> str:
        """The name of the estimate with its unit, for an axis."""
        return ("difference in the " if self.minus else "") + self.text.partition(":")[0]

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate."""
        from scipy.stats import fisher_exact
        from statsmodels.stats.proportion import confint_proportions_2indep

        select = runs.arm if self.lr == "best" else runs.arm_of_grid
        arms = [select(where) for where in (self.where, self.minus) if where is not None]
        rates = {arm.where: arm.best_lr if self.lr == "best" else None for arm in arms}
        groups = [self._outcomes(arm) for arm in arms]
        diverged = sum(run.state == DIVERGED for arm in arms for run in self._runs(arm))
        (bad, n), *others = [(sum(group), len(group)) for group in groups]
        if not all(groups):
            return Estimate(math.nan, rates=rates)
        if not others:
            return replace(binomial(bad, n), rates=rates, bad=bad, diverged=diverged)
        other_bad, other_n = others[0]
        low, high, low90, high90 = (
            float(bound)
            for alpha in (0.05, 0.10)
            for bound in confint_proportions_2indep(bad, n, other_bad, other_n, method="newcomb", alpha=alpha)
        )
        p = float(fisher_exact([[bad, n - bad], [other_bad, other_n - other_bad]]).pvalue)  # pyright: ignore[reportAttributeAccessIssue]
        method = f"Fisher's exact test, {bad} of {n} and {other_bad} of {other_n}"
        share = bad / n - other_bad / other_n
        return Estimate(
            share, low, high, low90, high90, n + other_n, p, method,
            rates=rates, bad=bad + other_bad, diverged=diverged,
        )  # fmt: skip

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

    low, high, low90, high90 = (
        float(bound)  # pyright: ignore[reportArgumentType]
        for alpha in (0.05, 0.10)
        for bound in proportion_confint(count, n, alpha, "beta")
    )
    return Estimate(count / n, low, high, low90, high90, n, method=f"exact binomial, {count} of {n}")


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
        """Reject an unknown number."""
        if self.number not in NUMBERS:
            raise ConfigError(f"OverGrid: {unknown('number', self.number, NUMBERS)}")

    @property
    def text(self) -> str:
        """What is estimated."""
        is_ratio = self.number == "highest_rate"
        minus = f"{', over' if is_ratio else ', minus'} that of [{self.minus}]" if self.minus else ""
        mean = "geometric mean" if is_ratio else "mean"
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
        states = [run.state for arm in arms for run in arm.runs]
        bad = sum(state in BAD_OUTCOMES for state in states)
        estimate = replace(over_seeds(values), diverged=states.count(DIVERGED), bad=bad)
        return exponential(self._widen(estimate, arms)) if self.number == "highest_rate" else estimate

    def _widen(self, estimate: Estimate, arms: Sequence[Arm]) -> Estimate:
        """Return the estimate of a highest learning rate with the resolution of the grid in its interval."""
        top = [any(run.has_learned and run.lr == arm.learning_rates[-1] for run in arm.runs) for arm in arms]
        step = max(_step(arm.learning_rates) for arm in arms)
        below = math.inf if len(top) > 1 and top[1] else step
        above = math.inf if top[0] else step
        low, high, low90, high90 = estimate.low, estimate.high, estimate.low90, estimate.high90
        if low is None or high is None or low90 is None or high90 is None:
            return estimate
        return replace(estimate, low=low - below, high=high + above, low90=low90 - below, high90=high90 + above)

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
        start = max(run.record.corpus.baselines.uniform or math.inf for run in runs)
        reference = runs if any(run.has_learned for run in runs) else [*runs, *others]
        lowest = min(run.loss for run in reference)
        return float(np.mean([min(run.loss, start) for run in runs])) - lowest if lowest < math.inf else math.nan


def _step(rates: Sequence[float]) -> float:
    """Return the logarithm of the largest ratio of successive learning rates."""
    return max((math.log(b / a) for a, b in pairwise(rates)), default=0.0)


def difference(arm: str, other: str, measure: Measure = FINAL_LOSS, lr: str = "best") -> Contrast:
    """Return the estimator of a paired difference: `arm` minus `other`."""
    return Contrast({arm: 1.0, other: -1.0}, measure, lr)


def interaction(a: str, b: str, c: str, d: str, measure: Measure = FINAL_LOSS, lr: str = "best") -> Contrast:
    """Return the estimator of a difference of differences: (a - b) - (c - d)."""
    return Contrast({a: 1.0, b: -1.0, c: -1.0, d: 1.0}, measure, lr)


def ratio_of_steps(arm: str, other: str, loss: float) -> Contrast:
    """Return the estimator of the ratio of the steps that two arms need to reach a loss."""
    return Contrast({arm: 1.0, other: -1.0}, StepsTo(loss), is_ratio=True)
