"""Means over seeds with their intervals, differences paired by seed with their p-values, and Holm's correction.

Pure functions of floats. The loss of a diverged run is infinity: worse than every number, and in no mean.

A replicate is a pair of levels of two random factors: the seed of the initial weights and the seed of the data order.
Replicates that share no level are independent. Where levels repeat in both factors the design is crossed, and a x b
runs hold far fewer than a b independent values.

Shapes: n replicates, of a levels of the first factor and b of the second; m comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from normlab.report.settings import SEEDS

LEVEL = 0.95
"""Coverage of every interval."""

Replicate = tuple[Hashable, Hashable]
"""A level of each factor of `settings.SEEDS`: the seed, and the seed of the data order."""


class Design(NamedTuple):
    """How many replicates there are, and how many levels of each factor."""

    n: int
    levels: tuple[int, int]

    @property
    def crossed(self) -> bool:
        """Whether both factors vary and a level of one of them repeats, so that the values depend on each other."""
        return min(self.levels) > 1 and self.levels != (self.n, self.n)

    @property
    def crossing(self) -> list[int] | None:
        """The levels of both factors; None where the values are independent."""
        return list(self.levels) if self.crossed else None

    @property
    def complete(self) -> bool:
        """Whether every level of one factor occurs with every level of the other."""
        return self.n == math.prod(self.levels)

    @property
    def fixed(self) -> str | None:
        """The factor that has one level while the other varies; the interval does not include its variance."""
        return SEEDS[self.levels.index(1)] if self.n > 1 and 1 in self.levels else None

    def __str__(self) -> str:
        """`3` independent values, `6x6` crossed ones, `11 of 6x6` where the crossing is incomplete."""
        crossing = "x".join(map(str, self.levels))
        return f"{self.n}" if not self.crossed else crossing if self.complete else f"{self.n} of {crossing}"


class Interval(NamedTuple):
    """An estimate and its interval; low and high are None where there is no interval."""

    estimate: float
    low: float | None
    high: float | None
    design: Design


class PairedTest(NamedTuple):
    """The result of a paired comparison."""

    estimate: float
    """Mean of the differences, or their pseudomedian; infinite where most runs of one side diverged."""
    low: float | None
    high: float | None
    p: float | None
    """Two-sided; None with fewer than two pairs."""
    design: Design
    """Of the pairs, or of the medians that a signed-rank test of crossed pairs uses."""
    test: str
    """The name of the test."""


def design_of(replicates: Iterable[Replicate]) -> Design:
    """Return how many replicates there are, and how many levels of each factor."""
    replicates = list(replicates)
    first, second = ({replicate[factor] for replicate in replicates} for factor in (0, 1))
    return Design(len(replicates), (len(first), len(second)))


def format_losses(losses: Mapping[Replicate, float]) -> str:
    """Return `2.2425 ± 0.0031`, the mean of one value or more and half of its interval, for every text and page.

    Of two values both are shown, `2.2412 and 2.2438`: a t interval would be 12.7 times wider than their difference.
    """
    if len(losses) == 2:
        return " and ".join(f"{losses[replicate]:.4f}" for replicate in sorted(losses, key=str))
    mean, _, high, _ = mean_interval(losses)
    return f"{mean:.4f}" if high is None else f"{mean:.4f} ± {high - mean:.4f}"


def mean_interval(values: Mapping[Replicate, float], level: float = LEVEL) -> Interval:
    """Return the mean and its interval by Student's t: mean +- t(f) * standard error.

    Independent replicates: the standard error is s / sqrt(n), s over n - 1, and f = n - 1. If one factor has a single
    level, the interval is over the other factor and does not include the variance of the constant one.

    Crossed replicates: two random effects, see `_crossed_error`.

    There is no interval if n < 2 or a value is infinite; the mean is that infinity then.

    Raises:
        ValueError: There is no value.
    """
    design = design_of(values)
    if not design.n:
        raise ValueError("a mean of no values")
    numbers = values.values()
    mean = math.fsum(numbers) / design.n if all(map(math.isfinite, numbers)) else sum(numbers)
    if design.n < 2 or not math.isfinite(mean):
        return Interval(mean, None, None, design)
    from scipy.special import stdtrit  # slow to import, and a summary of runs needs no interval

    error, freedom = _standard_error(values, mean)
    half = float(stdtrit(freedom, (1 + level) / 2)) * error
    return Interval(mean, mean - half, mean + half, design)


def paired_test(differences: Mapping[Replicate, float], level: float = LEVEL, *, both_diverged: int = 0) -> PairedTest:
    """Test whether paired differences are other than zero, two-sided.

    No run diverged: the paired t test, with the standard error and the degrees of freedom of `mean_interval`. It is
    exact for normal independent differences and close for losses over seeds; with three to five seeds a rank test
    could never reject at 5 %. It is conservative for crossed differences.

    Some runs diverged: Wilcoxon's signed-rank test with its exact null distribution over all signs (ties share their
    mean rank; a zero keeps its rank and has no sign, after Pratt 1959). An infinite difference has the highest rank,
    so no number has to be assumed for a diverged run. The interval holds the shifts that the test does not reject,
    bounded by two of the Walsh averages (d_i + d_j) / 2, and its estimate is their median (Hodges and Lehmann 1963).
    With fewer than six pairs there is no interval, and p is at least 2^(1 - n).

    Crossed differences with divergence are reduced to one median per level, once for each factor, and both are tested:
    the result has the larger p-value with its estimate, and the wider bounds. The medians of one factor share the
    levels of the other, so each test alone rejects too often where the other factor dominates.

    The choice of the test depends on the sizes of the differences only, not on their signs. So where the two sides
    are exchangeable each test, and hence the whole procedure, rejects at its stated rate or less.

    Args:
        differences: First side less second side; infinite if one of the two runs diverged, 0 if both did.
        level: Coverage of the interval.
        both_diverged: In how many pairs both runs diverged.

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
        return PairedTest(estimate, low, high, 1.0 if estimate == 0 else 0.0, design, "paired t")
    from scipy.special import stdtr

    p = 2 * float(stdtr(freedom, -abs(estimate / error)))
    return PairedTest(estimate, low, high, p, design, "paired t")


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected for m comparisons: the k-th smallest times m - k + 1, at most 1, never decreasing.

    The probability of any false rejection is at most the level, however the comparisons depend on each other. None
    stays None and does not count.

    Source: Holm 1979, Scandinavian Journal of Statistics 6, 65-70.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    previous = 0.0
    for rank, (p, index) in enumerate(known):
        corrected[index] = previous = max(previous, min(1.0, p * (len(known) - rank)))
    return corrected


def _signed_rank_test(differences: Mapping[Replicate, float], level: float, both_diverged: int) -> PairedTest:
    """The signed-rank test of the differences, or of their medians per level if they are crossed."""
    design = design_of(differences)
    diverged = sum(map(math.isinf, differences.values())) + both_diverged
    both = f", {both_diverged} on both sides" if both_diverged else ""
    pairs = f"{diverged} of {design.n} {'pair' if design.n == 1 else 'pairs'} with a diverged run{both}"
    if not design.crossed:
        return _signed_rank(list(differences.values()), level, design, f"signed-rank ({pairs})")
    first, second = (
        _signed_rank(
            [_median(values) for values in _by_level(differences, factor).values()],
            level,
            Design(size, (size, size)),
            f"signed-rank of medians per {SEEDS[factor]} ({pairs}, crossed {design})",
        )
        for factor, size in enumerate(design.levels)
    )
    weaker = max(first, second, key=lambda result: result.p or 0.0)
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return weaker._replace(low=None, high=None)
    return weaker._replace(low=min(first.low, second.low), high=max(first.high, second.high))


def _median(values: Sequence[float]) -> float:
    """The median; 0, which favours neither side, where its two middle values are -inf and +inf."""
    ordered = sorted(values)
    middle = ordered[(len(ordered) - 1) // 2] / 2 + ordered[len(ordered) // 2] / 2
    return 0.0 if math.isnan(middle) else middle


def _signed_rank(differences: list[float], level: float, design: Design, test: str) -> PairedTest:
    low, high, estimate = _hodges_lehmann(differences, level)
    if design.n < 2:
        return PairedTest(estimate, None, None, None, design, test)
    ranks = _doubled_ranks([abs(value) for value in differences])
    signed = [(rank, value > 0) for rank, value in zip(ranks, differences, strict=True) if value]
    probabilities = _null_distribution([rank for rank, _ in signed])
    statistic = sum(rank for rank, is_positive in signed if is_positive)
    p = 2 * min(math.fsum(probabilities[: statistic + 1]), math.fsum(probabilities[statistic:]))
    return PairedTest(estimate, low, high, min(1.0, p), design, test)


def _hodges_lehmann(differences: list[float], level: float) -> tuple[float | None, float | None, float]:
    """Both bounds and the median of the Walsh averages.

    The average of +inf and -inf is undefined. The interval uses -inf for its lower and +inf for its upper bound, which
    makes it conservative.
    """
    n = len(differences)
    pairs = [(differences[i], differences[j]) for i in range(n) for j in range(i, n)]
    walsh = [a / 2 + b / 2 for a, b in pairs]  # (a + b) / 2 may overflow
    estimate = _median([value for value in walsh if not math.isnan(value)])
    probabilities = _null_distribution(range(2, 2 * n + 1, 2))
    below, total = -1, 0.0
    while (total := total + probabilities[below + 1]) <= (1 - level) / 2:
        below += 1
    if below < 0:
        return None, None, estimate
    excluded = below // 2  # the distribution is over doubled ranks
    lows = sorted(-math.inf if math.isnan(value) else value for value in walsh)
    highs = sorted(math.inf if math.isnan(value) else value for value in walsh)
    return lows[excluded], highs[-1 - excluded], estimate


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each value, from 1; ties share their mean rank, which is whole when doubled."""
    import numpy as np

    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    return (2 * np.cumsum(sizes) - sizes + 1)[group].tolist()


def _null_distribution(ranks: Iterable[int]) -> list[float]:
    """Probability of each sum of the positive ranks, from 0 on, where each sign is + or - with probability 1/2.

    `scipy.stats.wilcoxon` gives it neither for ties nor for zeros.
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
    """The standard error of the mean of n >= 2 values, and its degrees of freedom."""
    design = design_of(values)
    if design.crossed:
        return _crossed_error(values, mean, design)
    n = design.n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values.values()) / (n - 1) / n), n - 1


def _crossed_error(values: Mapping[Replicate, float], mean: float, design: Design) -> tuple[float, float]:
    """The standard error of the mean of crossed values, and its degrees of freedom.

    The model is y_ij = mu + A_i + B_j + E_ij with independent normal effects of variances s_a^2, s_b^2 and s_e^2.

    Complete, a x b: the variance of the mean is s_a^2 / a + s_b^2 / b + s_e^2 / (ab). With the expected mean squares
    E[MS_a] = b s_a^2 + s_e^2, E[MS_b] = a s_b^2 + s_e^2 and E[MS_ab] = s_e^2 its unbiased estimate is
    (MS_a + MS_b - MS_ab) / (ab), here at least max(MS_a, MS_b) / (ab), because s_a^2 and s_b^2 are not negative.

    Incomplete: level i of a factor has the share w_i of the values and the mean y_i. With W = sum w_i^2 the factor
    contributes V = W sum w_i^2 (y_i - mean)^2 / sum w_i^2 (1 - 2 w_i + W) to the variance, which is MS_a / (ab) in
    the complete case, and otherwise too large because y_i includes the other two effects. The sum of both is
    conservative: nothing is subtracted.

    Degrees of freedom: those of the factor with fewer levels, min(a, b) - 1; of unequal shares min(1 / W) - 1, at
    least 1. For a sum of two independent mean squares an interval with the smaller of the two degrees of freedom
    never covers less than it states, for any variances (Mickey & Brown 1966, Annals of Mathematical Statistics
    37, 639-642). Satterthwaite's are more, and cover 88 % instead of 95 % of the time for 2 x 6 with s_b = 0.3 s_a.

    Source: Scheffe 1959, The Analysis of Variance, chapter 7; Searle, Casella & McCulloch 1992, Variance Components.
    """
    parts, freedoms, level_means = [], [], []
    for factor in (0, 1):
        levels = _by_level(values, factor)
        means = {key: math.fsum(members) / len(members) for key, members in levels.items()}
        shares = [len(members) / design.n for members in levels.values()]
        total = math.fsum(share**2 for share in shares)
        spread = math.fsum((w * (y - mean)) ** 2 for w, y in zip(shares, means.values(), strict=True))
        parts.append(total * spread / math.fsum(w**2 * (1 - 2 * w + total) for w in shares))
        freedoms.append(max(1.0, design.n**2 / sum(len(members) ** 2 for members in levels.values()) - 1))
        level_means.append(means)
    variance = sum(parts)
    if design.complete:
        rows, columns = level_means
        interaction = math.fsum((value - rows[i] - columns[j] + mean) ** 2 for (i, j), value in values.items())
        variance = max(*parts, variance - interaction / math.prod(size - 1 for size in design.levels) / design.n)
    return math.sqrt(variance), min(freedoms)


def _by_level(values: Mapping[Replicate, float], factor: int) -> dict[Hashable, list[float]]:
    levels: dict[Hashable, list[float]] = {}
    for replicate, value in values.items():
        levels.setdefault(replicate[factor], []).append(value)
    return levels
