"""Intervals and tests compared with scipy, with an enumeration of all signs, and in simulations with known truth."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from normlab.analysis.cells import SeedMean
from normlab.analysis.intervals import Interval, Replicate, format_losses, mean_interval
from normlab.analysis.paired_tests import PairedTest, holm, paired_test

inf = math.inf


def independent(values: Iterable[float]) -> dict[Replicate, float]:
    """Return values by independent replicate: each has its own seed and data seed."""
    return {(index, index): value for index, value in enumerate(values)}


def crossed(table: Sequence[Sequence[float | None]]) -> dict[Replicate, float]:
    """Return the values of a table by replicate: rows are seeds, columns are data seeds; None is left out."""
    return {(i, j): value for i, row in enumerate(table) for j, value in enumerate(row) if value is not None}


def covers(found: Interval, value: float) -> bool:
    assert found.low is not None
    assert found.high is not None
    return found.low <= value <= found.high


def rejected(found: PairedTest) -> bool:
    assert found.p is not None
    return found.p < 0.05


def test_mean_interval_equals_scipy():
    values = [2.31, 2.25, 2.28, 2.4, 2.22]
    found = mean_interval(independent(values))
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert found[:3] == pytest.approx((np.mean(values), low, high), rel=1e-12)
    assert (found.design.n, str(found.design)) == (5, "5")


def test_one_value_or_an_infinite_one_has_no_interval():
    assert mean_interval(independent([2.5]))[:3] == (2.5, None, None)
    assert mean_interval(independent([2.5, inf, 2.4]))[:3] == (inf, None, None)
    with pytest.raises(ValueError, match="no values"):
        mean_interval({})


def test_paired_t_test_equals_scipy():
    a, b = np.random.default_rng(0).normal(size=(2, 7))
    found = paired_test(independent((a - b).tolist()))
    reference: Any = stats.ttest_rel(a, b)
    assert (found.p, found.test) == (pytest.approx(reference.pvalue, rel=1e-10), "paired t")
    low, high = reference.confidence_interval(0.95)
    assert found[:3] == pytest.approx((np.mean(a - b), low, high), rel=1e-10)


def test_one_pair_has_no_p_value_and_equal_runs_have_p_1():
    assert paired_test(independent([0.1])) == (0.1, None, None, None, (1, (1, 1)), "one pair")
    assert paired_test(independent([0.0, 0.0, 0.0]))[:4] == (0, 0, 0, 1)
    assert paired_test(independent([inf])).p is None
    for bad in ([], [math.nan, 1.0]):
        with pytest.raises(ValueError, match="paired differences"):
            paired_test(independent(bad))


def by_enumeration(differences):
    """Return the two-sided p-value over all signs, with ranks by scipy."""
    ranks = stats.rankdata(np.abs(differences))
    signed = [(rank, d > 0) for rank, d in zip(ranks, differences, strict=True) if d]
    statistic = sum(rank for rank, positive in signed if positive)
    sums = np.array([sum(itertools.compress([r for r, _ in signed], flips))
                     for flips in itertools.product((0, 1), repeat=len(signed))])  # fmt: skip
    return min(1, 2 * min((sums <= statistic).mean(), (sums >= statistic).mean()))


@pytest.mark.parametrize(
    "differences",
    [
        [inf, 0.1, 0.2],
        [-inf, -0.1, -0.2, -0.3, 0.05, -0.15, -0.4],
        [inf, -inf, 0.1, 0.1, -0.1, 0.0, 0.0],
        [inf, 0.0, 0.0, 0.0],
        [inf] * 8,
        [-inf, inf],
    ],
)
def test_divergence_uses_the_exact_signed_rank_test(differences):
    found = paired_test(independent(differences))
    assert found.p == pytest.approx(by_enumeration(differences), rel=1e-12)
    assert found.test.startswith(f"signed-rank ({sum(map(math.isinf, differences))} of {len(differences)} pairs")
    assert paired_test(independent([-d for d in differences])).p == pytest.approx(found.p, rel=1e-12)


def test_rank_interval_has_exactly_the_shifts_that_are_not_rejected():
    differences = [0.11, -0.2, 0.33, 0.44, -0.05, 0.61, 0.7, inf]
    found = paired_test(independent(differences))
    assert found.low is not None
    inside = [shift for shift in np.linspace(-1, 1, 401) + 1e-4 if by_enumeration(np.array(differences) - shift) > 0.05]
    assert found.low == pytest.approx(inside[0], abs=0.006)
    assert found.high == inf or found.high == pytest.approx(inside[-1], abs=0.006)
    assert found.high is not None
    assert found.low < found.estimate <= found.high


def test_fewer_than_six_pairs_have_no_rank_interval():
    assert paired_test(independent([inf, 0.1, 0.2, 0.3, 0.4]))[1:3] == (None, None)
    assert paired_test(independent([inf, 0.1, 0.2, 0.3, 0.4])).p == 2**-4
    assert paired_test(independent([inf, 0.1, 0.2, 0.3, 0.4, 0.5])).low == 0.1


def test_holm_equals_its_definition():
    # Holm 1979: sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1; the last may not be below the one before.
    assert holm([0.01, 0.04, None, 0.03, 0.005]) == pytest.approx([0.03, 0.06, None, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1, 1]
    assert holm([None]) == [None]


def test_pairs_that_diverged_on_both_sides_use_the_signed_rank_test():
    found = paired_test(independent([0.0, 0.0, -0.1]), both_diverged=2)
    assert found.test == "signed-rank (2 of 3 pairs with a diverged run, 2 on both sides)"
    assert (found.low, found.high) == (None, None)
    assert found.p == 1.0  # only one pair has a sign, and both signs are equally likely
    both = paired_test(independent([0.0] * 7), both_diverged=7)
    assert (both.estimate, both.p) == (0.0, 1.0)


# Crossed seeds.


def anova(table):
    """Return the mean squares of rows, columns and residuals by the textbook formulas."""
    y = np.asarray(table, dtype=np.float64)
    a, b = y.shape
    correction = y.sum() ** 2 / y.size
    rows = (y.sum(1) ** 2).sum() / b - correction
    columns = (y.sum(0) ** 2).sum() / a - correction
    rest = (y**2).sum() - correction - rows - columns
    return rows / (a - 1), columns / (b - 1), rest / ((a - 1) * (b - 1))


def effects(draw, a, b, rows, columns, rest, size=()):
    """Draw tables of two random effects and noise with these standard deviations, shape (*size, a, b)."""
    row, column, noise = (draw.normal(0, 1, (*size, *shape)) for shape in ((a, 1), (1, b), (a, b)))
    return rows * row + columns * column + rest * noise


@pytest.mark.parametrize(("a", "b"), [(6, 6), (2, 5), (4, 3)])
def test_complete_crossing_equals_two_way_analysis_of_variance(a, b):
    table = 2.3 + effects(np.random.default_rng(a), a, b, 0.02, 0.03, 0.01)
    rows, columns, rest = anova(table)
    within = ((table - table.mean(1, keepdims=True)) ** 2).sum() / (a * (b - 1))
    assert rows == pytest.approx(stats.f_oneway(*table).statistic * within, rel=1e-9)
    error = math.sqrt((rows + columns - rest) / (a * b))
    found = mean_interval(crossed(table.tolist()))
    low, high = stats.t.interval(0.95, min(a, b) - 1, loc=table.mean(), scale=error)
    assert found[:3] == pytest.approx((table.mean(), low, high), rel=1e-9)
    assert (found.design.n, found.design.levels, str(found.design)) == (a * b, (a, b), f"{a}x{b}")
    test = paired_test(crossed((table - 2.3).tolist()))
    assert test.p == pytest.approx(2 * stats.t.sf(abs(table.mean() - 2.3) / error, min(a, b) - 1), rel=1e-8)
    assert test[1:3] == pytest.approx((low - 2.3, high - 2.3), rel=1e-6)


def test_variance_is_at_least_that_of_either_factor():
    table = np.random.default_rng(3).normal(size=(4, 4))
    table += 3 * np.outer([1, -1, 1, -1], [1, -1, 1, -1])  # all interaction: its mean square is the largest
    rows, columns, rest = anova(table)
    assert rest > min(rows, columns)
    found = mean_interval(crossed(table.tolist()))
    half = stats.t.ppf(0.975, 3) * math.sqrt(max(rows, columns) / 16)
    assert found.high is not None
    assert found.high - found.estimate == pytest.approx(half, rel=1e-9)


def test_uncrossed_replicates_are_equal_to_independent_values():
    values = [2.31, 2.25, 2.28, 2.4, 2.22]
    mean = math.fsum(values) / 5
    half = stats.t.ppf(0.975, 4) * math.sqrt(math.fsum((value - mean) ** 2 for value in values) / 4 / 5)
    fixed = {"data.seed": [(seed, 7) for seed in range(5)], "seed": [(7, seed) for seed in range(5)]}
    designs = {None: [(9, 3), (1, 1), (5, 0), (7, 9), (3, 5)], **fixed}
    for factor, replicates in designs.items():
        found = mean_interval(dict(zip(replicates, values, strict=True)))
        assert found[:3] == pytest.approx((mean, mean - half, mean + half), rel=1e-14)
        assert (found.design.fixed, str(found.design)) == (factor, "5")


@pytest.mark.exhaustive
@pytest.mark.parametrize("deviations", [(1, 1, 0), (0.2, 1, 0.5), (1, 0, 0), (0, 1, 0), (1, 0.3, 0), (0, 0, 1)])
@pytest.mark.parametrize(("a", "b"), [(6, 6), (2, 6), (3, 3)])
def test_simulated_coverage_over_crossed_seeds_is_at_least_nominal(a, b, deviations):
    """Coverage is at least 95 %, whichever effect dominates; treating 36 values as independent covers about 50 %."""
    repeated = 500
    tables = 2.3 + effects(np.random.default_rng(5), a, b, *deviations, size=(repeated,))
    found = [mean_interval(crossed(table)) for table in tables.tolist()]
    noise = math.sqrt(0.05 * 0.95 / repeated)
    assert np.mean([covers(each, 2.3) for each in found]) >= 0.95 - 3 * noise
    naive = [mean_interval(independent(table)) for table in tables.reshape(repeated, -1).tolist()]
    if deviations[2] < 1:
        assert np.mean([covers(each, 2.3) for each in naive]) < 0.85
    decisions = [rejected(paired_test(crossed(table))) for table in (tables[:300] - 2.3).tolist()]
    assert decisions == [not covers(each, 2.3) for each in found[:300]]


INCOMPLETE = {
    "8 of 3x3": [(i, j) for i in range(3) for j in range(3) if (i, j) != (2, 2)],
    "6 of 5x5": [*((k, k) for k in range(5)), (0, 1)],
    "12 of 4x12": [(k // 3, k) for k in range(12)],
    "15 of 5x5": [(i, j) for i in range(5) for j in range(i + 1)],
}


@pytest.mark.parametrize("name", INCOMPLETE)
@pytest.mark.parametrize("deviations", [(1, 1, 0), (1, 0, 0), (0, 1, 0), (0.3, 0.3, 1)])
def test_simulated_coverage_over_incomplete_crossings_is_at_least_nominal(name, deviations):
    repeated, pairs = 400, INCOMPLETE[name]
    a, b = (max(levels) + 1 for levels in zip(*pairs, strict=True))
    tables = effects(np.random.default_rng(6), a, b, *deviations, size=(repeated,)).tolist()
    found = [mean_interval({(i, j): table[i][j] for i, j in pairs}) for table in tables]
    assert str(found[0].design) == name
    assert np.mean([covers(each, 0) for each in found]) >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / repeated)


def test_crossed_pairs_with_divergence_use_the_larger_p_value_of_both_factors():
    table = [[inf, 0.2, 0.3], [0.1, 0.3, inf], [0.2, -inf, 0.4], [0.5, 0.6, inf]]
    found = paired_test(crossed(table), both_diverged=1)
    per_seed, per_data_seed = ([*map(np.median, rows)] for rows in (table, np.transpose(table)))
    expected = [by_enumeration(medians) for medians in (per_seed, per_data_seed)]
    assert expected == [0.125, 0.25]
    assert (found.p, found.design.n) == (0.25, 3)
    assert found.test == (
        "signed-rank of medians per data.seed (5 of 12 pairs with a diverged run, 1 on both sides, crossed 4x3)"
    )
    assert paired_test({key: -value for key, value in crossed(table).items()}, both_diverged=1).p == found.p


def test_level_with_infinite_differences_of_both_signs_has_median_zero():
    both_ways, one_way = (paired_test(crossed([row, [0.1, 0.2], [0.3, 0.1]])) for row in ([inf, -inf], [inf, inf]))
    assert both_ways.p == by_enumeration([0.0, 0.15, 0.2]) == 0.5
    assert one_way.p == 0.5  # the test over the two data seeds decides
    assert both_ways.estimate < one_way.estimate


@pytest.mark.parametrize("deviations", [(1, 1, 0.5), (0.1, 1, 0.1), (1, 0.1, 0.1)])
def test_simulated_rejection_rate_of_crossed_pairs_with_divergence_is_at_most_nominal(deviations):
    draw, repeated = np.random.default_rng(7), 500
    tables = effects(draw, 7, 7, *deviations, size=(repeated,))
    tables[draw.random(tables.shape) < 0.05] = inf
    tables *= draw.choice([-1, 1], (repeated, 1, 1))  # neither side diverges more often
    tables[:, 0, 0] = inf * draw.choice([-1, 1], repeated)
    decisions = [rejected(paired_test(crossed(table))) for table in tables.tolist()]
    assert np.mean(decisions) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeated)


def test_losses_of_two_seeds_are_shown_themselves():
    assert format_losses({(0, 0): 2.5}) == "2.5000"
    assert format_losses({(1, 1): 2.25, (0, 0): 2.5}) == "2.5000 and 2.2500"
    three = independent([2.5, 2.25, 2.0])
    mean, _, high, _ = mean_interval(three)
    assert high is not None
    assert format_losses(three) == f"{mean:.4f} ± {high - mean:.4f}"


def test_an_interval_is_cut_at_the_lowest_possible_mean():
    """As of losses, which are not negative; two values have a wide interval."""
    values = independent([2.0, 2.5])
    low, high = stats.t.interval(0.95, 1, 2.25, stats.sem([2.0, 2.5]))
    assert low < 0
    assert mean_interval(values)[:3] == pytest.approx((2.25, low, high))
    assert mean_interval(values, least=0.0)[:3] == pytest.approx((2.25, 0.0, high))
    assert SeedMean(values).interval == mean_interval(values, least=0.0)
