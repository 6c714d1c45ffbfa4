"""A mean over seeds with its interval, a difference paired by seed with its p-value, and Holm's correction.

Pure functions of floats. A diverged run's loss is infinity: it is worse than every number, and in no mean.

A replicate is a pair of levels of two random factors: the seed of the initial weights, and that of the data order.
Replicates that share no level are independent. Where levels repeat in both factors the design is crossed, and a x b
runs hold far fewer than a b independent values.

Shapes: n replicates, of a levels of the first factor and b of the second; m comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from normlab.report.settings import REPLICATE
from normlab.report.student_t import quantile, tail

LEVEL = 0.95
"""Coverage of every interval."""

Replicate = tuple[Hashable, Hashable]
"""A level of each factor of `settings.REPLICATE`: the seed, and the seed of the data order."""


class Design(NamedTuple):
    """How many replicates there are, and how many levels of each factor."""

    n: int
    levels: tuple[int, int]

    @property
    def crossed(self) -> bool:
        """Whether both factors vary and a level of one of them repeats, so that the values depend on each other."""
        return min(self.levels) > 1 and self.levels != (self.n, self.n)

    @property
    def complete(self) -> bool:
        """Whether every level of one factor occurs with every level of the other."""
        return self.n == math.prod(self.levels)

    @property
    def fixed(self) -> str | None:
        """The factor that has one level while the other varies: no interval holds its variance."""
        return REPLICATE[self.levels.index(1)] if self.n > 1 and 1 in self.levels else None

    def __str__(self) -> str:
        """`3` independent values, `6x6` crossed ones, `11 of 6x6` where the crossing is incomplete."""
        crossing = "x".join(map(str, self.levels))
        return f"{self.n}" if not self.crossed else crossing if self.complete else f"{self.n} of {crossing}"


class Interval(NamedTuple):
    """An estimate and its interval; low and high are None where there is none."""

    estimate: float
    low: float | None
    high: float | None
    design: Design


class Paired(NamedTuple):
    """The result of a paired comparison."""

    estimate: float
    """Mean of the differences, or their pseudomedian; infinite where most runs of one side diverged."""
    low: float | None
    high: float | None
    p: float | None
    """Two-sided; None where there are fewer than two pairs."""
    design: Design
    """Of the pairs; of the medians where a signed-rank test is made of those."""
    test: str
    """Which test it is, in words."""


def design_of(replicates: Iterable[Replicate]) -> Design:
    """Return how many replicates there are, and how many levels of each factor."""
    replicates = list(replicates)
    return Design(len(replicates), (len({one for one, _ in replicates}), len({other for _, other in replicates})))


def mean_interval(values: Mapping[Replicate, float], level: float = LEVEL) -> Interval:
    """Return the mean and its interval by Student's t: mean +- t(f) * standard error.

    Independent replicates: the standard error is s / sqrt(n), s over n - 1, and f = n - 1. Where one factor has a
    single level, the interval is over the other's levels and holds nothing of the variance of the constant one.

    Crossed replicates: `_crossed`, two random effects.

    There is no interval below n = 2, and none where a value is infinite: the mean is that infinity then.

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
    error, freedom = _standard_error(values, mean)
    half = quantile(freedom, level) * error
    return Interval(mean, mean - half, mean + half, design)


def paired(differences: Mapping[Replicate, float], level: float = LEVEL, *, both_diverged: int = 0) -> Paired:
    """Test whether paired differences are other than zero, two-sided.

    A difference is infinite where the run of one side diverged (+inf: the first one's), and 0 where both did; of how
    many that is so is `both_diverged`.

    None diverged: the paired t test, by the standard error and the degrees of freedom of `mean_interval`. Exact for
    normal independent differences, and near enough for what seeds do to a loss; with three to five seeds a rank test
    could never reject at 5 %. Crossed differences are conservative.

    Some diverged: Wilcoxon's signed-rank test, its null distribution exact, by flipping every sign (ties share
    their mean rank; a zero keeps its rank and has no sign, after Pratt 1959). An infinite difference has the
    highest rank, so a run that diverged is a loss by the most and no number need be made up for it. The interval
    inverts the test: it holds the shifts that are not rejected, bounded by two of the Walsh averages
    (d_i + d_j) / 2, and its estimate is their median (Hodges and Lehmann 1963). With fewer than six pairs there is
    none, and p cannot be below 2^(1 - n): a divergence or two in three seeds are no proof.

    Crossed differences are reduced to one median per level, once for each factor, and the test is made of both: the
    larger p-value counts, with its estimate, and the wider bounds. The medians of one factor share the levels of the
    other, so each test alone rejects too often where that other factor dominates; where it does, its own test is the
    valid one.

    Which of the two is done depends on the sizes of the differences only, never on their signs, so that under the
    hypothesis that both sides are exchangeable each of them, and hence the whole, rejects at its stated rate or less.

    Raises:
        ValueError: There is no pair, or a difference is NaN.
    """
    design = design_of(differences)
    if not design.n or any(map(math.isnan, differences.values())):
        raise ValueError("paired differences must be numbers, and at least one")
    if both_diverged or not all(map(math.isfinite, differences.values())):
        return _by_ranks(differences, level, both_diverged)
    estimate, low, high, _ = mean_interval(differences, level)
    if design.n < 2:
        return Paired(estimate, None, None, None, design, "one pair")
    error, freedom = _standard_error(differences, estimate)
    if error == 0:  # the same every time: bit for bit equal runs, or a difference without noise
        return Paired(estimate, low, high, 1.0 if estimate == 0 else 0.0, design, "paired t")
    p = 2 * tail(abs(estimate / error), freedom)
    return Paired(estimate, low, high, p, design, "paired t")


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """P-values corrected for their number m: the k-th smallest times m - k + 1, at most 1, never falling.

    The chance that any of the comparisons without a difference is below the level is then at most the level,
    however they depend on each other. None stays None and does not count.

    Source: Holm 1979, Scandinavian Journal of Statistics 6, 65-70.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    least = 0.0
    for rank, (p, index) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - rank)))
        corrected[index] = least
    return corrected


def _by_ranks(differences: Mapping[Replicate, float], level: float, both_diverged: int) -> Paired:
    """The signed-rank test of the differences; of medians per level where they are crossed."""
    design = design_of(differences)
    diverged = sum(map(math.isinf, differences.values())) + both_diverged
    both = f", {both_diverged} on both sides" if both_diverged else ""
    pairs = f"{diverged} of {design.n} {'pair' if design.n == 1 else 'pairs'} with a diverged run{both}"
    if not design.crossed:
        return _signed_rank(list(differences.values()), level, design, f"signed-rank ({pairs})")
    one, other = (
        _signed_rank(
            [_median(values) for values in _levels(differences, factor).values()],
            level,
            Design(size, (size, size)),
            f"signed-rank of medians per {REPLICATE[factor]} ({pairs}, crossed {design})",
        )
        for factor, size in enumerate(design.levels)
    )
    worse = max(one, other, key=lambda found: found.p or 0.0)
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return worse._replace(low=None, high=None)
    return worse._replace(low=min(one.low, other.low), high=max(one.high, other.high))


def _median(values: Sequence[float]) -> float:
    """The median; 0, which favours neither side, where its two middle values are -inf and +inf."""
    ordered = sorted(values)
    middle = ordered[(len(ordered) - 1) // 2] / 2 + ordered[len(ordered) // 2] / 2
    return 0.0 if math.isnan(middle) else middle


def _signed_rank(differences: list[float], level: float, design: Design, test: str) -> Paired:
    low, high, estimate = _hodges_lehmann(differences, level)
    if design.n < 2:
        return Paired(estimate, None, None, None, design, test)
    ranks = _doubled_ranks([abs(value) for value in differences])
    signed = [(rank, value > 0) for rank, value in zip(ranks, differences, strict=True) if value]
    chances = _null([rank for rank, _ in signed])
    above = sum(rank for rank, positive in signed if positive)
    p = 2 * min(math.fsum(chances[: above + 1]), math.fsum(chances[above:]))
    return Paired(estimate, low, high, min(1.0, p), design, test)


def _hodges_lehmann(differences: list[float], level: float) -> tuple[float | None, float | None, float]:
    """Both bounds and the median of the Walsh averages.

    One of +inf and -inf is no number: it lies below and above every shift with half its weight. The interval takes
    it for the worse of the two each time, which makes it wider, never narrower than it should be.
    """
    n = len(differences)
    pairs = [(differences[i], differences[j]) for i in range(n) for j in range(i, n)]
    walsh = [a / 2 + b / 2 for a, b in pairs]  # not (a + b) / 2, which may overflow
    estimate = _median([value for value in walsh if not math.isnan(value)])
    chances = _null(_doubled_ranks(list(range(1, n + 1))))
    below, total = -1, 0.0
    while (total := total + chances[below + 1]) <= (1 - level) / 2:
        below += 1
    out = below // 2  # of doubled ranks
    if below < 0:
        return None, None, estimate
    lows = sorted(-math.inf if math.isnan(value) else value for value in walsh)
    highs = sorted(math.inf if math.isnan(value) else value for value in walsh)
    return lows[out], highs[-1 - out], estimate


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each, from 1; ties share the mean of theirs, which doubled is whole."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for index in order[start:end]:
            ranks[index] = start + 1 + end
        start = end
    return ranks


def _null(ranks: Sequence[int]) -> list[float]:
    """Chance of each sum of the positive ranks, 0 to all of them, every sign being a fair coin."""
    import numpy as np

    chances = np.zeros(sum(ranks) + 1)
    chances[0] = 1.0
    for rank in ranks:
        flipped = np.zeros_like(chances)
        flipped[rank:] = chances[: len(chances) - rank]
        chances = (chances + flipped) / 2
    return chances.tolist()


def _standard_error(values: Mapping[Replicate, float], mean: float) -> tuple[float, float]:
    """Return the standard error of the mean of n >= 2 values, and its degrees of freedom."""
    design = design_of(values)
    if design.crossed:
        return _crossed(values, mean, design)
    n = design.n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values.values()) / (n - 1) / n), n - 1


def _crossed(values: Mapping[Replicate, float], mean: float, design: Design) -> tuple[float, float]:
    """Return the standard error of the mean of crossed values, and its degrees of freedom.

    The model is y_ij = mu + A_i + B_j + E_ij with independent normal effects of variances s_a^2, s_b^2 and s_e^2.

    Complete, a x b: the variance of the mean is s_a^2 / a + s_b^2 / b + s_e^2 / (ab). With the expected mean squares
    E[MS_a] = b s_a^2 + s_e^2, E[MS_b] = a s_b^2 + s_e^2 and E[MS_ab] = s_e^2 its unbiased estimate is
    (MS_a + MS_b - MS_ab) / (ab); it is never taken below max(MS_a, MS_b) / (ab), as s_a^2 and s_b^2 are not negative.

    Incomplete: level i of a factor has the share w_i of the values and the mean y_i. With W = sum w_i^2 the share of
    that factor in the variance is V = W sum w_i^2 (y_i - mean)^2 / sum w_i^2 (1 - 2 w_i + W), which is MS_a / (ab) in
    the complete case, and too large by what y_i holds of the other two effects. The sum of both is conservative:
    nothing is subtracted.

    Degrees of freedom: those of the factor with fewer levels, min(a, b) - 1; of unequal shares min(1 / W) - 1, at
    least 1. For a sum of two independent mean squares an interval with the smaller of the two degrees of freedom
    never covers less than it states, whatever the variances (Mickey & Brown 1966, Annals of Mathematical Statistics
    37, 639-642). Satterthwaite's are more, and cover 88 % instead of 95 % of the time for 2 x 6 with s_b = 0.3 s_a.

    Source: Scheffe 1959, The Analysis of Variance, chapter 7; Searle, Casella & McCulloch 1992, Variance Components.
    """
    parts, freedoms, level_means = [], [], []
    for factor in (0, 1):
        levels = _levels(values, factor)
        means = {key: math.fsum(own) / len(own) for key, own in levels.items()}
        shares = [len(own) / design.n for own in levels.values()]
        total = math.fsum(share**2 for share in shares)
        spread = math.fsum((w * (y - mean)) ** 2 for w, y in zip(shares, means.values(), strict=True))
        parts.append(total * spread / math.fsum(w**2 * (1 - 2 * w + total) for w in shares))
        freedoms.append(max(1.0, design.n**2 / sum(len(own) ** 2 for own in levels.values()) - 1))
        level_means.append(means)
    variance = sum(parts)
    if design.complete:
        rows, columns = level_means
        rest = math.fsum((value - rows[i] - columns[j] + mean) ** 2 for (i, j), value in values.items())
        variance = max(*parts, variance - rest / math.prod(size - 1 for size in design.levels) / design.n)
    return math.sqrt(variance), min(freedoms)


def _levels(values: Mapping[Replicate, float], factor: int) -> dict[Hashable, list[float]]:
    """The values of each level of a factor."""
    levels: dict[Hashable, list[float]] = {}
    for replicate, value in values.items():
        levels.setdefault(replicate[factor], []).append(value)
    return levels
