"""Confidence sequences: intervals that hold at every number of seeds at once, so that a study may stop at any of them.

At level 1 - alpha, the probability that any interval of the sequence excludes the true value is at most alpha. An
interval holds the values whose e-process is below 1 / alpha: a non-negative supermartingale that starts at 1 if the
value is the true one (Ville 1939).

Shapes: n independent values, or n trials.
"""

import math
from collections.abc import Sequence

EFFECT_VARIANCE = 5.0
"""Variance of the normal prior over effects in standard deviations; about where four to sixteen seeds decide most."""


def mean_sequence(values: Sequence[float], alpha: float) -> tuple[float, float]:
    """Return the interval at n values of the confidence sequence for the mean of normal values, of unknown variance.

    With t = sqrt(n) (mean - mu) / s and k = 1 + n g, where g is `EFFECT_VARIANCE`, the e-process of mu is

        k^(-1/2) ((1 + t^2 / (n - 1)) / (1 + t^2 / (k (n - 1))))^(n / 2),

    the likelihood ratio of t with a normal prior of variance g over (mu' - mu) / sigma, and the right Haar prior over
    sigma. It is below k^((n - 1) / 2) for every mu, so that the interval has no bounds where this is at most 1 / alpha:
    at 95 % below four values, at 90 % below three, at 99 % below five.

    Source: Lai 1976, Annals of Statistics 4, 265-280; Wang & Ramdas 2023, arXiv:2310.03722.
    """
    n = len(values)
    mean = math.fsum(values) / n
    deviation = 0.0
    if n > 1:
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = deviation * half_width(n, alpha)
    if math.isnan(half):  # equal values, or a single one, before the interval has bounds
        return -math.inf, math.inf
    return mean - half, mean + half


def half_width(n: int, alpha: float) -> float:
    """Return half of the width of `mean_sequence` at n values, in their standard deviations.

    It is infinite up to alpha = k^((1 - n) / 2), the inverse of the largest e-process, and 0 from alpha = sqrt(k) on,
    the inverse of the smallest one.
    """
    k = 1 + n * EFFECT_VARIANCE
    ratio = max((math.sqrt(k) / alpha) ** (2 / n), 1.0)
    if n < 2 or ratio >= k:
        return math.inf
    return math.sqrt((n - 1) / n * (ratio - 1) / (1 - ratio / k))


def level_of(n: int, half: float) -> float:
    """Return the alpha at which `half_width` has a value: above 1 for a value narrower than any confidence interval."""
    k, u = 1 + n * EFFECT_VARIANCE, max(half, 0.0) ** 2 * n / (n - 1)
    return math.sqrt(k) * ((1 + u / k) / (1 + u)) ** (n / 2)


def share_sequence(count: int, n: int, alpha: float) -> tuple[float, float]:
    """Return the interval at n trials of the confidence sequence for a share, of which `count` trials have counted.

    The e-process of a share p is the wealth of bets on the next trial, whose expected share is (count + 1/2) / (n + 1):
    B(count + 1/2, n - count + 1/2) / B(1/2, 1/2) / (p^count (1 - p)^(n - count)).

    Source: Robbins 1970, Annals of Mathematical Statistics 41, 1397-1409; as bets Waudby-Smith & Ramdas 2020,
    arXiv:2010.09686.
    """
    from scipy.optimize import brentq
    from scipy.special import betaln, xlog1py, xlogy

    limit = betaln(count + 0.5, n - count + 0.5) - betaln(0.5, 0.5) + math.log(alpha)

    def excess(p: float) -> float:
        return float(xlogy(count, p) + xlog1py(n - count, -p) - limit)

    # The excess rises from 0 to the observed share, falls from there to 1, and is positive in the interval.
    # Without an excess below zero at an end of [0, 1] there is no root on its side: the interval ends there.
    share, low, high = count / n, 0.0, 1.0
    if excess(0.0) < 0:
        low = float(brentq(excess, 0.0, share))  # pyright: ignore[reportArgumentType]
    if excess(1.0) < 0:
        high = float(brentq(excess, share, 1.0))  # pyright: ignore[reportArgumentType]
    return low, high
