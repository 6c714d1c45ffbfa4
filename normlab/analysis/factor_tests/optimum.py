"""The learning rate at which the loss is lowest, by a parabola through the losses near the lowest one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from normlab.analysis.cells import count_bad
from normlab.analysis.columns import Column, Definition
from normlab.analysis.factor_tests.base import BAD, CONTRAST, WHERE, FactorTest, Question, TestRow, values_of
from normlab.analysis.intervals import LEVEL
from normlab.analysis.rate_range import NEAR
from normlab.store.record import RunRecord

FEWEST = 4
"""Fewest losses to which a parabola, which has three numbers, is fitted."""
FEWEST_RATES = 3
"""Fewest learning rates of these losses: with two, many parabolas fit equally well."""
TOKENS: Column[TestRow] = Column("tokens", itemgetter("tokens"), "tokens", "{:,}".format)


class Optimum(FactorTest):
    """The best learning rate of each cell, and what its runs have cost."""

    name = "optimum"
    summary = "the best learning rate, by a parabola"
    number_format = "#.3g"  # a learning rate may be far below 0.0001

    def rows(self, question: Question) -> Iterator[TestRow]:
        for cell in question.cells:
            optimum = best_rate(cell.runs)
            row = self.labels("", f"optimum: {cell.label}", "learning rate")
            row |= dict.fromkeys(("estimate", "low", "high"))
            row |= {"missing": "fewer than 4 losses near the lowest, or no minimum", "n": 0}
            if optimum is not None:
                row |= {"estimate": optimum.estimate, "low": optimum.low, "high": optimum.high, "n": optimum.n}
            row |= dict.fromkeys(("n_crossed", "p", "method", "lr"))
            tokens = sum(run.status.tokens for run in cell.completed)
            yield row | {"bad": count_bad(cell.completed), "runs": len(cell.completed), "tokens": tokens}

    def columns(self, rows: Sequence[TestRow]) -> list[Column[TestRow]]:
        columns = [WHERE, CONTRAST, self.estimate_column(), TOKENS]
        if any(values_of(rows, "bad")):
            columns.append(BAD)
        return columns

    def notes(self, rows: Sequence[TestRow]) -> list[str]:
        optimum = (
            "optimum: the learning rate with the lowest loss, by a parabola in ln(rate) through the n losses of runs "
            f"that have learned, within {NEAR} nats/token of the lowest; with Fieller's {LEVEL:.0%} interval, if it "
            "has ends: in simulations (8 and 12 rates, noise 0.01 and 0.03) 70 to 92 % of these hold the optimum"
        )
        return [Definition(optimum), Definition("tokens: total of all runs of the cell")]


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
    b + 2 c u = 0 is not rejected by a t test. None with fewer than `FEWEST` such runs or `FEWEST_RATES`, without a
    minimum, or with one beyond these rates. Fewer than 95 % of the intervals with ends hold the optimum, since only a
    parabola that happens to be steep has one: 70 to 92 % with 8 or 12 rates and noise of 0.01 or 0.03 nats/token.

    Source: Fieller 1954, doi:10.1111/j.2517-6161.1954.tb00159.x.
    """
    # Imported here, because every `normlab summarize` imports this file. scipy.special, and not scipy.stats.t, because
    # scipy.stats takes a second to import.
    import numpy as np
    from scipy.special import stdtrit

    # Far from the minimum the loss is no parabola, which has no bound: the losses of runs that learn have one.
    learned = [run for run in runs if run.has_learned]
    lowest = min((run.loss for run in learned), default=math.nan)
    rates: list[float] = []
    losses: list[float] = []
    for run in learned:
        if run.loss <= lowest + NEAR:
            rates.append(run.lr)
            losses.append(run.loss)
    n = len(losses)
    if n < FEWEST or len(set(rates)) < FEWEST_RATES:
        return None
    rates_N = np.log(rates)
    losses_N = np.array(losses)
    # Centred, so that the three columns of the least-squares problem are far from parallel.
    centre = rates_N.mean()
    design_N3 = np.vander(rates_N - centre, 3, increasing=True)
    coefficients_3 = np.linalg.lstsq(design_N3, losses_N)[0]
    _, b, c = coefficients_3
    # A parabola that opens downwards has no minimum, and one outside the rates is an extrapolation.
    if c <= 0:
        return None
    optimum = centre - b / (2 * c)
    if not rates_N.min() <= optimum <= rates_N.max():
        return None
    freedom = n - 3
    residuals_N = losses_N - design_N3 @ coefficients_3
    covariance_33 = np.linalg.inv(design_N3.T @ design_N3) * (residuals_N @ residuals_N) / freedom
    # (b + 2 c u)^2 = t^2 var(b + 2 c u), a quadratic equation for u
    t = float(stdtrit(freedom, (1 + LEVEL) / 2))
    vb, vbc, vc = covariance_33[1, 1], covariance_33[1, 2], covariance_33[2, 2]
    second, first, zeroth = 4 * (c * c - t * t * vc), 4 * (b * c - t * t * vbc), b * b - t * t * vb
    # Otherwise the curvature is not known to be positive, and the solutions are no interval.
    low = high = None
    if second > 0:
        root = math.sqrt(max(0.0, first * first - 4 * second * zeroth))
        low = math.exp(centre + (-first - root) / (2 * second))
        high = math.exp(centre + (-first + root) / (2 * second))
    return BestRate(math.exp(optimum), low, high, n)
