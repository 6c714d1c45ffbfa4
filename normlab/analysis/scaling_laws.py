"""Scaling laws of several arms, and how much compute one arm saves another.

The law of an arm g is L_g(C) = E + A_g C^-alpha_g: the loss over the FLOPs of training, where no compute removes E. The
compute multiplier of an arm against a baseline b is the m for which L_b(m C) = L_g(C): with the baseline the same loss
takes m times the compute. With x = ln(C / C_max), where C_max is the compute of the largest rung, and a_g the logarithm
of what the law has above E there,

    L_g = E + exp(a_g - alpha_g x)            ln m = (a_b - ln(L_g(x) - E_b)) / alpha_b - x

Laws are fitted by least squares to the mean of each rung over seeds, weighted by the inverse of its variance. All arms
share E, since they read the same text, unless an F test finds that each has its own.

Intervals are those of a parametric bootstrap. Seeds are drawn around the fitted laws, with the standard deviation of
each arm, pooled over its rungs, and the correlation of arms that share seeds; laws are fitted to each draw. The
deviation is an estimate, so that each draw has another one, as Student's t has. Rungs that miss the fitted law by more
than their seeds explain make the draws wider by that factor: the learning rates of rungs may not be equally good.

Source: Hoffmann et al. 2022, arXiv:2203.15556, section 3.3, for the form of the law. `scripts/prove/
scaling_characteristics.py` simulates how often the intervals hold the truth.

`law_fit.py` has the law and its fit.

Shapes: D draws, G arms, K rungs, S seeds, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.special import fdtrc, stdtrit

from normlab.analysis.intervals import LEVEL
from normlab.analysis.law_fit import LEAST_ALPHA, MOST_ALPHA, Array, fit, laws_at, log_multiplier, parameters

DRAWS = 2000
"""Draws of the bootstrap."""
REJECTED = 0.05
"""The p-value below which an F test rejects."""


@dataclass(frozen=True)
class Ladder:
    """The final losses of arms at several sizes."""

    losses_GKS: Array
    """NaN where an arm has no loss of a seed at a rung."""
    log_compute_GK: Array
    """ln of the FLOPs of training."""

    @property
    def arms(self) -> int:
        return len(self.losses_GKS)

    @cached_property
    def x_GK(self) -> Array:
        return self.log_compute_GK - self.log_compute_GK.max()

    @cached_property
    def counts_GK(self) -> Array:
        return np.isfinite(self.losses_GKS).sum(2).astype(float)

    @cached_property
    def means_GK(self) -> Array:
        """The mean of each rung; 0 where there is no loss."""
        return np.nansum(self.losses_GKS, 2) / np.maximum(self.counts_GK, 1)

    @cached_property
    def residuals_GKS(self) -> Array:
        return self.losses_GKS - self.means_GK[:, :, None]

    @cached_property
    def freedom_G(self) -> Array:
        """The degrees of freedom of each arm's variance."""
        return np.maximum(self.counts_GK - 1, 0).sum(1)

    @cached_property
    def variances_G(self) -> Array:
        """The variance over seeds of each arm, pooled over its rungs; that of all arms where an arm has single seeds.

        Zero where no rung has two seeds.
        """
        squares_G = np.nansum(self.residuals_GKS**2, (1, 2))
        pooled = squares_G.sum() / max(self.freedom_G.sum(), 1.0)
        return np.where(self.freedom_G > 0, squares_G / np.maximum(self.freedom_G, 1), pooled)

    @cached_property
    def freedom_of_variance_G(self) -> Array:
        """The degrees of freedom of `variances_G`."""
        return np.where(self.freedom_G > 0, self.freedom_G, self.freedom_G.sum())

    @property
    def has_noise(self) -> bool:
        """Whether the seeds of every arm differ, so that there are intervals."""
        return bool(self.variances_G.min() > 0)

    @cached_property
    def correlation(self) -> float:
        """The correlation of the losses of two arms with the same seed, over all pairs of arms; at least 0."""
        if not self.has_noise:
            return 0.0
        products = squares = 0.0
        for g in range(self.arms):
            for h in range(g):
                pair_2KS = self.residuals_GKS[[g, h]] / np.sqrt(self.variances_G[[g, h], None, None])
                # Both arms need the seed.
                pair_2KS = np.where(np.isfinite(pair_2KS).all(0), pair_2KS, 0.0)
                products += float((pair_2KS[0] * pair_2KS[1]).sum())
                squares += float((pair_2KS**2).sum()) / 2
        # Arms without a common seed, or a single one.
        if not squares:
            return 0.0
        return max(0.0, products / squares)

    @cached_property
    def weights_GK(self) -> Array:
        """The inverse of the variance of each mean; without noise, the number of seeds."""
        if not self.has_noise:
            return self.counts_GK
        return self.counts_GK / self.variances_G[:, None]

    def without_largest(self) -> Ladder:
        """Return the ladder without the largest rung of each arm."""
        losses_GKS = self.losses_GKS.copy()
        for g, k in enumerate(self.largest_G):
            losses_GKS[g, k] = np.nan
        return Ladder(losses_GKS, self.log_compute_GK)

    @cached_property
    def largest_G(self) -> list[int]:
        """The rung of each arm that has the most compute of those with a loss."""
        return np.where(self.counts_GK > 0, self.log_compute_GK, -np.inf).argmax(1).tolist()


@dataclass(frozen=True)
class Laws:
    """The fitted laws of the arms of a ladder."""

    ladder: Ladder
    has_own_e: bool
    """Whether each arm has its own E."""
    theta_P: Array
    squares: float
    """The weighted squares of what the laws miss."""

    @property
    def freedom(self) -> int:
        """The number of rungs minus that of the parameters."""
        return int((self.ladder.counts_GK > 0).sum()) - len(self.theta_P)

    @property
    def p_form(self) -> float | None:
        """The p-value of an F test that the rungs lie on such laws; None where it cannot be tested."""
        if not self.ladder.has_noise or not self.freedom:
            return None
        return float(fdtrc(self.freedom, self.ladder.freedom_G.sum(), self.squares / self.freedom))

    @property
    def spread(self) -> float:
        """The factor, at least 1, by which rungs miss the laws more than their seeds explain."""
        if not self.freedom:
            return 1.0
        return float(np.sqrt(max(1.0, self.squares / self.freedom)))

    @cached_property
    def draws_DP(self) -> Array:
        """The parameters of the laws of each draw; none without noise."""
        ladder = self.ladder
        if not ladder.has_noise:
            return np.empty((0, len(self.theta_P)))
        noise_DGK = self.spread * draw_means(ladder, np.random.default_rng(0), DRAWS)
        means_DGK = laws_at(self.theta_P, ladder.x_GK) + noise_DGK
        return fit(means_DGK, ladder.x_GK, ladder.weights_GK, self.has_own_e)[0]

    def of_e(self) -> list[Estimated]:
        """Return E of all arms, or of each."""
        return self._each(lambda theta: parameters(theta, self.ladder.arms)[0])

    def of_alpha(self) -> list[Estimated]:
        """Return the exponent of each arm."""
        return self._each(lambda theta: parameters(theta, self.ladder.arms)[2])

    @cached_property
    def is_determined_G(self) -> list[bool]:
        """Whether the losses of each arm determine its law.

        They must be lower at the largest size than at the smallest by more than their noise, and the interval of the
        exponent must end within its bounds.
        """
        determined: list[bool] = []
        for arm, alpha in enumerate(self.of_alpha()):
            ends = [alpha.value, alpha.low, alpha.high]
            is_within = all(LEAST_ALPHA < end < MOST_ALPHA for end in ends if end is not None)
            determined.append(is_within and self._falls(arm))
        return determined

    def _falls(self, arm: int) -> bool:
        """Whether the loss of the largest size is lower than that of the smallest, by a one-sided t test at 2.5 %."""
        ladder = self.ladder
        has_loss_K = ladder.counts_GK[arm] > 0
        smallest = int(np.where(has_loss_K, ladder.log_compute_GK[arm], np.inf).argmin())
        ends = [smallest, ladder.largest_G[arm]]
        fall = ladder.means_GK[arm, ends[0]] - ladder.means_GK[arm, ends[1]]
        if not ladder.has_noise:
            return bool(fall > 0)
        deviation = self.spread * np.sqrt(ladder.variances_G[arm] * (1 / ladder.counts_GK[arm, ends]).sum())
        quantile = stdtrit(ladder.freedom_of_variance_G[arm], (1 + LEVEL) / 2)
        return bool(fall > deviation * quantile)

    def _each(self, read: Callable[[Array], Array]) -> list[Estimated]:
        """Return what `read` takes from parameters (..., P), for each of its columns."""
        values, draws = read(self.theta_P), read(self.draws_DP)
        return [estimated(float(value), draws[:, column]) for column, value in enumerate(values)]

    def multiplier(self, arm: int, baseline: int, compute: float) -> Estimated:
        """Return the compute multiplier of an arm against a baseline, at a compute of the arm in FLOPs."""
        x = float(np.log(compute) - self.ladder.log_compute_GK.max())
        law = log_multiplier(self.theta_P, self.ladder.arms, arm, baseline, x)
        draws_D = log_multiplier(self.draws_DP, self.ladder.arms, arm, baseline, x)
        return estimated(float(law), draws_D).exp()

    def loss(self, arm: int, compute: float) -> Estimated:
        """Return the loss of an arm's law at a compute in FLOPs."""
        x_GK = np.full((self.ladder.arms, 1), np.log(compute) - self.ladder.log_compute_GK.max())
        law = laws_at(self.theta_P, x_GK)[arm, 0]
        return estimated(float(law), laws_at(self.draws_DP, x_GK)[:, arm, 0])

    def growth(self, arm: int, baseline: int) -> Estimated:
        """Return the multiplier at the largest rung of an arm over that at its smallest."""
        x_K = self.ladder.x_GK[arm][self.ladder.counts_GK[arm] > 0]

        def log_growth(theta: Array) -> Array:
            at_ends: list[Array] = []
            for x in (x_K.min(), x_K.max()):
                at_ends.append(log_multiplier(theta, self.ladder.arms, arm, baseline, x))
            # Where the baseline reaches the loss at neither end, nothing is known of the growth.
            with np.errstate(invalid="ignore"):
                return np.nan_to_num(at_ends[1] - at_ends[0], nan=0.0, posinf=np.inf, neginf=-np.inf)

        return estimated(float(log_growth(self.theta_P)), log_growth(self.draws_DP)).exp()


class Estimated(NamedTuple):
    """A number of the fitted laws with its interval, and the p-value that it is 0; None without noise."""

    value: float
    low: float | None
    high: float | None
    p: float | None

    def exp(self) -> Estimated:
        """Return the number whose logarithm this is; p is then that it is 1."""
        low = high = None
        # A baseline whose loss hardly falls needs more compute than a number can hold.
        with np.errstate(over="ignore"):
            value = float(np.exp(self.value))
            if self.low is not None and self.high is not None:
                low, high = float(np.exp(self.low)), float(np.exp(self.high))
        return Estimated(value, low, high, self.p)


def estimated(value: float, draws_D: Array) -> Estimated:
    """Return the percentile interval of draws, and the p-value by the share of them on the other side of 0."""
    if not len(draws_D):
        return Estimated(value, None, None, None)
    # No interpolation, since a multiplier may be infinite.
    tails = (1 - LEVEL) / 2, (1 + LEVEL) / 2
    low, high = np.quantile(draws_D, tails, method="inverted_cdf").tolist()
    beyond = min(int((draws_D <= 0).sum()), int((draws_D >= 0).sum()))
    return Estimated(value, low, high, min(1.0, 2 * (beyond + 1) / (len(draws_D) + 1)))


def forecast_errors(ladder: Ladder) -> list[Estimated]:
    """Return the mean loss of each arm's largest rung minus its forecast by the laws of the other rungs.

    The interval is that of a forecast: it has the noise of the seeds of the largest rung, too.
    """
    laws = fit_laws(ladder.without_largest())
    forecast_GK = laws_at(laws.theta_P, ladder.x_GK)
    draws_DGK = laws_at(laws.draws_DP, ladder.x_GK)
    draws_DGK = draws_DGK + laws.spread * draw_means(ladder, np.random.default_rng(1), len(draws_DGK))
    errors: list[Estimated] = []
    for arm, rung in enumerate(ladder.largest_G):
        seen = ladder.means_GK[arm, rung]
        errors.append(estimated(float(seen - forecast_GK[arm, rung]), seen - draws_DGK[:, arm, rung]))
    return errors


def fit_laws(ladder: Ladder) -> Laws:
    """Return the laws with a shared E, unless an F test rejects that."""
    fits: list[Laws] = []
    for has_own_e in (False, True):
        [theta_P], [squares] = fit(ladder.means_GK[None], ladder.x_GK, ladder.weights_GK, has_own_e)
        fits.append(Laws(ladder, has_own_e, theta_P, float(squares)))
    with_shared_e, with_own_e = fits
    if ladder.arms == 1 or not ladder.has_noise:
        return with_shared_e
    gain = max(0.0, with_shared_e.squares - with_own_e.squares) / (ladder.arms - 1)
    if fdtrc(ladder.arms - 1, ladder.freedom_G.sum(), gain) < REJECTED:
        return with_own_e
    return with_shared_e


def draw_means(ladder: Ladder, generator: np.random.Generator, draws: int) -> Array:
    """Return draws of the deviations of the means of the rungs, (D, G, K).

    The deviation of a seed has a part that all arms share, with the share `correlation` of the variance.
    """
    has_loss_GKS = np.isfinite(ladder.losses_GKS)
    if not ladder.has_noise:
        return np.zeros((draws, *ladder.means_GK.shape))
    own_DGKS = generator.normal(size=(draws, *has_loss_GKS.shape))
    shared_DKS = generator.normal(size=(draws, *has_loss_GKS.shape[1:]))
    rho = ladder.correlation
    seeds_DGKS = np.sqrt(rho) * shared_DKS[:, None] + np.sqrt(1 - rho) * own_DGKS
    means_DGK = (seeds_DGKS * has_loss_GKS).sum(3) / np.maximum(ladder.counts_GK, 1)
    # The variance is an estimate, too.
    freedom_G = ladder.freedom_of_variance_G
    chi_squared_DG = generator.chisquare(freedom_G, size=(draws, len(freedom_G)))
    return means_DGK * np.sqrt(ladder.variances_G * freedom_G / chi_squared_DG)[:, :, None]
