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

Shapes: D draws, G arms, K rungs, S seeds, P parameters: E (one, or one of each arm), then a, then ln(alpha).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc

from normlab.analysis.intervals import LEVEL

Array = NDArray[np.float64]

DRAWS = 2000
"""Draws of the bootstrap."""
REJECTED = 0.05
"""The p-value below which an F test rejects."""
LEAST_ALPHA, MOST_ALPHA = 1e-3, 5.0
"""The bounds of the exponent; one at the least is that of a loss that does not fall."""
STARTS = np.linspace(0.0, 0.95, 20)
"""The values of E from which fits start, as shares of the lowest loss."""
LEAST_ABOVE = 1e-6
"""The least loss above E where a fit starts, nats/token."""
STEPS = 40
"""Steps of Levenberg and Marquardt's method."""


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
    shared, own = fits
    if ladder.arms == 1 or not ladder.has_noise:
        return shared
    gain = max(0.0, shared.squares - own.squares) / (ladder.arms - 1)
    if fdtrc(ladder.arms - 1, ladder.freedom_G.sum(), gain) < REJECTED:
        return own
    return shared


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
    # The variance is an estimate: that of an arm with single seeds is the pooled one, with the freedom of all arms.
    freedom_G = np.where(ladder.freedom_G > 0, ladder.freedom_G, ladder.freedom_G.sum())
    chi_squared_DG = generator.chisquare(freedom_G, size=(draws, len(freedom_G)))
    return means_DGK * np.sqrt(ladder.variances_G * freedom_G / chi_squared_DG)[:, :, None]


# The law


def parameters(theta: Array, arms: int) -> tuple[Array, Array, Array]:
    """Return E, a and alpha from the parameters (..., P) of laws; E has one column if it is shared."""
    e, a, log_alpha = np.split(theta, [-2 * arms, -arms], axis=-1)
    return e, a, np.exp(log_alpha)


def laws_at(theta: Array, x_GK: Array) -> Array:
    """Return the losses (..., G, K) of laws at x."""
    e, a, alpha = parameters(theta, len(x_GK))
    return e[..., None] + np.exp(a[..., None] - alpha[..., None] * x_GK)


def log_multiplier(theta: Array, arms: int, arm: int, baseline: int, x: float) -> Array:
    """Return ln m of an arm against a baseline at x; infinite where the baseline never reaches the loss of the arm."""
    e, a, alpha = parameters(theta, arms)
    e = np.broadcast_to(e, a.shape)
    loss = e[..., arm] + np.exp(a[..., arm] - alpha[..., arm] * x)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_above = np.log(loss - e[..., baseline])
    reached = (a[..., baseline] - log_above) / alpha[..., baseline] - x
    return np.where(loss > e[..., baseline], reached, np.inf)


# The fit


def fit(means_DGK: Array, x_GK: Array, weights_GK: Array, has_own_e: bool) -> tuple[Array, Array]:
    """Return the parameters (D, P) with the least weighted squares, and these squares (D,).

    Source: Marquardt 1963, doi:10.1137/0111030. All draws are fitted at once; `scipy.optimize` fits one after the
    other, which takes a hundred times as long.
    """

    def squares(theta_DP: Array) -> Array:
        return (weights_GK * (means_DGK - laws_at(theta_DP, x_GK)) ** 2).sum((1, 2))

    theta_DP = _start(means_DGK, x_GK, weights_GK, has_own_e)
    squares_D = squares(theta_DP)
    damping_D = np.full(len(theta_DP), 1e-3)
    for _ in range(STEPS):
        step_DP = _step(theta_DP, damping_D, means_DGK, x_GK, weights_GK)
        proposed_DP = _bounded(theta_DP + step_DP, len(x_GK))
        proposed_D = squares(proposed_DP)
        is_better_D = proposed_D < squares_D
        theta_DP = np.where(is_better_D[:, None], proposed_DP, theta_DP)
        squares_D = np.where(is_better_D, proposed_D, squares_D)
        # A step that has not helped becomes shorter.
        damping_D = np.clip(np.where(is_better_D, damping_D * 0.3, damping_D * 5), 1e-9, 1e9)
    return theta_DP, squares_D


def _start(means_DGK: Array, x_GK: Array, weights_GK: Array, has_own_e: bool) -> Array:
    """Return the best laws (D, P) among those of `STARTS`: for a given E, ln(L - E) is linear in x."""
    has_loss_GK = weights_GK > 0
    lowest_D = np.where(has_loss_GK, means_DGK, np.inf).min((1, 2))
    laws: list[Array] = []
    squares: list[Array] = []
    for share in STARTS:
        e_D11 = share * lowest_D[:, None, None]
        # A draw of few and noisy seeds may lie below 0, of which there is no logarithm.
        above_DGK = np.maximum(np.where(has_loss_GK, means_DGK - e_D11, 1.0), LEAST_ABOVE)
        # The deviation of a logarithm is that of the loss over what the loss has above E.
        log_weights_DGK = weights_GK * above_DGK**2
        a_DG, alpha_DG = _line(x_GK, np.log(above_DGK), log_weights_DGK)
        e_DG = np.broadcast_to(e_D11[:, :, 0], a_DG.shape)
        law_3DG = np.stack([e_DG, a_DG, np.log(alpha_DG)])
        laws.append(law_3DG)
        fitted_DGK = e_D11 + np.exp(a_DG[:, :, None] - alpha_DG[:, :, None] * x_GK)
        squares.append((weights_GK * (means_DGK - fitted_DGK) ** 2).sum(2))
    squares_TDG = np.stack(squares)
    if not has_own_e:
        squares_TDG = np.broadcast_to(squares_TDG.sum(2, keepdims=True), squares_TDG.shape)
    best_DG = squares_TDG.argmin(0)
    law_T3DG = np.stack(laws)
    e_DG, a_DG, log_alpha_DG = np.take_along_axis(law_T3DG, best_DG[None, None], 0)[0]
    if not has_own_e:
        e_DG = e_DG[:, :1]
    return _bounded(np.concatenate([e_DG, a_DG, log_alpha_DG], axis=1), len(x_GK))


def _line(x_GK: Array, y_DGK: Array, weights_DGK: Array) -> tuple[Array, Array]:
    """Return a and alpha (D, G) of the weighted least-squares lines y = a - alpha x; alpha is at least its bound."""
    weights_DGK = weights_DGK / weights_DGK.sum(2, keepdims=True)
    x_DG1 = (weights_DGK * x_GK).sum(2, keepdims=True)
    y_DG1 = (weights_DGK * y_DGK).sum(2, keepdims=True)
    centred_DGK = x_GK - x_DG1
    slope_DG = (weights_DGK * centred_DGK * (y_DGK - y_DG1)).sum(2) / (weights_DGK * centred_DGK**2).sum(2)
    alpha_DG = np.maximum(-slope_DG, LEAST_ALPHA)
    return y_DG1[:, :, 0] + alpha_DG * x_DG1[:, :, 0], alpha_DG


def _step(theta_DP: Array, damping_D: Array, means_DGK: Array, x_GK: Array, weights_GK: Array) -> Array:
    """Return the damped Gauss-Newton step of each draw, (D, P)."""
    draws, arms, rungs = means_DGK.shape
    e, a_DG, alpha_DG = parameters(theta_DP, arms)
    above_DGK = np.exp(a_DG[:, :, None] - alpha_DG[:, :, None] * x_GK)
    missed_DGK = means_DGK - e[:, :, None] - above_DGK
    # The derivatives of each law by its own E, a and ln(alpha).
    by_arm_3DGK = np.stack([np.ones_like(above_DGK), above_DGK, -above_DGK * alpha_DG[:, :, None] * x_GK])
    jacobian_DGKP = np.zeros((draws, arms, rungs, theta_DP.shape[1]))
    offsets = -2 * arms, -arms
    for arm in range(arms):
        e_column = arm if e.shape[1] == arms else 0
        for column, derivative in zip((e_column, *(offset + arm for offset in offsets)), by_arm_3DGK, strict=True):
            jacobian_DGKP[:, arm, :, column] = derivative[:, arm]
    roots_GK = np.sqrt(weights_GK)
    jacobian_DRP = (jacobian_DGKP * roots_GK[:, :, None]).reshape(draws, arms * rungs, -1)
    missed_DR = (missed_DGK * roots_GK).reshape(draws, -1)
    transposed_DPR = jacobian_DRP.transpose(0, 2, 1)
    normal_DPP = transposed_DPR @ jacobian_DRP
    gradient_DP1 = transposed_DPR @ missed_DR[:, :, None]
    diagonal_DP = np.einsum("dpp->dp", normal_DPP)
    # A tiny multiple of the largest entry keeps the matrix regular where a derivative vanishes.
    ridge_DP = damping_D[:, None] * diagonal_DP + 1e-12 * diagonal_DP.max(1, keepdims=True)
    damped_DPP = normal_DPP + ridge_DP[:, :, None] * np.eye(diagonal_DP.shape[1])
    return np.linalg.solve(damped_DPP, gradient_DP1)[:, :, 0]


def _bounded(theta_DP: Array, arms: int) -> Array:
    """Return parameters with E at least 0, and alpha between its bounds."""
    e, others = np.split(theta_DP, [-2 * arms], axis=1)
    a, log_alpha = np.split(others, 2, axis=1)
    log_alpha = np.clip(log_alpha, np.log(LEAST_ALPHA), np.log(MOST_ALPHA))
    # A long step must not overflow.
    return np.concatenate([np.maximum(e, 0.0), np.clip(a, -50.0, 50.0), log_alpha], axis=1)
