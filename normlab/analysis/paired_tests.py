"""Tests of paired differences, and Holm's correction.

Two configurations are compared by the differences of their losses, replicate by replicate: what a replicate adds to
both losses cancels in their difference.

The loss of a diverged run is infinity, which ranks worse than every number.

Shapes: n replicates; m comparisons.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from normlab.analysis.intervals import (
    LEVEL,
    Design,
    Interval,
    Replicate,
    by_level,
    design_of,
    mean_interval,
    standard_error,
)
from normlab.analysis.settings import SEEDS
from normlab.base.errors import counted


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
    # An infinite difference has a rank, and no place in a mean.
    if both_diverged or not all(map(math.isfinite, differences.values())):
        return _signed_rank_test(differences, level, both_diverged)
    estimate, low, high, _ = mean_interval(differences, level)
    if design.n < 2:
        return PairedTest(estimate, None, None, None, design, "one pair")
    error, freedom = standard_error(differences, estimate)
    # The runs are bit-identical, or differ by a constant: every difference but zero is certain.
    if error == 0:
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
        at_most_one = min(1.0, p * (len(known) - rank))
        # A corrected p-value is never below that of a smaller p-value.
        previous = max(previous, at_most_one)
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
        medians = list(map(_median, by_level(differences, factor).values()))
        name = f"signed-rank of medians per {SEEDS[factor]} ({pairs}, crossed {design})"
        tests.append(_signed_rank(medians, level, Design(size, (size, size)), name))
    first, second = tests
    weaker = max(tests, key=lambda result: result.p or 0.0)
    # Where one of the tests has too few medians for an interval, there is none.
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
    estimate, low, high, _ = _hodges_lehmann(differences, level, design)
    if design.n < 2:
        return PairedTest(estimate, None, None, None, design, test)
    # A zero has a rank but no sign: it takes part in ranking, and not in the sum (Pratt 1959).
    sizes = list(map(abs, differences))
    ranks: list[int] = []
    statistic = 0
    for rank, value in zip(_doubled_ranks(sizes), differences, strict=True):
        if value != 0:
            ranks.append(rank)
        if value > 0:
            statistic += rank
    probabilities = _null_distribution(ranks)
    up_to, from_there = math.fsum(probabilities[: statistic + 1]), math.fsum(probabilities[statistic:])
    # Both tails have the statistic itself, so that twice the smaller one may be above 1.
    p = min(1.0, 2 * min(up_to, from_there))
    return PairedTest(estimate, low, high, p, design, test)


def _hodges_lehmann(differences: list[float], level: float, design: Design) -> Interval:
    """Return the median of the Walsh averages, with its interval if there are enough differences.

    The average of +inf and -inf is undefined. It counts as -inf for the lower bound and as +inf for the upper bound,
    which makes the interval conservative.
    """
    n = len(differences)
    defined: list[float] = []
    lows: list[float] = []
    highs: list[float] = []
    for i in range(n):
        for j in range(i, n):
            average = differences[i] / 2 + differences[j] / 2  # (a + b) / 2 may overflow
            if math.isnan(average):
                lows.append(-math.inf)
                highs.append(math.inf)
            else:
                defined.append(average)
                lows.append(average)
                highs.append(average)
    estimate = _median(defined)
    probabilities = _null_distribution(range(2, 2 * n + 1, 2))
    # The most averages at an end whose probability is at most half of what the interval excludes.
    below, total = -1, probabilities[0]
    while total <= (1 - level) / 2:
        below += 1
        total += probabilities[below + 1]
    if below < 0:
        return Interval(estimate, None, None, design)
    excluded = below // 2  # the distribution is over doubled ranks
    return Interval(estimate, sorted(lows)[excluded], sorted(highs)[-1 - excluded], design)


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
