"""Student's t distribution: its tail and its quantile.

Written here and not taken from scipy, whose `special` takes as long to import as a thousand runs to be read; the
tests hold both to scipy's `stdtr` and `stdtrit`.
"""

from __future__ import annotations

import math
from functools import cache

_TINY = 1e-300
_ENOUGH = 1e-16
_MOST_TERMS = 10_000


def tail(t: float, freedom: float) -> float:
    """P(T > t) with so many degrees of freedom n: I_x(n / 2, 1 / 2) / 2 with x = n / (n + t^2), for t >= 0.

    To 1e-11 of itself, however small it is, for t from 1e-3 on and n up to 1000; to 1e-8 elsewhere.

    Source: Abramowitz & Stegun 1964, 26.7.1 and 26.5.27.
    """
    if t < 0:
        return 1 - tail(-t, freedom)
    if math.isinf(t):
        return 0.0
    return _incomplete_beta(freedom / (freedom + t * t), t * t / (freedom + t * t), freedom / 2, 0.5) / 2


@cache
def quantile(freedom: float, level: float) -> float:
    """The t for which |T| <= t has the chance `level`: half the width of an interval, in standard errors."""
    rest, low, high = (1 - level) / 2, 0.0, 1.0
    while tail(high, freedom) > rest:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if tail(middle, freedom) > rest else (low, middle)
    return high


def _incomplete_beta(x: float, other: float, a: float, b: float) -> float:
    """I_x(a, b), regularised; `other` is 1 - x, which would lose its digits where x is near 1."""
    if x <= 0 or other <= 0:
        return float(other <= 0)
    if x > (a + 1) / (a + b + 2):  # where the fraction below converges slowly
        return 1 - _incomplete_beta(other, x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(other)
    return math.exp(log_front) / a * _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method.

    Source: Abramowitz & Stegun 1964, 26.5.8; Lentz 1976, Applied Optics 15, 668-671.
    """
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away(1 + term * d)
            c = _away(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < _ENOUGH:
            break
    return value


def _away(value: float) -> float:
    """Never zero, so that it can be divided by."""
    return value if abs(value) > _TINY else _TINY
