"""Estimators of a study: each returns an estimate with intervals over seeds, from the judged runs of some arms.

An estimator is data (a frozen dataclass), so that a criterion has a text and a hash. scipy and statsmodels compute the
intervals; where a run diverged, the signed-rank interval of `report/intervals.py` is used, which needs no finite loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from normlab.report.cells import BAD_OUTCOMES, Cell
from normlab.report.intervals import Replicate, paired_test
from normlab.report.learning_rates import sensitivity
from normlab.report.settings import LR
from normlab.store.format import DIVERGED
from normlab.studies.arms import Arm, StudyRuns
from normlab.studies.measures import FINAL_LOSS, Measure, StepsTo, values_of

DRAWS = 2000
"""Bootstrap samples."""


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
    """Standard deviation over seeds of the quantity whose mean is `value`."""
    seeds: Mapping[str, float] = field(default_factory=dict)
    """The quantity of each seed."""
    diverged: int = 0
    bad: int = 0
    """Judged runs that diverged; and those that diverged, are stuck or regressed."""
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

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate."""
        ...


def over_seeds(values: Mapping[Replicate, float]) -> Estimate:
    """Return the mean of a quantity over seeds with its intervals; without values NaN and no interval."""
    if not values:
        return Estimate(math.nan)
    wide, narrow = paired_test(values), paired_test(values, 0.90)
    finite = [value for value in values.values() if math.isfinite(value)]
    return Estimate(
        wide.estimate, wide.low, wide.high, narrow.low, narrow.high, wide.design.n, wide.p,
        wide.test.replace("paired t", "t over seeds"),
        float(np.std(finite, ddof=1)) if len(finite) == len(values) > 1 else None,
        {_name(replicate): value for replicate, value in values.items()},
    )  # fmt: skip


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

    The interval is that of the paired t test (`paired_test`). With a single arm of weight 1 it is the mean of the
    measure, with weights +1 and -1 a paired difference, with +1, -1, -1, +1 a difference of differences.
    """

    weights: Mapping[str, float]
    """The weight of each arm, by its conditions."""
    measure: Measure = FINAL_LOSS
    lr: str = "best"
    """best: each arm at its best learning rate. common: all at the rate with the best mean rank."""
    is_ratio: bool = False
    """Whether the measure is a logarithm, and the estimate exp of the contrast: a ratio."""

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

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate."""
        arms = [runs.arm(where) for where in self.weights]
        rates = runs.rate_of(arms, self.lr)
        values = [values_of(self.measure, arm.judged(rates[arm.where])) for arm in arms]
        common = sorted(set(values[0]).intersection(*values[1:]), key=str)
        sums = {replicate: self._sum([each[replicate] for each in values]) for replicate in common}
        result = _counted(over_seeds(sums), arms, rates)
        return exponential(result) if self.is_ratio else result

    def _sum(self, values: Sequence[float]) -> float:
        """Return sum_a w_a m_a; infinite terms of both signs leave the order unknown, and count as 0."""
        terms = [weight * value for weight, value in zip(self.weights.values(), values, strict=True) if weight]
        signs = {math.copysign(1, term) for term in terms if math.isinf(term)}
        return math.fsum(terms) if not signs else signs.pop() * math.inf if len(signs) == 1 else 0.0


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

    @property
    def chooses_rate(self) -> bool:
        """Whether a best learning rate at the edge of its grid makes the estimate meaningless."""
        return self.over != LR

    @property
    def text(self) -> str:
        """What is estimated."""
        x = f"ln({self.over})" if self.is_log else self.over
        minus = f", minus that of [{self.minus}]" if self.minus else ""
        return f"slope of {self.measure.text} on {x}, mean over seeds: [{self.where}]{minus}"

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate."""
        slopes, arms, rates = self._slopes(runs, self.where)
        if self.minus:
            others, more, more_rates = self._slopes(runs, self.minus)
            slopes = {seed: slopes[seed] - others[seed] for seed in slopes if seed in others}
            arms, rates = [*arms, *more], rates | more_rates
        return _counted(over_seeds(slopes), arms, rates)

    def _slopes(self, runs: StudyRuns, where: str) -> tuple[dict[Replicate, float], list[Arm], dict[str, float | None]]:
        points: dict[Replicate, list[tuple[float, float]]] = {}
        levels, arms, rates = runs.levels(where, self.over), [], {}
        for level in levels:
            conditions = ",".join(filter(None, [where, f"{self.over}={level:.17g}"]))
            arm = runs.arm(conditions)
            rate = level if self.over == LR else arm.best_lr
            arms, rates = [*arms, arm], rates | {conditions: rate}
            judged = [run for run in arm.runs if run.has_loss] if self.over == LR else arm.judged(rate)
            for replicate, value in values_of(self.measure, judged).items():
                points.setdefault(replicate, []).append((math.log(level) if self.is_log else level, value))
        complete = {seed: each for seed, each in points.items() if len(each) == len(levels) > 1}
        slopes = {
            seed: float(np.polyfit([x for x, _ in each], [value for _, value in each], 1)[0])
            for seed, each in complete.items()
            if all(math.isfinite(value) for _, value in each)
        }
        return slopes, arms, rates


@dataclass(frozen=True, slots=True)
class Share:
    """The share of judged runs with a bad outcome (diverged, stuck or regressed), by the exact binomial interval.

    With `minus`, the difference of two shares; p is that of Fisher's exact test, and the interval Newcombe's.
    """

    where: str
    minus: str | None = None
    lr: str = "best"
    """best: at the best learning rate. any: at all learning rates and seeds."""
    states: tuple[str, ...] = BAD_OUTCOMES

    chooses_rate = False

    @property
    def text(self) -> str:
        """What is estimated."""
        at = "at the best learning rate" if self.lr == "best" else "at all learning rates"
        minus = f", minus that of [{self.minus}]" if self.minus else ""
        return f"share of runs that {'/'.join(self.states)}, {at}: [{self.where}]{minus}"

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate."""
        from scipy.stats import fisher_exact
        from statsmodels.stats.proportion import confint_proportions_2indep, proportion_confint

        arms = [runs.arm(where) for where in (self.where, self.minus) if where is not None]
        rates = {arm.where: arm.best_lr if self.lr == "best" else None for arm in arms}
        groups = [arm.judged(arm.best_lr) if self.lr == "best" else [r for r in arm.runs if r.has_loss] for arm in arms]
        counts = [(sum(run.state in self.states for run in group), len(group)) for group in groups]
        if not all(n for _, n in counts):
            return Estimate(math.nan, rates=rates)
        bad, n = counts[0]
        states = [run.state for group in groups for run in group]
        more = {
            "diverged": states.count(DIVERGED),
            "bad": sum(state in BAD_OUTCOMES for state in states),
            "rates": rates,
        }
        if len(counts) == 1:
            low, high, low90, high90 = (
                float(bound)  # pyright: ignore[reportArgumentType]
                for alpha in (0.05, 0.10)
                for bound in proportion_confint(bad, n, alpha, "beta")
            )
            return Estimate(bad / n, low, high, low90, high90, n, method=f"exact binomial, {bad} of {n}", **more)
        other_bad, others = counts[1]
        low, high, low90, high90 = (
            float(bound)
            for alpha in (0.05, 0.10)
            for bound in confint_proportions_2indep(bad, n, other_bad, others, method="newcomb", alpha=alpha)
        )
        p = float(fisher_exact([[bad, n - bad], [other_bad, others - other_bad]]).pvalue)  # pyright: ignore
        method = f"Fisher's exact test, {bad} of {n} and {other_bad} of {others}"
        return Estimate(bad / n - other_bad / others, low, high, low90, high90, n + others, p, method, **more)


@dataclass(frozen=True, slots=True)
class SensitivityDifference:
    """The difference of the sensitivities S to the learning rate of two arms, by bootstrap over seeds.

    S is that of `learning_rates.sensitivity`; an arm without a usable learning rate has the mean of min(loss, ln V)
    minus the lowest loss of the other arm. The bootstrap draws seeds, the same ones for both arms (percentile
    interval).
    """

    where: str
    minus: str

    chooses_rate = False

    @property
    def text(self) -> str:
        """What is estimated."""
        return f"sensitivity S to the learning rate, nats/token: [{self.where}] - [{self.minus}], bootstrap over seeds"

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate."""
        arms = [runs.arm(self.where), runs.arm(self.minus)]
        cells = [Cell((), (), list(arm.runs)) for arm in arms]
        seeds = sorted(set.intersection(*(_replicates(cell) for cell in cells)), key=str)
        if not seeds:
            return Estimate(math.nan)
        rng = np.random.default_rng(0)
        draws = rng.integers(len(seeds), size=(DRAWS, len(seeds)))
        values = [self._difference(cells, [seeds[index] for index in draw]) for draw in draws.tolist()]
        low, low90, high90, high = np.quantile(values, [0.025, 0.05, 0.95, 0.975]).tolist()
        value = self._difference(cells, seeds)
        estimate = Estimate(value, low, high, low90, high90, len(seeds), method=f"bootstrap over seeds, {DRAWS} draws")
        states = [run.state for arm in arms for run in arm.runs]
        return replace(estimate, diverged=states.count(DIVERGED), bad=sum(state in BAD_OUTCOMES for state in states))

    def _difference(self, cells: Sequence[Cell], seeds: Sequence[Replicate]) -> float:
        """Return S of the first cell minus S of the second one, over some seeds, which may repeat."""
        copies: list[Replicate] = [(number, number) for number in range(len(seeds))]
        chosen = [
            {lr: dict(zip(copies, (losses[seed] for seed in seeds), strict=True)) for lr, losses in cell.losses.items()}
            for cell in cells
        ]
        starts = [_loss_at_start(cell) for cell in cells]
        found = [
            sensitivity(losses, start, cell.unusable_lrs).value
            for losses, start, cell in zip(chosen, starts, cells, strict=True)
        ]
        lowest = min(
            _mean(each.values(), start)
            for losses, start in zip(chosen, starts, strict=True)
            for each in losses.values()
        )
        first, second = (
            value
            if value is not None
            else float(np.mean([_mean(each.values(), start) for each in losses.values()])) - lowest
            for value, losses, start in zip(found, chosen, starts, strict=True)
        )
        return first - second


def _mean(losses: Iterable[float], start: float) -> float:
    return float(np.mean([min(loss, start) for loss in losses]))


def _replicates(cell: Cell) -> set[Replicate]:
    """Return the replicates with a loss at every learning rate."""
    return set.intersection(*(set(by_replicate) for by_replicate in cell.losses.values())) if cell.losses else set()


def _loss_at_start(cell: Cell) -> float:
    return max((run.record.corpus.baselines.uniform or math.inf) for run in cell.runs)


def difference(arm: str, other: str, measure: Measure = FINAL_LOSS, lr: str = "best") -> Contrast:
    """Return the estimator of a paired difference: `arm` minus `other`."""
    return Contrast({arm: 1.0, other: -1.0}, measure, lr)


def interaction(a: str, b: str, c: str, d: str, measure: Measure = FINAL_LOSS, lr: str = "best") -> Contrast:
    """Return the estimator of a difference of differences: (a - b) - (c - d)."""
    return Contrast({a: 1.0, b: -1.0, c: -1.0, d: 1.0}, measure, lr)


def ratio_of_steps(arm: str, other: str, loss: float) -> Contrast:
    """Return the estimator of the ratio of the steps that two arms need to reach a loss."""
    return Contrast({arm: 1.0, other: -1.0}, StepsTo(loss), is_ratio=True)
