"""Linear contrasts of the losses of cells, such as a difference, with an interval and a p-value.

A contrast is sum_c w_c l_c over cells c, each at its best learning rate. It is computed for each replicate that all of
its cells have, and tested over the replicates, as `paired_tests.paired_test`. With few replicates, the residual
variance of all cells is pooled if it seems equal.

A diverged run counts as infinity: a contrast with infinite losses of one sign of w is infinite with that sign, and
undefined if both signs occur or if w = 0, because the losses do not tell which side is worse.

Shapes: k cells, n replicates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from normlab.analysis.cells import Cell, reason_cells_not_comparable
from normlab.analysis.columns import Definition
from normlab.analysis.intervals import LEVEL, Replicate, design_of
from normlab.analysis.paired_tests import PairedTest, paired_test
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
Term = tuple[Cell, float]


def weighted_sums(weights: Iterable[float], values: Sequence[Mapping[Replicate, float]]) -> dict[Replicate, float]:
    """Return sum_c w_c l_c of each replicate that has all values l_c; NaN if it is undefined."""
    weights = list(weights)
    # A seed's effect cancels in a contrast only if every cell has the seed.
    common = sorted(set(values[0]).intersection(*values[1:]), key=str)
    sums: dict[Replicate, float] = {}
    for replicate in common:
        sums[replicate] = sum(weight * losses[replicate] for weight, losses in zip(weights, values, strict=True))
    return sums


def contrast(terms: Sequence[Term], pool: Pool | None = None) -> PairedTest | None:
    """Test a contrast over the replicates that all of its cells have; return None if there is none.

    Return None, too, if runs of each replicate diverged on both sides, so that nothing is estimated.
    The pooled residual variance is used if it includes all cells.
    """
    weights: list[float] = []
    losses: list[Mapping[Replicate, float]] = []
    keys: set[Key] = set()
    for cell, weight in terms:
        weights.append(weight)
        losses.append(cell.final.losses)
        keys.add(cell.key)
    sums = weighted_sums(weights, losses)
    if not sums:
        return None
    # A replicate that diverged on both sides favours neither: its difference counts as zero.
    both_diverged = 0
    for replicate, value in sums.items():
        if math.isnan(value):
            sums[replicate] = 0.0
            both_diverged += 1
    if both_diverged == len(sums):
        return None
    test = paired_test(sums, both_diverged=both_diverged)
    # The pooled variance is that of cells without a bad outcome, and says nothing of others.
    if pool is None or test.test != "paired t" or not keys <= pool.keys:
        return test
    low, high, p = pool.interval(test.estimate, weights, len(sums))
    return test._replace(low=low, high=high, p=p, test=f"{POOLED}, {pool.freedom} degrees of freedom")


def compare_cells(cell: Cell, baseline: Cell, pool: Pool | None = None) -> PairedTest | None:
    """Test loss(cell) - loss(baseline), paired by replicate.

    Return None if there is no pair, or if the cells must not be compared.
    """
    if reason_cells_not_comparable([cell, baseline]):
        return None
    return contrast([(cell, 1.0), (baseline, -1.0)], pool)


@dataclass(frozen=True, slots=True)
class Pool:
    """The residual variance of several cells that share replicates, in an analysis of variance with blocks.

    The model is l_cr = m_c + b_r + e_cr for cell c and replicate r, with Var(e) = s^2 for every cell. Then
    s^2 = sum(residual^2) / ((k - 1)(n - 1)), and a contrast has the variance s^2 sum(w^2) / n with (k - 1)(n - 1)
    degrees of freedom.
    """

    keys: frozenset[Key]
    variance: float
    freedom: int

    def interval(self, estimate: float, weights: Iterable[float], n: int) -> tuple[float, float, float]:
        from scipy.special import stdtr, stdtrit

        squares = math.fsum(weight**2 for weight in weights)
        error = math.sqrt(self.variance * squares / n)
        half = float(stdtrit(self.freedom, (1 + LEVEL) / 2)) * error
        # Without a residual every difference but zero is certain.
        p = float(estimate == 0)
        if error:
            p = 2 * float(stdtr(self.freedom, -abs(estimate) / error))
        return estimate - half, estimate + half, p


def pool_cells(cells: Sequence[Cell]) -> Pool | None:
    """Return the pooled residual variance of the cells without a bad outcome."""
    losses: dict[Key, Mapping[Replicate, float]] = {}
    for cell in cells:
        # One stuck seed would make the variance of all cells that of stuck and trained seeds.
        if not cell.has_bad_outcome:
            losses[cell.key] = cell.final.losses
    return pool_residuals(losses)


def pool_residuals(losses: Mapping[Key, Mapping[Replicate, float]]) -> Pool | None:
    """Return the pooled residual variance of cells; None if pooling is not possible, not needed or not justified.

    Pooling needs at least three cells with finite losses of the same 2 to `MAX_POOLED` independent replicates, and
    residual variances that Bartlett's test does not find to differ (p >= `MIN_P_EQUAL`).

    Source: Scheffe 1959, The Analysis of Variance, section 4.2; Bartlett 1937, Proc. R. Soc. A 160, 268-282.
    """
    finite: dict[Key, Mapping[Replicate, float]] = {}
    for key, values in losses.items():
        if values and all(map(math.isfinite, values.values())):
            finite[key] = values
    if len(finite) < 3:
        return None
    # The residuals of a table with blocks: every cell has the replicates of the first one.
    replicates = sorted(next(iter(finite.values())), key=str)
    if any(values.keys() != set(replicates) for values in finite.values()):
        return None
    k, n = len(finite), len(replicates)
    if not 2 <= n <= MAX_POOLED or design_of(replicates).crossed:
        return None
    import numpy as np

    table = np.empty((k, n))
    for row, values in enumerate(finite.values()):
        table[row] = [values[replicate] for replicate in replicates]
    variances = _residual_variances(table[None])
    # Bartlett's statistic has the logarithm of every variance.
    if not variances.min() > 0:
        return None
    # The statistic's distribution depends on k and n only, so draws of any normal losses give its p-value.
    simulated = _residual_variances(np.random.default_rng(0).normal(size=(DRAWS, k, n)))
    larger = int((_bartlett(simulated) >= _bartlett(variances)).sum())
    if (larger + 1) / (DRAWS + 1) < MIN_P_EQUAL:
        return None
    return Pool(frozenset(finite), float(variances.mean()), (k - 1) * (n - 1))


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


def slope_weights(x: Sequence[float] | NDArray[np.float64]) -> list[float]:
    """Return the weights of the least-squares slope over x: (x_k - mean(x)) / sum((x - mean(x))^2)."""
    import numpy as np

    centred = np.asarray(x) - np.mean(x)
    return (centred / max(float((centred**2).sum()), 1e-300)).tolist()


def pool_notes(methods: Iterable[str]) -> list[str]:
    """Return the definition of `POOLED` if one of the methods is such a test."""
    if not any(method.startswith(POOLED) for method in methods):
        return []
    pooled = (
        "pooled t: the residual variance, after the means of cells and seeds, is pooled over the cells without a bad "
        f"outcome, because Bartlett's test does not find it to differ (p >= {MIN_P_EQUAL:g}), as it seldom does with "
        "few seeds"
    )
    return [Definition(pooled)]


def fisher_p(count: int, n: int, other_count: int, other_n: int) -> float:
    """Return the two-sided p-value of Fisher's exact test that two shares are equal."""
    from scipy.stats import fisher_exact

    return float(fisher_exact([[count, n - count], [other_count, other_n - other_count]]).pvalue)  # pyright: ignore[reportAttributeAccessIssue]
