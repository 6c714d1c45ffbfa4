"""Confidence sequences, against sums over all signs, scipy's ranks and bets one after another."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from normlab.analysis.sequences import (
    log_wealth,
    share_sequence,
    typical_sequence,
    typical_value,
)

FACTORS = (-6, -1.5, 1.5, 6)


def capital(values, center):
    """Return the mean capital of bets on the sides of the values, each by its rank among those so far."""
    capitals = [1.0] * len(FACTORS)
    for i, value in enumerate(values):
        distances = [abs(earlier - center) for earlier in values[: i + 1]]
        rank = (stats.rankdata(distances)[-1] - 0.5) / (i + 1)
        side = np.sign(value - center)
        for index, factor in enumerate(FACTORS):
            capitals[index] *= 1 + side * math.tanh(factor * rank)
    return sum(capitals) / len(FACTORS)


@pytest.mark.parametrize("n", [1, 7, 24])
def test_the_e_process_of_a_center_is_the_capital_of_bets_by_ranks(n):
    values = np.random.default_rng(n).normal(1, 0.5, n)
    for center in (0.4, 1.0, float(values[0])):
        expected = [math.log(capital(values[: i + 1].tolist(), center)) for i in range(n)]
        assert log_wealth(values, center).tolist() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("distances", [(0.3, 2.0, 1.1, 50.0, 0.7, 0.9), (1.0, 1.0, 1.0, 2.0, 2.0, 0.5)])
def test_the_e_process_of_symmetric_values_has_the_expected_value_one(distances):
    """Whatever the distances are, equal ones too, if both sides are equally probable."""
    sides = np.array(list(itertools.product((-1, 1), repeat=len(distances))))
    assert np.exp(log_wealth(3 + sides * np.array(distances), 3.0)).mean(0) == pytest.approx(1)


@pytest.mark.parametrize(("n", "alpha"), [(7, 0.1), (8, 0.05), (12, 0.05), (16, 0.005), (24, 0.5)])
def test_the_interval_of_a_center_has_all_centers_whose_e_process_is_below_one_over_alpha(n, alpha):
    values = np.random.default_rng(n).normal(1, 0.1, n).tolist()
    low, high = typical_sequence(values, alpha)
    for center in np.linspace(0.5, 1.5, 60):
        if not low <= center <= high:
            assert capital(values, center) >= 1 / alpha
    for inside in (low + 1e-9, high - 1e-9):
        assert capital(values, inside) < 1 / alpha
    assert low <= typical_value(values) <= high


@pytest.mark.parametrize(("fewest", "alpha"), [(5, 0.1), (6, 0.05), (9, 0.01)])
def test_the_fewest_values_with_bounds(fewest, alpha):
    """All on one side of a center and at growing distances, values make the most of the bets."""
    for n in range(2, 10):
        values = [1.0 + 2.0**i for i in range(n)]
        low, _ = typical_sequence(values, alpha)
        assert math.isfinite(low) == (capital(values, 0.0) >= 1 / alpha) == (n >= fewest)


def test_equal_values_are_a_point():
    assert typical_sequence([0.25] * 8, 0.05) == (0.25, 0.25)


def test_the_typical_value_is_the_median_of_the_means_of_all_pairs():
    values = [0.0, 1.0, 3.0, 100.0]
    pairs = [(a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2)]
    assert typical_value(values) == np.median(pairs) == 2.5


def test_a_far_value_moves_neither_the_estimate_nor_the_interval_far():
    values = np.random.default_rng(3).normal(0, 0.01, 16).tolist()
    far = [*values[:-1], 50.0]
    for ends in (typical_sequence(far, 0.05), (typical_value(far), typical_value(far))):
        assert max(map(abs, ends)) < 0.03


@pytest.mark.parametrize(("count", "n"), [(0, 5), (3, 8), (8, 8)])
def test_at_the_ends_of_the_interval_of_a_share_the_wealth_of_the_bets_is_one_over_alpha(count, n):
    low, high = share_sequence(count, n, 0.05)
    outcomes = [1] * count + [0] * (n - count)
    for p in {low, high} - {0.0, 1.0}:
        wealth, ones = 1.0, 0
        for trial, outcome in enumerate(outcomes):
            expected = (ones + 0.5) / (trial + 1)
            wealth *= expected / p if outcome else (1 - expected) / (1 - p)
            ones += outcome
        assert wealth == pytest.approx(20)
    assert (low == 0) == (count == 0)
    assert (high == 1) == (count == n)
    assert low <= count / n <= high


def test_a_few_values_may_have_one_end():
    low, high = typical_sequence([-0.1, -0.09, -0.08, -0.07, -0.06, -0.05, -0.04, -0.03], 0.05)
    assert (math.isfinite(low), high) == (True, math.inf)
