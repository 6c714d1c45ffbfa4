"""Intervals of means over seeds.

A replicate is a pair of levels of two random factors: the seed of the initial weights and the seed of the data order.
Replicates that share no level are independent. Where levels repeat in both factors the design is crossed, and a x b
runs hold far fewer than a b independent values.

Shapes: n replicates, of a levels of the first factor and b of the second.
"""

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from normlab.analysis.settings import SEEDS

LEVEL = 0.95
"""Coverage of every interval."""

Replicate = tuple[Hashable, Hashable]
"""A level of each factor of `settings.SEEDS`: the seed, and the seed of the data order."""


class Design(NamedTuple):
    """The number of replicates, and the number of levels of each factor."""

    n: int
    levels: tuple[int, int]

    @property
    def crossed(self) -> bool:
        """Whether both factors vary and a level repeats, so that values depend on each other."""
        return min(self.levels) > 1 and self.levels != (self.n, self.n)

    @property
    def crossing(self) -> list[int] | None:
        """The levels of both factors; None where the values are independent."""
        if not self.crossed:
            return None
        return list(self.levels)

    @property
    def complete(self) -> bool:
        """Whether every level of one factor occurs with every level of the other."""
        return self.n == math.prod(self.levels)

    @property
    def fixed(self) -> str | None:
        """The factor with one level while the other varies; intervals exclude its variance."""
        if self.n < 2 or 1 not in self.levels:
            return None
        return SEEDS[self.levels.index(1)]

    def __str__(self) -> str:
        """Return `3` if independent, `6x6` if crossed, `11 of 6x6` if incompletely crossed."""
        if not self.crossed:
            return f"{self.n}"
        crossing = "x".join(map(str, self.levels))
        if self.complete:
            return crossing
        return f"{self.n} of {crossing}"


class Interval(NamedTuple):
    """An estimate and its interval; low and high are None where there is no interval."""

    estimate: float
    low: float | None
    high: float | None
    design: Design


def design_of(replicates: Iterable[Replicate]) -> Design:
    n = 0
    seeds: set[Hashable] = set()
    data_seeds: set[Hashable] = set()
    for seed, data_seed in replicates:
        n += 1
        seeds.add(seed)
        data_seeds.add(data_seed)
    return Design(n, (len(seeds), len(data_seeds)))


def format_losses(losses: Mapping[Replicate, float]) -> str:
    """Return `2.2425 ± 0.0031`: the mean of one value or more, and half of its interval.

    Two values are listed, `2.2412 and 2.2438`: their t interval is 12.7 times wider than their difference.
    """
    if len(losses) == 2:
        first, second = sorted(losses, key=str)
        return f"{losses[first]:.4f} and {losses[second]:.4f}"
    mean, _, high, _ = mean_interval(losses)
    if high is None:
        return f"{mean:.4f}"
    return f"{mean:.4f} ± {high - mean:.4f}"


def mean_interval(values: Mapping[Replicate, float], level: float = LEVEL, least: float = -math.inf) -> Interval:
    """Return the mean and its interval by Student's t: mean +- t(f) * standard error, cut at the `least` possible mean.

    Cutting removes only impossible values, so coverage is unchanged.

    Independent replicates: the standard error is s / sqrt(n), where s has n - 1 in its denominator, and f = n - 1. If
    one factor has a single level, the interval does not include the variance of that factor.

    Crossed replicates: two random effects, see `_crossed_error`.

    There is no interval if n < 2. If a value is infinite, the mean is infinite and there is no interval.

    Raises:
        ValueError: There is no value.
    """
    design = design_of(values)
    if not design.n:
        raise ValueError("a mean of no values")
    numbers = values.values()
    # fsum is exact, and raises an error for infinite values of both signs, whose sum is NaN.
    mean = sum(numbers)
    if all(map(math.isfinite, numbers)):
        mean = math.fsum(numbers) / design.n
    if design.n < 2 or not math.isfinite(mean):
        return Interval(mean, None, None, design)
    # Imported here, because it is slow and a summary of runs needs no interval.
    from scipy.special import stdtrit

    error, freedom = standard_error(values, mean)
    half = float(stdtrit(freedom, (1 + level) / 2)) * error
    return Interval(mean, max(mean - half, least), mean + half, design)


def standard_error(values: Mapping[Replicate, float], mean: float) -> tuple[float, float]:
    """Return the standard error of the mean of n >= 2 values, and its degrees of freedom."""
    design = design_of(values)
    if design.crossed:
        return _crossed_error(values, mean, design)
    n = design.n
    squares = math.fsum((value - mean) ** 2 for value in values.values())
    return math.sqrt(squares / (n - 1) / n), n - 1


def _crossed_error(values: Mapping[Replicate, float], mean: float, design: Design) -> tuple[float, float]:
    """Return the standard error of the mean of crossed values, and its degrees of freedom.

    The model is y_ij = mu + A_i + B_j + E_ij with independent normal effects of variances s_a^2, s_b^2 and s_e^2.

    Complete, a x b: the variance of the mean is s_a^2 / a + s_b^2 / b + s_e^2 / (ab). With the expected mean squares
    E[MS_a] = b s_a^2 + s_e^2, E[MS_b] = a s_b^2 + s_e^2 and E[MS_ab] = s_e^2 its unbiased estimate is
    (MS_a + MS_b - MS_ab) / (ab), here at least max(MS_a, MS_b) / (ab), because s_a^2 and s_b^2 are not negative.

    Incomplete: level i of a factor has the share w_i of the values and the mean y_i. With W = sum w_i^2 the factor
    contributes V = W sum w_i^2 (y_i - mean)^2 / sum w_i^2 (1 - 2 w_i + W) to the variance, which is MS_a / (ab) in
    the complete case, and otherwise too large because y_i includes the other two effects. The sum of both is
    conservative: nothing is subtracted.

    Degrees of freedom: min(a, b) - 1, from the factor with fewer levels; for unequal shares min(1 / W) - 1, at least
    1. For a sum of two independent mean squares, an interval with the smaller degrees of freedom never covers less
    than it states, for any variances (Mickey & Brown 1966, Annals of Mathematical Statistics 37, 639-642).
    Satterthwaite's degrees of freedom are larger: their interval covers 88 % instead of 95 % for 2 x 6 with
    s_b = 0.3 s_a.

    Source: Scheffe 1959, The Analysis of Variance, chapter 7; Searle, Casella & McCulloch 1992, Variance Components.
    """
    effects = [_effect_of_factor(values, mean, factor) for factor in (0, 1)]
    parts = [effect.part for effect in effects]
    variance = sum(parts)
    if design.complete:
        # Each part holds the variance of the interaction, and the variance of the mean holds it once.
        rows, columns = effects[0].level_means, effects[1].level_means
        interaction = math.fsum((value - rows[i] - columns[j] + mean) ** 2 for (i, j), value in values.items())
        variance = max(*parts, variance - interaction / math.prod(size - 1 for size in design.levels) / design.n)
    return math.sqrt(variance), min(effect.freedom for effect in effects)


class _Effect(NamedTuple):
    """What one factor adds to the variance of a mean of crossed values; the formulas are those of `_crossed_error`."""

    part: float
    """V."""
    freedom: float
    """The degrees of freedom of V: 1 / W - 1, at least 1."""
    level_means: dict[Hashable, float]
    """y_i."""


def _effect_of_factor(values: Mapping[Replicate, float], mean: float, factor: int) -> _Effect:
    n = len(values)
    level_means: dict[Hashable, float] = {}
    shares: list[float] = []
    squared_sizes = 0
    for level, values_of_level in by_level(values, factor).items():
        size = len(values_of_level)
        level_means[level] = math.fsum(values_of_level) / size
        shares.append(size / n)
        squared_sizes += size**2
    total = math.fsum(share**2 for share in shares)
    spread = math.fsum((w * (y - mean)) ** 2 for w, y in zip(shares, level_means.values(), strict=True))
    part = total * spread / math.fsum(w**2 * (1 - 2 * w + total) for w in shares)
    # 1 / W in integers, which are exact.
    return _Effect(part, max(1.0, n**2 / squared_sizes - 1), level_means)


def by_level(values: Mapping[Replicate, float], factor: int) -> dict[Hashable, list[float]]:
    """Return the values at each level of a factor, 0 or 1."""
    levels: dict[Hashable, list[float]] = {}
    for replicate, value in values.items():
        levels.setdefault(replicate[factor], []).append(value)
    return levels
