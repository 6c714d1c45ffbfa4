"""What every estimator has in common: its interface, the estimate that it returns, and the steps to a typical value.

The intervals of `over_seeds` and `share` hold at every number of seeds at once (`analysis/sequences.py`), so that a
study may stop when its claims are decided. An estimate whose interval holds at a fixed number of seeds says so in its
`method`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from normlab.analysis.arms import StudyRuns
from normlab.analysis.cells import count_bad
from normlab.analysis.contrasts import weighted_sums
from normlab.analysis.intervals import Replicate, design_of
from normlab.analysis.sequences import share_sequence, typical_sequence, typical_value
from normlab.base.errors import ConfigError
from normlab.store.format import DIVERGED
from normlab.store.record import RunRecord
from normlab.studies.measures import Measure, values_of

Bounds = tuple[float, float]
SIGNED_RANKS = "confidence sequence of the center of symmetry, by bets on signed ranks (Reynolds 1975)"
BETS = "confidence sequence of a share, by bets (Robbins 1970)"
LARGEST_EXPONENT = 700
"""exp(x) overflows a float above x = 709; from this number on it counts as infinite."""


def no_bounds(alpha: float) -> Bounds:
    return -math.inf, math.inf


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    interval: Callable[[float], Bounds] = no_bounds
    """The interval at a significance level: of 95 % at 0.05."""
    n: int = 0
    """Number of seeds; of a difference of shares those of both arms together, and of false positives the draws."""
    method: str = ""
    """What the interval is."""
    deviation: float | None = None
    """Standard deviation over seeds of the quantity whose typical value is `value`."""
    seeds: Mapping[str, float] = field(default_factory=dict)
    diverged: int = 0
    bad: int = 0
    """Number of judged runs that diverged, are stuck or regressed; for a share, the number that counts."""
    left_out: int = 0
    """Number of seeds that are not in the estimate, because a run diverged or has not learned."""
    undefined: int = 0
    """Number of seeds without the quantity, because a run lacks the measure."""
    stays_undefined: bool = False
    """Whether `value` is NaN with any later seeds, too."""
    rates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The learning rates that were used, by arm."""

    @property
    def bounds(self) -> Bounds:
        """The interval of 95 %."""
        return self.interval(0.05)


class Estimator(ABC):
    """Estimates one quantity from the runs of a study: all that planning, judging and reporting a claim calls.

    A subclass is a frozen dataclass in a file of `normlab/studies/`. Its fields say what is compared, and their `repr`
    is part of the hash of a criterion. It takes its arms by `StudyRuns.arm`, which records them: the runs of these arms
    are trained, and a fault of one makes the verdict void. The first paragraph of its docstring is its line in
    `normlab list estimators`.
    """

    @property
    @abstractmethod
    def text(self) -> str:
        """What is estimated, and of which arms, in one line."""

    @property
    @abstractmethod
    def quantity(self) -> str:
        """The name of the estimate with its unit, for an axis."""

    @abstractmethod
    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate; NaN if these runs do not determine it.

        Planned runs, which have no loss yet, are passed too, to find the arms.

        Raises:
            ConfigError: The runs do not have the arms, or the quantity is not defined for them.
        """

    @property
    def every_rate(self) -> bool:
        """Whether it needs the runs of the judging seeds at every learning rate of the grid, not the chosen ones."""
        return False

    # An estimator whose arms are means over their chosen learning rates has these two besides.

    def estimate_at_best(self, runs: StudyRuns) -> Estimate | None:
        """Return the estimate with each arm at its best learning rate alone, or None if there is no such estimate."""
        return None

    def at_a_common_rate(self, runs: StudyRuns) -> tuple[float, float] | None:
        """Return the value of the choosing seeds with all arms at one learning rate, and that rate, or None."""
        return None

    def on_symmetric_scale(self, value: float) -> float:
        """Return an estimate on the scale on which values are symmetric over seeds: ln, if it is exp of theirs."""
        return value

    # An estimator that is the typical value of a quantity over seeds has a power.

    @property
    def has_power(self) -> bool:
        """Whether the power of a claim is known, from the values that `pilot` returns."""
        return False

    def pilot(self, runs: StudyRuns) -> list[float]:
        """Return the value of each choosing seed, on the scale on which values are symmetric over seeds."""
        return []


# From the runs to a value of each seed


def mean_over_rates(measure: Measure, runs: Sequence[RunRecord]) -> dict[Replicate, float]:
    """Return the mean of a measure over the learning rates of each seed that has all of them."""
    rates = sorted({run.lr for run in runs})
    if not rates:
        return {}
    by_rate: list[dict[Replicate, float]] = []
    for lr in rates:
        by_rate.append(values_of(measure, [run for run in runs if run.lr == lr]))
    # The mean of a seed that lacks a rate would be one over other rates.
    shared = set.intersection(*map(set, by_rate))
    means: dict[Replicate, float] = {}
    for seed in sorted(shared, key=str):
        means[seed] = math.fsum(values[seed] for values in by_rate) / len(rates)
    return means


# From the values of seeds to an estimate


def over_seeds(values: Mapping[Replicate, float]) -> Estimate:
    """Return the typical value of a quantity over independent seeds: the center of its symmetric distribution.

    NaN without an interval if there is no seed, or if the quantity of one is NaN.

    Raises:
        ConfigError: Seeds of weights and of data are crossed, so that the values depend on each other.
    """
    if design_of(values).crossed:
        raise ConfigError("a study needs independent seeds: leave out data.seed, or give each run its own")
    # A confidence sequence is one of values in the order in which they came.
    replicates = sorted(values)
    numbers = [values[replicate] for replicate in replicates]
    undefined = sum(map(math.isnan, numbers))
    # The estimate from the other seeds would be that of seeds whose runs happen to have the measure.
    if undefined or not numbers:
        return Estimate(math.nan, n=len(numbers), undefined=undefined)
    seeds: dict[str, float] = {}
    for (weights_seed, data_seed), number in zip(replicates, numbers, strict=True):
        name = f"{weights_seed}" if weights_seed == data_seed else f"{weights_seed}/{data_seed}"
        seeds[name] = number
    return Estimate(
        value=typical_value(numbers),
        interval=partial(typical_sequence, numbers),
        n=len(numbers),
        method=SIGNED_RANKS,
        deviation=float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None,
        seeds=seeds,
    )


def contrast(tables: Sequence[Mapping[Replicate, float]], weights: Sequence[float]) -> Estimate:
    """Return the typical value over seeds of the weighted sum of the arms' values.

    A seed of which a value is infinite is left out.
    """
    shared = set.intersection(*map(set, tables))
    # Infinite is the value of a run that has diverged or not learned: such seeds are counted, not averaged.
    infinite: set[Replicate] = set()
    for table in tables:
        infinite |= {seed for seed in shared if math.isinf(table[seed])}
    finite_tables: list[dict[Replicate, float]] = []
    for table in tables:
        finite_tables.append({seed: table[seed] for seed in shared - infinite})
    return replace(over_seeds(weighted_sums(weights, finite_tables)), left_out=len(infinite))


def share(count: int, n: int) -> Estimate:
    return Estimate(count / n, partial(share_sequence, count, n), n, f"{BETS}, {count} of {n}")


# From one estimate to another


def exponential(estimate: Estimate) -> Estimate:
    """Return the estimate of exp(x) from that of x."""

    def exp(value: float) -> float:
        return math.exp(value) if value < LARGEST_EXPONENT else math.inf

    def interval(alpha: float) -> Bounds:
        low, high = estimate.interval(alpha)
        return exp(low), exp(high)

    seeds = {seed: exp(value) for seed, value in estimate.seeds.items()}
    return replace(estimate, value=exp(estimate.value), seeds=seeds, interval=interval)


def ln_of_ratio(ratio: float) -> float:
    """Return ln of a ratio, and -inf of one that no ratio is below."""
    return math.log(ratio) if ratio > 0 else -math.inf


# What estimators add about their arms


def outcomes(runs: Sequence[RunRecord]) -> dict[str, int]:
    return {"diverged": sum(run.result == DIVERGED for run in runs), "bad": count_bad(runs)}


def minus_text(where: str | None) -> str:
    return f", minus that of [{where}]" if where else ""
