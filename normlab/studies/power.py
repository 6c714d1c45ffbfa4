"""The power of a claim: the probability that a study supports it, if the effect that it states is true.

It is found by simulation: the values of seeds are normal, and a simulated study is judged at each of `LOOKS`. The power
is a little too low for arms with one learning rate, whose choosing seeds judge too. It does not know that a study stops
where `chance_to_decide` is small, which costs hardly any power.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from normlab.analysis.arms import StudyRuns
from normlab.analysis.sequences import log_wealth
from normlab.studies.base import LEVEL, LOOKS, Claim
from normlab.studies.estimate import Bounds

DRAWS = 2000
"""Simulated studies for a power."""
CONTINUATIONS = 500
"""Simulated studies for the chance that more seeds decide a claim."""
GOOD_POWER = 0.8
SMALLEST_DEVIATION = 1e-4
"""No smaller standard deviation between seeds is looked for, nats/token."""
LARGEST_DEVIATION = 1e6
"""A larger one is infinite."""
FEW_SEEDS = 8
"""With fewer seeds a text about a power names their number."""


@dataclass(frozen=True, slots=True)
class Power:
    """The probability that a claim is supported within the seeds of a study, if its stated effect is true."""

    value: float
    low: float
    high: float
    """With the standard deviation at the ends of its interval of 80 %."""
    seeds: int
    """The number of seeds from which the standard deviation is known (`Estimator.pilot`)."""

    @property
    def text(self) -> str:
        few = f" (sd from {self.seeds} seeds)" if self.seeds < FEW_SEEDS else ""
        return f"{self.value:.0%}, {self.low:.0%} to {self.high:.0%}{few}"


def power_of(claim: Claim, runs: StudyRuns, tests: int = 1) -> Power | None:
    """Return the power of a claim; None without a stated effect, and for an estimator that has none.

    The quantity of a simulated seed is normal, with the standard deviation of the choosing seeds at the chosen learning
    rates. The significance level is that of the smallest p-value of `tests` claims, LEVEL / tests.
    """
    from scipy.stats import chi2

    pilot = claim.estimator.pilot(runs)
    if claim.effect is None or len(pilot) < 2 or not all(map(math.isfinite, pilot)):
        return None
    n = len(pilot)
    sd = float(np.std(pilot, ddof=1))
    # The interval of a standard deviation of normal values. The larger deviation gives the smaller power.
    largest_sd = sd * math.sqrt((n - 1) / float(chi2.ppf(0.1, n - 1)))
    smallest_sd = sd * math.sqrt((n - 1) / float(chi2.ppf(0.9, n - 1)))
    return Power(
        value=_power_at(claim, claim.effect, sd, tests),
        low=_power_at(claim, claim.effect, largest_sd, tests),
        high=_power_at(claim, claim.effect, smallest_sd, tests),
        seeds=n,
    )


def largest_deviation(claim: Claim, tests: int) -> float | None:
    """Return the largest standard deviation between seeds with which a claim has a power of `GOOD_POWER`.

    That of a ratio is of logarithms. None for claims whose power is not known (`power_of`), or is smaller with every
    deviation; infinite for a claim that is supported with every one, such as a ratio of at least 0.
    """
    if claim.effect is None or not claim.estimator.has_power:
        return None
    # Power falls as the deviation rises: double it until it is too large, then bisect to 1 %.
    low, high = 0.0, SMALLEST_DEVIATION
    while _power_at(claim, claim.effect, high, tests) >= GOOD_POWER:
        low, high = high, 2 * high
        if high > LARGEST_DEVIATION:
            return math.inf
    while low and high - low > 0.01 * low:
        middle = (low + high) / 2
        if _power_at(claim, claim.effect, middle, tests) >= GOOD_POWER:
            low = middle
        else:
            high = middle
    return low or None


def _power_at(claim: Claim, effect: float, sd: float, tests: int) -> float:
    """Return the power of a claim at an effect; `sd` is of logarithms if its estimator is a ratio."""
    scaled = claim.estimator.on_symmetric_scale
    least, most = claim.criterion.limits
    alpha = LEVEL / tests * claim.criterion.sides
    return simulated_power(scaled(effect), sd, (scaled(least), scaled(most)), alpha)


def simulated_power(effect: float, sd: float, limits: Bounds, alpha: float) -> float:
    """Return the share of simulated studies whose interval is within limits at one of the looks."""
    draws, medians = _standard_draws()
    studies = _SimulatedStudies(effect + sd * draws, LOOKS, effect + sd * medians)
    return float(studies.is_inside(limits, alpha).any(1).mean())


def chance_to_decide(
    values: Sequence[float], limits: Bounds, sides: int, seeds_left: int, ends: tuple[bool, bool] = (True, True)
) -> float:
    """Return the probability that up to `seeds_left` more seeds decide a claim, if they are as those so far.

    Later seeds are drawn from the values so far, resampled for each simulated study, so that the typical value is as
    uncertain as these leave it. `limits` and `sides` are those of the claim's criterion, whose level is not corrected
    for other claims. `ends` says whether the interval has a lower and an upper end.
    """
    rng = np.random.default_rng(0)
    n = len(values)
    step = LOOKS[1] - LOOKS[0]
    looks = range(n + step, n + seeds_left + 1, step)
    if not looks:
        return 0.0
    so_far = np.array(values)
    populations = rng.choice(so_far, (CONTINUATIONS, n))
    later = np.take_along_axis(populations, rng.integers(n, size=(CONTINUATIONS, seeds_left)), 1)
    continued = np.concatenate([np.broadcast_to(so_far, (CONTINUATIONS, n)), later], 1)
    studies = _SimulatedStudies(continued, looks, _medians(continued, looks), *ends)
    least, most = limits
    is_decided = studies.is_inside(limits, sides * LEVEL)
    is_decided |= studies.is_beyond(least, -1, LEVEL) | studies.is_beyond(most, 1, LEVEL)
    return float(is_decided.any(1).mean())


@dataclass(frozen=True, slots=True)
class _SimulatedStudies:
    """Values of the seeds of D simulated studies, which are judged at L looks."""

    values_DN: np.ndarray
    looks: Sequence[int]
    medians_DL: np.ndarray
    has_lower_end: bool = True
    has_upper_end: bool = True

    def is_beyond(self, limit: float, side: int, alpha: float) -> np.ndarray:
        """Return whether the interval lies above (side 1) or below (-1) a limit, (D, L)."""
        # The interval leaves out a limit whose e-process has reached 1 / alpha. The median tells on which side it lies.
        if math.isinf(limit):
            return np.full(self.medians_DL.shape, side * limit < 0)
        has_end = self.has_lower_end if side > 0 else self.has_upper_end
        if not has_end:
            return np.full(self.medians_DL.shape, False)
        wealth_DL = log_wealth(self.values_DN, limit)[:, np.array(self.looks) - 1]
        return (wealth_DL >= -math.log(alpha)) & (side * (self.medians_DL - limit) > 0)

    def is_inside(self, limits: Bounds, alpha: float) -> np.ndarray:
        """Return whether the interval lies within limits, (D, L)."""
        least, most = limits
        return self.is_beyond(least, 1, alpha) & self.is_beyond(most, -1, alpha)


@lru_cache(maxsize=1)
def _standard_draws() -> tuple[np.ndarray, np.ndarray]:
    """Return the standard normal values of the seeds of simulated studies, and their median at each look.

    They are the same for every claim, so that reports are equal byte for byte.
    """
    draws = np.random.default_rng(0).normal(size=(DRAWS, LOOKS[-1]))
    return draws, _medians(draws, LOOKS)


def _medians(values_DN: np.ndarray, looks: Sequence[int]) -> np.ndarray:
    return np.stack([np.median(values_DN[:, :n], 1) for n in looks], 1)
