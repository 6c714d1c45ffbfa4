"""A mean over seeds with its interval, a difference paired by seed with its p-value, and Holm's correction.

Pure functions of floats. A diverged run's loss is infinity: it is worse than every number, and in no mean.

Shapes: n replicates (a seed and a data order each), m comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from normlab.report.student_t import quantile, tail

LEVEL = 0.95
"""Coverage of every interval."""


class Interval(NamedTuple):
    """An estimate and its interval; low and high are None where there is none."""

    estimate: float
    low: float | None
    high: float | None
    n: int


class Paired(NamedTuple):
    """What a paired comparison found."""

    estimate: float
    """Mean of the differences, or their pseudomedian; infinite where most runs of one side diverged."""
    low: float | None
    high: float | None
    p: float | None
    """Two-sided; None where there are fewer than two pairs."""
    n: int
    test: str
    """Which test it is, in words."""


def mean_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """The mean and its interval by Student's t: mean +- t(n - 1) s / sqrt(n), s over n - 1.

    No interval below n = 2, and none where a value is infinite: the mean is that infinity then.

    Raises:
        ValueError: There is no value.
    """
    n = len(values)
    if not n:
        raise ValueError("a mean of no values")
    mean = math.fsum(values) / n if all(map(math.isfinite, values)) else sum(values)
    if n < 2 or not math.isfinite(mean):
        return Interval(mean, None, None, n)
    half = quantile(n - 1, level) * _standard_error(values, mean)
    return Interval(mean, mean - half, mean + half, n)


def paired(differences: Sequence[float], level: float = LEVEL, *, both_diverged: int = 0) -> Paired:
    """Whether paired differences are other than zero, two-sided.

    A difference is infinite where the run of one side diverged (+inf: the first one's), and 0 where both did; of how
    many that is so is `both_diverged`.

    None diverged: the paired t test, mean +- t(n - 1) s / sqrt(n). Exact for normal differences, and near enough for
    what seeds do to a loss; with three to five seeds a rank test could never reject at 5 %.

    Some diverged: Wilcoxon's signed-rank test, its null distribution exact, by flipping every sign (ties share
    their mean rank; a zero keeps its rank and has no sign, after Pratt 1959). An infinite difference has the
    highest rank, so a run that diverged is a loss by the most and no number need be made up for it. The interval
    inverts the test: it holds the shifts that are not rejected, bounded by two of the Walsh averages
    (d_i + d_j) / 2, and its estimate is their median (Hodges and Lehmann 1963). With fewer than six pairs there is
    none, and p cannot be below 2^(1 - n): a divergence or two in three seeds are no proof.

    Which of the two is done depends on the sizes of the differences only, never on their signs, so that under the
    hypothesis that both sides are exchangeable each of them, and hence the whole, rejects at its stated rate or less.

    Raises:
        ValueError: There is no pair, or a difference is NaN.
    """
    n = len(differences)
    if not n or any(map(math.isnan, differences)):
        raise ValueError("paired differences must be numbers, and at least one")
    if both_diverged or not all(map(math.isfinite, differences)):
        return _signed_rank(list(differences), level, both_diverged)
    estimate, low, high, _ = mean_interval(differences, level)
    if n < 2:
        return Paired(estimate, None, None, None, n, "one pair")
    error = _standard_error(differences, estimate)
    if error == 0:  # the same every time: bit for bit equal runs, or a difference without noise
        return Paired(estimate, low, high, 1.0 if estimate == 0 else 0.0, n, "paired t")
    p = 2 * tail(abs(estimate / error), n - 1)
    return Paired(estimate, low, high, p, n, "paired t")


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


def _signed_rank(differences: list[float], level: float, both_diverged: int) -> Paired:
    n = len(differences)
    diverged = sum(map(math.isinf, differences)) + both_diverged
    both = f", {both_diverged} on both sides" if both_diverged else ""
    said = f"signed-rank ({diverged} of {n} {'pair' if n == 1 else 'pairs'} with a diverged run{both})"
    low, high, estimate = _hodges_lehmann(differences, level)
    if n < 2:
        return Paired(estimate, None, None, None, n, said)
    ranks = _doubled_ranks([abs(value) for value in differences])
    signed = [(rank, value > 0) for rank, value in zip(ranks, differences, strict=True) if value]
    chances = _null([rank for rank, _ in signed])
    above = sum(rank for rank, positive in signed if positive)
    p = 2 * min(math.fsum(chances[: above + 1]), math.fsum(chances[above:]))
    return Paired(estimate, low, high, min(1.0, p), n, said)


def _hodges_lehmann(differences: list[float], level: float) -> tuple[float | None, float | None, float]:
    """Both bounds and the median of the Walsh averages.

    One of +inf and -inf is no number: it lies below and above every shift with half its weight. The interval takes
    it for the worse of the two each time, which makes it wider, never narrower than it should be.
    """
    n = len(differences)
    pairs = [(differences[i], differences[j]) for i in range(n) for j in range(i, n)]
    walsh = [a / 2 + b / 2 for a, b in pairs]  # not (a + b) / 2, which may overflow
    known = sorted(value for value in walsh if not math.isnan(value))
    middle = known[(len(known) - 1) // 2] / 2 + known[len(known) // 2] / 2
    estimate = 0.0 if math.isnan(middle) else middle
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


def _standard_error(values: Sequence[float], mean: float) -> float:
    n = len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
