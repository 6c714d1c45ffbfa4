"""Linear contrasts of the losses of cells, such as a difference, with an interval and a p-value.

A contrast is sum_c w_c l_c over cells c, at one learning rate each. It is computed for each replicate that all of its
cells have, and tested over the replicates, as `intervals.paired_test`. With few replicates, the residual variance of
all cells is pooled if it seems equal.

A diverged run counts as infinity: a contrast with infinite losses of one sign of w is infinite with that sign, and 0 if
both signs occur or if w = 0, because the losses do not tell which side is worse.

Shapes: k cells, n replicates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from normlab.analysis.cells import Cell
from normlab.analysis.intervals import LEVEL, PairedTest, Replicate, design_of, paired_test
from normlab.store.record import Setting

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

POOLED = "pooled t"
"""The beginning of the name of a test with pooled variance."""
MAX_POOLED = 4
"""Most replicates at which residuals of several cells are pooled; with more, each contrast has enough of its own."""
MIN_P_EQUAL = 0.2
"""Smallest p-value of Bartlett's test at which the cells count as equally variable. Larger than 0.05, because the test
has little power with few replicates."""

DRAWS = 1999
"""Simulated tables for the p-value of Bartlett's test."""

Key = tuple[Setting, ...]
Rates = Mapping[Key, float | None]
"""The learning rate of each cell, by the cell's key."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The residual variance of several cells that share replicates, in an analysis of variance with blocks.

    The model is l_cr = m_c + b_r + e_cr for cell c and replicate r, with Var(e) = s^2 for every cell. Then
    s^2 = sum(residual^2) / ((k - 1)(n - 1)), and a contrast has the variance s^2 sum(w^2) / n with (k - 1)(n - 1)
    degrees of freedom.
    """

    keys: frozenset[Key]
    """The cells."""
    variance: float
    freedom: int
    p_equal: float
    """p-value of Bartlett's test that the residuals of the cells have equal variances, by simulation."""

    def interval(self, estimate: float, weights: Iterable[float], n: int) -> tuple[float, float, float]:
        """Return the lower bound, the upper bound and the two-sided p-value of a contrast."""
        from scipy.special import stdtr, stdtrit

        error = math.sqrt(self.variance * math.fsum(weight**2 for weight in weights) / n)
        half = float(stdtrit(self.freedom, (1 + LEVEL) / 2)) * error
        p = 2 * float(stdtr(self.freedom, -abs(estimate) / error)) if error else float(estimate == 0)
        return estimate - half, estimate + half, p


def pool_residuals(losses: Mapping[Key, Mapping[Replicate, float]]) -> Pool | None:
    """Return the pooled residual variance of cells; None if pooling is not possible, not needed or not justified.

    Pooling needs at least three cells with finite losses of the same 2 to `MAX_POOLED` independent replicates, and
    residual variances that Bartlett's test does not find to differ (p >= `MIN_P_EQUAL`).

    Source: Scheffe 1959, The Analysis of Variance, section 4.2; Bartlett 1937, Proc. R. Soc. A 160, 268-282.
    """
    finite = {key: values for key, values in losses.items() if values and all(map(math.isfinite, values.values()))}
    if len(finite) < 3:
        return None
    replicates = sorted(next(iter(finite.values())), key=str)
    k, n = len(finite), len(replicates)
    if not 2 <= n <= MAX_POOLED or design_of(replicates).crossed:
        return None
    if any(values.keys() != set(replicates) for values in finite.values()):
        return None
    import numpy as np

    table = np.array([[values[replicate] for replicate in replicates] for values in finite.values()])
    variances = _residual_variances(table[None])[0]
    if not variances.min() > 0:
        return None
    # The statistic's distribution depends on k and n only, so draws of any normal losses give its p-value.
    simulated = _residual_variances(np.random.default_rng(0).normal(size=(DRAWS, k, n)))
    larger = int((_bartlett(simulated) >= _bartlett(variances[None])[0]).sum())
    p_equal = (larger + 1) / (DRAWS + 1)
    pool = Pool(frozenset(finite), float(variances.mean()), (k - 1) * (n - 1), p_equal)
    return pool if p_equal >= MIN_P_EQUAL else None


def _residual_variances(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the variance of the residuals of each cell, (draws, k), whose mean is s^2; losses are (draws, k, n)."""
    cells, seeds = losses.mean(2, keepdims=True), losses.mean(1, keepdims=True)
    residuals = losses - cells - seeds + losses.mean((1, 2), keepdims=True)
    k, n = losses.shape[1:]
    return (residuals**2).sum(2) * k / ((k - 1) * (n - 1))


def _bartlett(variances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Bartlett's statistic, but for constant factors: ln(mean of the variances) - mean(ln(variances))."""
    import numpy as np

    return np.log(variances.mean(1)) - np.log(variances).mean(1)


class Term(NamedTuple):
    """A cell of a contrast, with its weight and its learning rate."""

    cell: Cell
    weight: float
    lr: float | None


def contrast(terms: Sequence[Term], pool: Pool | None = None) -> PairedTest | None:
    """Test a contrast over the replicates that all of its cells have; return None if there is none.

    Args:
        terms: The cells, weights and learning rates.
        pool: The pooled residual variance, which is used if it includes all cells.
    """
    losses = [term.cell.losses.get(term.lr, {}) if term.lr is not None else {} for term in terms]
    weights = [term.weight for term in terms]
    common = sorted(set(losses[0]).intersection(*losses[1:]), key=str)
    if not common:
        return None
    values: dict[Replicate, float] = {}
    undefined = 0
    for replicate in common:
        products = [(weight, loss[replicate]) for weight, loss in zip(weights, losses, strict=True)]
        infinite = {math.copysign(1, weight) if weight else 0 for weight, loss in products if math.isinf(loss)}
        if not infinite:
            values[replicate] = math.fsum(weight * loss for weight, loss in products)
        elif infinite in ({1}, {-1}):
            values[replicate] = infinite.pop() * math.inf
        else:
            values[replicate], undefined = 0.0, undefined + 1
    test = paired_test(values, both_diverged=undefined)
    if (
        pool is None
        or len(common) < 2
        or test.test != "paired t"
        or not pool.keys.issuperset(t.cell.key for t in terms)
    ):
        return test
    low, high, p = pool.interval(test.estimate, weights, len(common))
    return test._replace(low=low, high=high, p=p, test=f"{POOLED}, {pool.freedom} degrees of freedom")


def pool_cells(cells: Sequence[Cell], lrs: Rates) -> Pool | None:
    """Return the pooled residual variance of the cells without a bad outcome, each at one learning rate."""
    losses: dict[Key, Mapping[Replicate, float]] = {}
    for cell in cells:
        lr = lrs[cell.key]
        if lr is not None and not cell.has_bad_outcome_at(lr):
            losses[cell.key] = cell.losses.get(lr, {})
    return pool_residuals(losses)


def compare_cells(
    cell: Cell, lr: float | None, other: Cell, other_lr: float | None, pool: Pool | None = None
) -> PairedTest | None:
    """Test loss(cell) - loss(other), paired by replicate; return None if there is no pair."""
    return contrast([Term(cell, 1.0, lr), Term(other, -1.0, other_lr)], pool)


def slope_weights(x: Sequence[float] | NDArray[np.float64]) -> list[float]:
    """Return the weights of the least-squares slope over x: (x_k - mean(x)) / sum((x - mean(x))^2)."""
    import numpy as np

    centred = np.asarray(x) - np.mean(x)
    return (centred / max(float((centred**2).sum()), 1e-300)).tolist()


def fisher_p(count: int, n: int, other_count: int, other_n: int) -> float:
    """Return the two-sided p-value of Fisher's exact test that two shares are equal."""
    from scipy.stats import fisher_exact

    return float(fisher_exact([[count, n - count], [other_count, other_n - other_count]]).pvalue)  # pyright: ignore[reportAttributeAccessIssue]
