"""Confidence sequences: intervals that hold at every number of seeds at once, so that a study may stop at any of them.

At level 1 - alpha, the probability that any interval of the sequence excludes the true value is at most alpha. An
interval holds the values whose e-process is below 1 / alpha: a non-negative supermartingale that starts at 1 if the
value is the true one (Ville 1939).

Shapes: n independent values, or n trials.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

BETS = (-6.0, -1.5, 1.5, 6.0)
"""The bets on the side of the next value, as factors of its rank; their capital is shared equally."""


def typical_value(values: Sequence[float]) -> float:
    """Return the estimate of the center of symmetry of some values: the median of the means of all pairs.

    A pair may be a value with itself.

    Source: Hodges & Lehmann 1963, Annals of Mathematical Statistics 34, 598-611.
    """
    return float(np.median(_means_of_pairs(values)))


def typical_sequence(values: Sequence[float], alpha: float) -> tuple[float, float]:
    """Return the interval at n values of the confidence sequence for their center of symmetry.

    The values are independent, of any distribution that is symmetric about the center, as is the difference of two arms
    whose losses have the same distribution around two centers. Its deviation may be infinite, and some seeds may be far
    off. For other distributions the interval is one for the median as long as few values are far from it on one side.

    The interval is the smallest that holds every center whose e-process (`log_wealth`) is below 1 / alpha. It has no
    bounds where n values cannot reach this: at 95 % with fewer than six, at 90 % with fewer than five. With a few
    more, one bound may be missing.
    """
    lows, highs, logs = _log_wealth_everywhere(tuple(values))
    is_kept = logs < -math.log(alpha)
    # At a high alpha no center is kept but the best one.
    is_kept[np.argmin(logs)] = True
    return float(lows[is_kept].min()), float(highs[is_kept].max())


def log_wealth(values: Array, center: Array | float) -> Array:
    """Return the logarithm of the e-process of a center, after each of the values along the last axis.

    With x_i = v_i - center, and r_i the rank of |x_i| among |x_1| to |x_i| over i, minus 1 / (2 i), so that it is
    between 0 and 1, the e-process is

        mean over b of prod_i (1 + tanh(b r_i) sign(x_i)), b in `BETS`.

    Equal distances have the mean of their ranks. For values that are symmetric about the center, the sign of each is +1
    or -1 with a probability of 1/2 whatever their distances are, so that each product is a martingale.

    Source: the ranks are those of Reynolds 1975, Annals of Statistics 3, 382-400; for e-values from signed ranks see
    Vovk & Wang 2022, arXiv:2208.08925.
    """
    x = values - center
    distances = np.abs(x)
    ranks = np.empty_like(distances)
    for i in range(x.shape[-1]):
        earlier, last = distances[..., : i + 1], distances[..., i, None]
        ranks[..., i] = ((earlier < last).sum(-1) + (earlier == last).sum(-1) / 2) / (i + 1)
    logs = [np.log1p(np.tanh(bet * ranks) * np.sign(x)).cumsum(-1) for bet in BETS]
    return np.logaddexp.reduce(logs, axis=0) - math.log(len(BETS))


@lru_cache(maxsize=64)
def _log_wealth_everywhere(values: tuple[float, ...]) -> tuple[Array, Array, Array]:
    """Return the lower and upper ends of all sets of centers that have the same e-process, and its logarithm."""
    # The order of the distances from a center changes at the means of pairs, and a sign changes at a value. Each of
    # these points is a set of its own, and so is what lies between two of them.
    points = np.unique(_means_of_pairs(values))
    lows = np.concatenate([[-math.inf], points, points])
    highs = np.concatenate([points, [math.inf], points])
    between = (points[:-1] + points[1:]) / 2
    centers = np.concatenate([[points[0] - 1], between, [points[-1] + 1], points])
    return lows, highs, log_wealth(np.array(values), centers[:, None])[:, -1]


def _means_of_pairs(values: Sequence[float]) -> Array:
    x = np.array(values, dtype=float)
    first, second = np.triu_indices(len(x))
    return (x[first] + x[second]) / 2


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
