"""Intervals of means over seeds, paired tests, and Holm's correction.

The loss of a diverged run is infinity, which ranks worse than every number.

A replicate is a pair of levels of two random factors: the seed of the initial weights and the seed of the data order.
Replicates that share no level are independent. Where levels repeat in both factors the design is crossed, and a x b
runs hold far fewer than a b independent values.

Shapes: n replicates, of a levels of the first factor and b of the second; m comparisons.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from normlab.analysis.settings import SEEDS
from normlab.base.errors import counted

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


class PairedTest(NamedTuple):
    estimate: float
    """Mean of the differences, or their pseudomedian; infinite if most runs of one side diverged."""
    low: float | None
    high: float | None
    p: float | None
    """Two-sided; None with fewer than two pairs."""
    design: Design
    """The design of the pairs, or of the medians in a signed-rank test of crossed pairs."""
    test: str


def design_of(replicates: Iterable[Replicate]) -> Design:
    replicates = list(replicates)
    first = {seed for seed, _ in replicates}
    second = {data_seed for _, data_seed in replicates}
    return Design(len(replicates), (len(first), len(second)))


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
    mean = sum(numbers)
    # fsum, which raises an error for infinite values of both signs, is exact.
    if all(map(math.isfinite, numbers)):
        mean = math.fsum(numbers) / design.n
    if design.n < 2 or not math.isfinite(mean):
        return Interval(mean, None, None, design)
    from scipy.special import stdtrit  # imported here, because it is slow and a summary of runs needs no interval

    error, freedom = _standard_error(values, mean)
    half = float(stdtrit(freedom, (1 + level) / 2)) * error
    return Interval(mean, max(mean - half, least), mean + half, design)


def paired_test(differences: Mapping[Replicate, float], level: float = LEVEL, *, both_diverged: int = 0) -> PairedTest:
    """Test whether paired differences differ from zero, two-sided.

    No run diverged: the paired t test, with the standard error and the degrees of freedom of `mean_interval`. The test
    is exact for normal independent differences, and conservative for crossed ones. A rank test could never reject at
    5 % with three to five seeds.

    Some runs diverged: Wilcoxon's signed-rank test with its exact null distribution over all signs (ties share their
    mean rank; a zero keeps its rank and has no sign, after Pratt 1959). An infinite difference has the highest rank,
    so no number has to be assumed for a diverged run. The interval holds the shifts that the test does not reject,
    bounded by two of the Walsh averages (d_i + d_j) / 2, and its estimate is their median (Hodges and Lehmann 1963).
    With fewer than six pairs there is no interval, and p is at least 2^(1 - n).

    Crossed differences with divergence are reduced to one median per level, once for each factor, and both are tested:
    the result has the larger p-value with its estimate, and the wider bounds. The medians of one factor share the
    levels of the other, so each test alone rejects too often where the other factor dominates.

    The choice of the test depends on the sizes of the differences, not on their signs. If the two sides are
    exchangeable, each test therefore rejects at its stated rate or less, and so does the whole procedure.

    A difference, first side minus second side, is infinite if one of the two runs diverged, and 0 if both did, as in
    `both_diverged` pairs.

    Raises:
        ValueError: There is no pair, or a difference is NaN.
    """
    design = design_of(differences)
    if not design.n or any(map(math.isnan, differences.values())):
        raise ValueError("paired differences must be numbers, and at least one")
    if both_diverged or not all(map(math.isfinite, differences.values())):
        return _signed_rank_test(differences, level, both_diverged)
    estimate, low, high, _ = mean_interval(differences, level)
    if design.n < 2:
        return PairedTest(estimate, None, None, None, design, "one pair")
    error, freedom = _standard_error(differences, estimate)
    if error == 0:  # the runs are bit-identical, or differ by a constant
        return PairedTest(estimate, low, high, float(estimate == 0), design, "paired t")
    from scipy.special import stdtr

    p = 2 * float(stdtr(freedom, -abs(estimate / error)))
    return PairedTest(estimate, low, high, p, design, "paired t")


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected for m comparisons by Holm's method.

    The k-th smallest p-value is multiplied by m - k + 1, then made at most 1 and no smaller than the one before. The
    probability of any false rejection is at most the level, for any dependence between the comparisons. None stays
    None and is not counted in m.

    Source: Holm 1979, Scandinavian Journal of Statistics 6, 65-70.
    """
    known: list[tuple[float, int]] = []
    for index, p in enumerate(p_values):
        if p is not None:
            known.append((p, index))
    corrected: list[float | None] = [None] * len(p_values)
    previous = 0.0
    for rank, (p, index) in enumerate(sorted(known)):
        # A corrected p-value is never below that of a smaller p-value.
        previous = max(previous, min(1.0, p * (len(known) - rank)))
        corrected[index] = previous
    return corrected


def _signed_rank_test(differences: Mapping[Replicate, float], level: float, both_diverged: int) -> PairedTest:
    design = design_of(differences)
    diverged = sum(map(math.isinf, differences.values())) + both_diverged
    pairs = f"{diverged} of {counted(design.n, 'pair')} with a diverged run"
    if both_diverged:
        pairs += f", {both_diverged} on both sides"
    if not design.crossed:
        return _signed_rank(list(differences.values()), level, design, f"signed-rank ({pairs})")
    tests: list[PairedTest] = []
    for factor, size in enumerate(design.levels):
        medians = list(map(_median, _by_level(differences, factor).values()))
        name = f"signed-rank of medians per {SEEDS[factor]} ({pairs}, crossed {design})"
        tests.append(_signed_rank(medians, level, Design(size, (size, size)), name))
    first, second = tests
    weaker = max(tests, key=lambda result: result.p or 0.0)
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return weaker._replace(low=None, high=None)
    return weaker._replace(low=min(first.low, second.low), high=max(first.high, second.high))


def _median(values: Sequence[float]) -> float:
    """Return the median; 0, which favours no side, if the middle values are -inf and +inf."""
    ordered = sorted(values)
    middle = ordered[(len(ordered) - 1) // 2] / 2 + ordered[len(ordered) // 2] / 2
    if math.isnan(middle):
        return 0.0
    return middle


def _signed_rank(differences: list[float], level: float, design: Design, test: str) -> PairedTest:
    low, high, estimate = _hodges_lehmann(differences, level)
    if design.n < 2:
        return PairedTest(estimate, None, None, None, design, test)
    # A zero has a rank but no sign: it takes part in ranking, and not in the sum (Pratt 1959).
    ranks: list[int] = []
    statistic = 0
    for rank, value in zip(_doubled_ranks(list(map(abs, differences))), differences, strict=True):
        if value != 0:
            ranks.append(rank)
        if value > 0:
            statistic += rank
    probabilities = _null_distribution(ranks)
    p = 2 * min(math.fsum(probabilities[: statistic + 1]), math.fsum(probabilities[statistic:]))
    return PairedTest(estimate, low, high, min(1.0, p), design, test)


def _hodges_lehmann(differences: list[float], level: float) -> tuple[float | None, float | None, float]:
    """Return the lower bound, the upper bound and the median of the Walsh averages.

    The average of +inf and -inf is undefined. It counts as -inf for the lower bound and as +inf for the upper bound,
    which makes the interval conservative.
    """
    n = len(differences)
    walsh: list[float] = []
    for i in range(n):
        for j in range(i, n):
            walsh.append(differences[i] / 2 + differences[j] / 2)  # (a + b) / 2 may overflow
    defined: list[float] = []
    lows: list[float] = []
    highs: list[float] = []
    for value in walsh:
        if math.isnan(value):
            lows.append(-math.inf)
            highs.append(math.inf)
        else:
            defined.append(value)
            lows.append(value)
            highs.append(value)
    estimate = _median(defined)
    probabilities = _null_distribution(range(2, 2 * n + 1, 2))
    # The most averages at an end whose probability is at most half of what the interval excludes.
    below, total = -1, probabilities[0]
    while total <= (1 - level) / 2:
        below += 1
        total += probabilities[below + 1]
    if below < 0:
        return None, None, estimate
    excluded = below // 2  # the distribution is over doubled ranks
    return sorted(lows)[excluded], sorted(highs)[-1 - excluded], estimate


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Return twice the rank of each value, an integer; ties share their mean rank."""
    import numpy as np

    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    return (2 * np.cumsum(sizes) - sizes + 1)[group].tolist()


def _null_distribution(ranks: Iterable[int]) -> list[float]:
    """Return the probability of each sum of positive ranks, from 0 on, for random signs.

    `scipy.stats.wilcoxon` has no exact distribution for ties or zeros.
    """
    import numpy as np

    probabilities = np.ones(1)
    for rank in ranks:
        sums = np.zeros(len(probabilities) + rank)
        sums[: len(probabilities)] = probabilities
        sums[rank:] += probabilities
        probabilities = sums / 2
    return probabilities.tolist()


def _standard_error(values: Mapping[Replicate, float], mean: float) -> tuple[float, float]:
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
    parts: list[float] = []
    freedoms: list[float] = []
    level_means: list[dict[Hashable, float]] = []
    for factor in (0, 1):
        levels = _by_level(values, factor)
        means: dict[Hashable, float] = {}
        shares: list[float] = []
        for level, members in levels.items():
            means[level] = math.fsum(members) / len(members)
            shares.append(len(members) / design.n)
        total = math.fsum(share**2 for share in shares)
        spread = math.fsum((w * (y - mean)) ** 2 for w, y in zip(shares, means.values(), strict=True))
        parts.append(total * spread / math.fsum(w**2 * (1 - 2 * w + total) for w in shares))
        freedoms.append(max(1.0, design.n**2 / sum(len(members) ** 2 for members in levels.values()) - 1))
        level_means.append(means)
    variance = sum(parts)
    if design.complete:
        # Each part holds the variance of the interaction, and the variance of the mean holds it once.
        rows, columns = level_means
        interaction = math.fsum((value - rows[i] - columns[j] + mean) ** 2 for (i, j), value in values.items())
        variance = max(*parts, variance - interaction / math.prod(size - 1 for size in design.levels) / design.n)
    return math.sqrt(variance), min(freedoms)


def _by_level(values: Mapping[Replicate, float], factor: int) -> dict[Hashable, list[float]]:
    levels: dict[Hashable, list[float]] = {}
    for replicate, value in values.items():
        levels.setdefault(replicate[factor], []).append(value)
    return levels
