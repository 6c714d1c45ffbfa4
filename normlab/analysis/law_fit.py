"""The law of the loss over compute, and its fit to many draws of the losses at once.

The law of an arm g is L_g = E + exp(a_g - alpha_g x), where x is ln(compute), relative to the largest rung.

Shapes: D draws, G arms, K rungs, P parameters: E (one, or one of each arm), then a, then ln(alpha); T starts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEAST_ALPHA, MOST_ALPHA = 1e-3, 5.0
"""The bounds of the exponent; one at the least is that of a loss that does not fall."""
STARTS = np.linspace(0.0, 0.95, 20)
"""The values of E from which fits start, as shares of the lowest loss."""
LEAST_ABOVE = 1e-6
"""The least loss above E where a fit starts, nats/token."""
STEPS = 40
"""Steps of Levenberg and Marquardt's method."""


# The law


def parameters(theta: Array, arms: int) -> tuple[Array, Array, Array]:
    """Return E, a and alpha from the parameters (..., P) of laws; E has one column if it is shared."""
    e, a, log_alpha = np.split(theta, [-2 * arms, -arms], axis=-1)
    return e, a, np.exp(log_alpha)


def laws_at(theta: Array, x_GK: Array) -> Array:
    """Return the losses (..., G, K) of laws at x."""
    e, a, alpha = parameters(theta, len(x_GK))
    return e[..., None] + _above(a, alpha, x_GK)


def _above(a: Array, alpha: Array, x_GK: Array) -> Array:
    """Return what the losses of laws have above E, (..., G, K)."""
    return np.exp(a[..., None] - alpha[..., None] * x_GK)


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
        # A draw of few and noisy seeds may be negative, and a negative number has no logarithm.
        above_DGK = np.maximum(np.where(has_loss_GK, means_DGK - e_D11, 1.0), LEAST_ABOVE)
        # The deviation of a logarithm is that of the loss over what the loss has above E.
        log_weights_DGK = weights_GK * above_DGK**2
        a_DG, alpha_DG = _line(x_GK, np.log(above_DGK), log_weights_DGK)
        e_DG = np.broadcast_to(e_D11[:, :, 0], a_DG.shape)
        law_3DG = np.stack([e_DG, a_DG, np.log(alpha_DG)])
        laws.append(law_3DG)
        fitted_DGK = e_D11 + _above(a_DG, alpha_DG, x_GK)
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
    covariance_DG = (weights_DGK * centred_DGK * (y_DGK - y_DG1)).sum(2)
    variance_DG = (weights_DGK * centred_DGK**2).sum(2)
    # Sizes of equal compute, as of models that differ in their heads, have no slope.
    slope_DG = np.divide(covariance_DG, variance_DG, out=np.zeros_like(variance_DG), where=variance_DG > 0)
    alpha_DG = np.maximum(-slope_DG, LEAST_ALPHA)
    return y_DG1[:, :, 0] + alpha_DG * x_DG1[:, :, 0], alpha_DG


def _step(theta_DP: Array, damping_D: Array, means_DGK: Array, x_GK: Array, weights_GK: Array) -> Array:
    """Return the damped Gauss-Newton step of each draw, (D, P)."""
    draws, arms, rungs = means_DGK.shape
    e, a_DG, alpha_DG = parameters(theta_DP, arms)
    above_DGK = _above(a_DG, alpha_DG, x_GK)
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
