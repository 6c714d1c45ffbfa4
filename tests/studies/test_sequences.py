"""Confidence sequences, against integrals of scipy's densities."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad

from normlab.analysis.sequences import EFFECT_VARIANCE, half_width, level_of, mean_sequence, share_sequence


@pytest.mark.parametrize(("n", "alpha"), [(3, 0.1), (4, 0.05), (4, 0.1), (7, 0.05), (7, 0.1), (16, 0.05), (16, 0.1)])
def test_at_the_ends_of_the_interval_of_a_mean_the_likelihood_ratio_of_t_is_one_over_alpha(n, alpha):
    values = np.random.default_rng(n).normal(1, 0.1, n)
    prior = stats.norm(0, math.sqrt(EFFECT_VARIANCE))
    for end in mean_sequence(values.tolist(), alpha):
        t = stats.ttest_1samp(values, end).statistic

        def density(effect, t=t):
            return stats.nct.pdf(t, n - 1, effect * math.sqrt(n)) * prior.pdf(effect)

        # The density of t at an effect is narrow around t / sqrt(n).
        expected = quad(density, -30, 30, points=[0, t / math.sqrt(n)], limit=400)[0] / stats.t.pdf(t, n - 1)
        assert expected == pytest.approx(1 / alpha, rel=1e-4)


@pytest.mark.parametrize(("fewest", "alpha"), [(3, 0.1), (4, 0.05), (5, 0.01)])
def test_the_fewest_values_with_bounds(fewest, alpha):
    """With fewer values, the likelihood ratio of t stays below 1 / alpha however large t is."""
    for n in range(2, 7):
        largest = (1 + n * EFFECT_VARIANCE) ** ((n - 1) / 2)
        assert (largest > 1 / alpha) == (n >= fewest)
        low, high = mean_sequence([0.1 * (k + 1) for k in range(n)], alpha)
        assert math.isfinite(low) == math.isfinite(high) == (n >= fewest)


def test_equal_values_are_a_point():
    assert mean_sequence([0.25] * 8, 0.05) == (0.25, 0.25)


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.5])
def test_level_of_is_the_inverse_of_half_width(alpha):
    assert level_of(9, half_width(9, alpha)) == pytest.approx(alpha)


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
