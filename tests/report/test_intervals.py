"""Intervals and tests against scipy, against enumeration of every sign, and in a simulation whose truth is known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import stdtr, stdtrit

from normlab.report.intervals import holm, mean_interval, paired
from normlab.report.student_t import quantile, tail

inf = math.inf


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 99, 1000])
def test_students_t_is_scipys(freedom):
    for t in (1e-3, 0.1, 0.5, 1, 1.5, 2, 3, 5, 10, 50, 1e3):
        assert tail(t, freedom) == pytest.approx(stdtr(freedom, -t), rel=1e-11)
        assert tail(-t, freedom) == pytest.approx(stdtr(freedom, t), rel=1e-11)
    assert (tail(0, freedom), tail(inf, freedom)) == (0.5, 0)
    for level in (0.5, 0.9, 0.95, 0.99):
        assert quantile(freedom, level) == pytest.approx(stdtrit(freedom, (1 + level) / 2), rel=1e-11)


def test_a_mean_and_its_interval_are_scipys():
    values = [2.31, 2.25, 2.28, 2.4, 2.22]
    found = mean_interval(values)
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert found == pytest.approx((np.mean(values), low, high, 5), rel=1e-12)


def test_no_interval_of_one_value_or_with_an_infinite_one():
    assert mean_interval([2.5]) == (2.5, None, None, 1)
    assert mean_interval([2.5, inf, 2.4]) == (inf, None, None, 3)
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])


def test_the_paired_t_test_is_scipys():
    a, b = np.random.default_rng(0).normal(size=(2, 7))
    found, theirs = paired((a - b).tolist()), stats.ttest_rel(a, b)
    assert (found.p, found.test) == (pytest.approx(theirs.pvalue, rel=1e-10), "paired t")
    low, high = theirs.confidence_interval(0.95)
    assert found[:3] == pytest.approx((np.mean(a - b), low, high), rel=1e-10)


def test_one_pair_proves_nothing_and_equal_runs_no_difference():
    assert paired([0.1]) == (0.1, None, None, None, 1, "one pair")
    assert paired([0.0, 0.0, 0.0])[:4] == (0, 0, 0, 1)
    assert paired([inf]).p is None
    for bad in ([], [math.nan, 1.0]):
        with pytest.raises(ValueError, match="paired differences"):
            paired(bad)


def by_enumeration(differences):
    """The two-sided p-value, every sign being flipped, from ranks by scipy."""
    ranks = stats.rankdata(np.abs(differences))
    signed = [(rank, d > 0) for rank, d in zip(ranks, differences, strict=True) if d]
    seen = sum(rank for rank, positive in signed if positive)
    sums = np.array([sum(itertools.compress([r for r, _ in signed], flips))
                     for flips in itertools.product((0, 1), repeat=len(signed))])  # fmt: skip
    return min(1, 2 * min((sums <= seen).mean(), (sums >= seen).mean()))


@pytest.mark.parametrize(
    "differences",
    [
        [inf, 0.1, 0.2],
        [inf, inf, -0.1, 0.3, 0.2, 0.25],
        [-inf, -0.1, -0.2, -0.3, 0.05, -0.15, -0.4],
        [inf, -inf, 0.1, 0.1, -0.1, 0.0, 0.0],
        [inf, 0.0, 0.0, 0.0],
        [inf] * 8,
        [-inf, inf],
    ],
)
def test_with_diverged_runs_it_is_the_exact_signed_rank_test(differences):
    found = paired(differences)
    assert found.p == pytest.approx(by_enumeration(differences), rel=1e-12)
    assert found.test.startswith(f"signed-rank ({sum(map(math.isinf, differences))} of {len(differences)} pairs")
    assert paired([-d for d in differences]).p == pytest.approx(found.p, rel=1e-12)


def test_without_ties_it_is_scipys_wilcoxon_with_a_number_above_all_others_for_infinity():
    differences = [0.11, -0.2, 0.33, 0.44, -0.05, 0.61, 0.7, inf]
    theirs = stats.wilcoxon([min(d, 99.0) for d in differences], method="exact")
    assert paired(differences).p == pytest.approx(theirs.pvalue, rel=1e-12)


def test_the_interval_by_ranks_holds_just_the_shifts_that_are_not_rejected():
    differences = [0.11, -0.2, 0.33, 0.44, -0.05, 0.61, 0.7, inf]
    found = paired(differences)
    assert found.low is not None
    inside = [shift for shift in np.linspace(-1, 1, 401) + 1e-4 if by_enumeration(np.array(differences) - shift) > 0.05]
    assert found.low == pytest.approx(inside[0], abs=0.006)
    assert found.high == inf or found.high == pytest.approx(inside[-1], abs=0.006)
    assert found.low < found.estimate <= found.high


def test_fewer_than_six_pairs_have_no_interval_by_ranks():
    assert paired([inf, 0.1, 0.2, 0.3, 0.4])[1:3] == (None, None)
    assert paired([inf, 0.1, 0.2, 0.3, 0.4]).p == 2**-4
    assert paired([inf, 0.1, 0.2, 0.3, 0.4, 0.5]).low == 0.1


def test_a_divergence_is_a_loss_by_the_most():
    ahead = [-0.1, -0.2, -0.1, -0.3, -0.2, -0.1, -0.2, -0.3]
    assert paired(ahead).p < 0.01
    assert paired([*ahead, inf, inf]).p > paired([*ahead, -inf, -inf]).p


def test_holm_against_the_numbers_of_its_definition():
    # Holm 1979: sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1; the last may not be below the one before.
    assert holm([0.01, 0.04, None, 0.03, 0.005]) == pytest.approx([0.03, 0.06, None, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1, 1]
    assert holm([None]) == [None]


REPEATED = 4000
NOISE = math.sqrt(0.05 * 0.95 / REPEATED)
"""Standard error of a rate of 5 %: 0.34 %, so that the bars are at least 2.9 of them away."""


def test_in_a_simulation_intervals_cover_and_the_test_rejects_at_the_rates_that_they_state():
    """Losses of 3 and 5 seeds: an effect of the seed that both sides share, and noise of their own."""
    draw = np.random.default_rng(1)
    for n in (3, 5):
        seeds = draw.normal(2.3, 0.02, (REPEATED, n))
        a = seeds + draw.normal(0, 0.01, (REPEATED, n))
        same, better = (seeds + shift + draw.normal(0, 0.01, (REPEATED, n)) for shift in (0, -0.015))
        covered = [i.low <= 2.3 <= i.high for i in (mean_interval(row) for row in a.tolist())]
        assert 0.93 <= np.mean(covered) <= 0.97
        null = [paired(row) for row in (a - same).tolist()]
        assert 0.04 <= np.mean([test.p < 0.05 for test in null]) <= 0.06
        shifted = [paired(row) for row in (better - a).tolist()]
        assert 0.93 <= np.mean([test.low <= -0.015 <= test.high for test in shifted]) <= 0.97
        assert np.mean([test.p < 0.05 for test in shifted]) > 0.15


def test_in_a_simulation_with_divergence_the_test_rejects_no_more_than_it_states():
    """Each side diverges once in ten runs; ranks of 10 pairs have steps, 4.9 % being the next below 5."""
    draw, n = np.random.default_rng(2), 10
    a, b = draw.normal(2.3, 0.02, (2, REPEATED, n))
    a[draw.random(a.shape) < 0.1] = inf
    b[draw.random(b.shape) < 0.1] = inf
    differences = np.zeros_like(a)
    np.subtract(a, b, out=differences, where=~(np.isinf(a) & np.isinf(b)))
    tests = [paired(row) for row in differences.tolist()]
    assert np.mean([test.test != "paired t" for test in tests]) > 0.7
    assert 0.04 <= np.mean([test.p < 0.05 for test in tests]) <= 0.06
    worse = np.where(draw.random(a.shape) < 0.7, inf, differences)
    assert np.mean([paired(row).p < 0.05 for row in worse.tolist()]) > 0.5


def test_in_a_simulation_holm_finds_one_of_ten_that_are_none_once_in_twenty_at_most():
    draw = np.random.default_rng(3)
    tables = draw.normal(0, 0.01, (REPEATED // 4, 10, 4)).tolist()
    wrong = [min(holm([paired(row).p for row in table])) < 0.05 for table in tables]
    assert 0.02 <= np.mean(wrong) <= 0.05 + 3 * NOISE * 2


def test_where_both_diverged_no_mean_is_made_of_it():
    found = paired([0.0, 0.0, -0.1], both_diverged=2)
    assert found.test == "signed-rank (2 of 3 pairs with a diverged run, 2 on both sides)"
    assert (found.low, found.high) == (None, None)
    assert found.p == 1.0  # one pair says something, and either sign of it is as likely
    both = paired([0.0] * 7, both_diverged=7)
    assert (both.estimate, both.p) == (0.0, 1.0)
