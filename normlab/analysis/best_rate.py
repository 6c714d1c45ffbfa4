"""The learning rate at which the loss is lowest, by a parabola through the losses near the lowest one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from normlab.analysis.intervals import LEVEL
from normlab.analysis.rate_range import NEAR
from normlab.store.record import RunRecord

FEWEST = 4
"""Fewest losses to which a parabola, which has three numbers, is fitted."""


@dataclass(frozen=True, slots=True)
class BestRate:
    estimate: float
    low: float | None
    high: float | None
    """The limits of the interval; None if the curvature is not known to be positive, so that it has no end."""
    n: int
    """The number of losses that the parabola is fitted to."""


def best_rate(runs: Sequence[RunRecord]) -> BestRate | None:
    """Return where the loss is lowest between the learning rates of some runs, with Fieller's interval.

    loss = a + b u + c u^2 with u = ln(learning rate), by least squares over the runs that have learned and whose loss
    is within `NEAR` of the lowest; the optimum is u = -b / (2 c). Its interval has every u for which the constraint
    b + 2 c u = 0 is not rejected by a t test. None with fewer than `FEWEST` such runs or three rates, without a
    minimum, or with one beyond these rates. Fewer than 95 % of the intervals with ends hold the optimum, since only a
    parabola that happens to be steep has one: 70 to 92 % with 8 or 12 rates and noise of 0.01 or 0.03 nats/token.

    Source: Fieller 1954, doi:10.1111/j.2517-6161.1954.tb00159.x.
    """
    learned = [run for run in runs if run.has_learned]
    lowest = min((run.loss for run in learned), default=math.nan)
    near = [run for run in learned if run.loss <= lowest + NEAR]
    if len(near) < FEWEST or len({run.lr for run in near}) < 3:
        return None
    rates_N, losses_N = np.log([run.lr for run in near]), np.array([run.loss for run in near])
    centre = rates_N.mean()
    design_N3 = np.vander(rates_N - centre, 3, increasing=True)
    coefficients_3 = np.linalg.lstsq(design_N3, losses_N)[0]
    _, b, c = coefficients_3
    if c <= 0 or not rates_N.min() <= centre - b / (2 * c) <= rates_N.max():
        return None
    # Imported here, and not as scipy.stats.t: scipy.stats takes a second to import, which every summary would wait for.
    from scipy.special import stdtrit

    freedom = len(near) - 3
    residuals_N = losses_N - design_N3 @ coefficients_3
    covariance_33 = np.linalg.inv(design_N3.T @ design_N3) * (residuals_N @ residuals_N) / freedom
    # (b + 2 c u)^2 = t^2 var(b + 2 c u), a quadratic equation for u
    t = float(stdtrit(freedom, (1 + LEVEL) / 2))
    vb, vbc, vc = covariance_33[1, 1], covariance_33[1, 2], covariance_33[2, 2]
    second, first, zeroth = 4 * (c * c - t * t * vc), 4 * (b * c - t * t * vbc), b * b - t * t * vb
    low = high = None
    if second > 0:
        root = math.sqrt(max(0.0, first * first - 4 * second * zeroth))
        low, high = (math.exp(centre + (-first + sign * root) / (2 * second)) for sign in (-1, 1))
    return BestRate(math.exp(centre - b / (2 * c)), low, high, len(near))
