"""Estimators and criteria of studies, against scipy, statsmodels and numpy."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.proportion import proportion_confint
from statsmodels.stats.weightstats import ttost_paired

from normlab.analysis.arms import CHOOSING_SEEDS, StudyRuns
from normlab.analysis.comparability import intact_runs
from normlab.errors import ConfigError
from normlab.store.record import RunRecord
from normlab.studies.base import AtLeast, AtMost, Within
from normlab.studies.estimators import (
    Contrast,
    Share,
    Slope,
    difference,
    over_seeds,
)
from normlab.studies.measures import EvalGap
from normlab.studies.noise import Deviation, FalsePositives
from normlab.studies.over_grid import OverGrid

RATES = (1e-3, 3e-3, 1e-2)
SEEDS = range(8)
JUDGED = SEEDS[CHOOSING_SEEDS:]


@pytest.fixture
def runs(make_run):
    """Writes runs with the losses of a function of (placement, depth, lr, seed); returns them."""
    number = itertools.count()

    def make(loss, placements=("pre", "post"), depths=(4,), rates=RATES, seeds=SEEDS) -> StudyRuns:
        records = []
        for placement, depth, lr, seed in itertools.product(placements, depths, rates, seeds):
            value = loss(placement, depth, lr, seed)
            options = {"placement": placement, "depth": depth, "lr": lr, "seed": seed}
            state = "diverged" if math.isinf(value) else "finished"
            status = {"val_loss": value, "best_val_loss": value}
            records.append(RunRecord.read(make_run(f"run{next(number)}", state, status=status, **options)))
        return StudyRuns(intact_runs(records)[0])

    return make


@pytest.fixture
def table() -> np.ndarray:
    """Losses by placement, depth, learning rate and seed; the middle learning rate is the best."""
    rng = np.random.default_rng(0)
    losses = 2 + rng.normal(0, 0.01, (2, 3, 3, len(SEEDS)))
    return losses + np.array([0.3, 0.0, 0.2])[:, None] + 0.05 * np.array([0, 1])[:, None, None, None]


def loss_in(table):
    depths = (4, 8, 16)
    return lambda placement, depth, lr, seed: float(
        table[("pre", "post").index(placement), depths.index(depth), RATES.index(lr), seed]
    )


def test_difference_is_the_paired_t_test_of_the_judging_seeds(runs, table):
    estimate = difference("placement=post", "placement=pre").estimate(runs(loss_in(table)))
    post, pre = table[1, 0, 1, CHOOSING_SEEDS:], table[0, 0, 1, CHOOSING_SEEDS:]
    test = stats.ttest_rel(post, pre)
    low, high = test.confidence_interval()
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx(((post - pre).mean(), low, high))
    assert (estimate.low90, estimate.high90) == pytest.approx(tuple(test.confidence_interval(0.9)))
    assert (estimate.n, estimate.p) == (len(JUDGED), pytest.approx(test.pvalue))
    assert set(estimate.rates.values()) == {3e-3}
    assert estimate.deviation == pytest.approx((post - pre).std(ddof=1))


def test_the_learning_rate_is_chosen_on_other_seeds_than_it_is_judged_on(runs, table):
    table[0, 0, 2, CHOOSING_SEEDS:] = 0.1  # a rate that looks best on the judging seeds only
    made = runs(loss_in(table))
    assert made.arm("placement=pre").best_lr == 3e-3
    estimate = Contrast({"placement=pre": 1.0}).estimate(made)
    assert estimate.value == pytest.approx(table[0, 0, 1, CHOOSING_SEEDS:].mean())


def test_the_interval_holds_those_of_all_learning_rates_that_may_be_the_best(runs, table):
    table[1, 0, 2] += np.linspace(-0.22, -0.19, len(SEEDS))
    estimate = difference("placement=post", "placement=pre").estimate(runs(loss_in(table)))
    intervals = [
        stats.ttest_rel(table[1, 0, rate, CHOOSING_SEEDS:], table[0, 0, 1, CHOOSING_SEEDS:]).confidence_interval()
        for rate in (1, 2)
    ]
    assert estimate.low == pytest.approx(min(each.low for each in intervals))
    assert estimate.high == pytest.approx(max(each.high for each in intervals))
    assert min(each.low for each in intervals) < max(each.low for each in intervals)


def test_a_common_and_a_single_learning_rate(runs, table):
    table[1, 0, 0, :CHOOSING_SEEDS] = 0.1  # the best of post
    made = runs(loss_in(table))
    assert difference("placement=post", "placement=pre").estimate(made).rates["placement=post"] == 1e-3
    rates = difference("placement=post", "placement=pre", lr="common").estimate(made).rates
    assert len(set(rates.values())) == 1
    single = StudyRuns([run for run in made.results if run.lr == RATES[1]])
    assert difference("placement=post", "placement=pre").estimate(single).n == len(SEEDS)


@pytest.mark.parametrize("margin", [0.02, 0.06, 0.08])
def test_within_is_two_one_sided_tests(runs, table, margin):
    estimate = difference("placement=post", "placement=pre").estimate(runs(loss_in(table)))
    post, pre = table[1, 0, 1, CHOOSING_SEEDS:], table[0, 0, 1, CHOOSING_SEEDS:]
    p = ttost_paired(post, pre, -margin, margin)[0]
    assert (Within(-margin, margin).judge(estimate) == "supported") == (p < 0.05)


def test_slope_is_the_mean_of_the_slopes_of_the_seeds(runs, table):
    made = runs(loss_in(table), depths=(4, 8, 16))
    slope = Slope("placement=post", "model.depth", minus="placement=pre").estimate(made)
    x = np.log([4, 8, 16])
    slopes = [
        stats.linregress(x, table[1, :, 1, seed]).slope - stats.linregress(x, table[0, :, 1, seed]).slope
        for seed in JUDGED
    ]
    test = stats.ttest_1samp(slopes, 0)
    assert slope.value == pytest.approx(np.mean(slopes))
    assert (slope.low, slope.high) == pytest.approx(tuple(test.confidence_interval()))


def test_share_of_runs_that_have_not_learned(runs, table):
    table[1, 0, 1, 3:5] = math.inf
    table[1, 0, 1, 5] = 3.19  # in the band around the unigram loss
    made = runs(loss_in(table))
    share = Share("placement=post").estimate(made)
    assert (share.value, share.bad, share.n) == (3 / 6, 3, 6)
    assert (share.low, share.high) == pytest.approx(proportion_confint(3, 6, method="beta"))
    assert Share("placement=post", states=("diverged",)).estimate(made).value == 2 / 6
    both = Share("placement=post", "placement=pre").estimate(made)
    assert both.p == pytest.approx(stats.fisher_exact([[3, 3], [0, 6]]).pvalue)
    assert (both.value, both.n) == (0.5, 12)


def test_share_of_seeds_that_learn_at_no_learning_rate(runs, table):
    table[1, 0, :, 2:5] = math.inf
    table[1, 0, 0, 5] = math.inf  # one learning rate of three
    made = runs(loss_in(table))
    share = Share("placement=post", lr="every").estimate(made)
    assert (share.value, share.n) == (3 / 8, 8)
    both = Share("placement=post", "placement=pre", lr="every").estimate(made)
    assert both.p == pytest.approx(stats.fisher_exact([[3, 5], [0, 8]]).pvalue)


def test_divergence_makes_a_difference_infinite(runs, table):
    table[1] = math.inf
    estimate = difference("placement=post", "placement=pre").estimate(runs(loss_in(table)))
    assert (estimate.value, estimate.diverged) == (math.inf, len(JUDGED))
    assert AtLeast(0.05).judge(estimate) == "supported"
    assert AtMost(0.0).judge(estimate) == "refuted"


def test_sensitivity_is_the_mean_of_that_of_the_seeds(runs, table):
    table[1, 0, 2] += 5.0  # far above ln V, which bounds it
    estimate = OverGrid("sensitivity", "placement=post", "placement=pre").estimate(runs(loss_in(table)))
    bounded = np.minimum(table[:, 0], 5.5)
    pre, post = bounded.mean(1) - table[:, 0].min(1)
    test = stats.ttest_rel(post, pre)
    assert (estimate.value, estimate.p) == pytest.approx(((post - pre).mean(), test.pvalue))
    assert (estimate.low, estimate.high) == pytest.approx(tuple(test.confidence_interval()))
    table[1, 0] = 3.2  # learns nowhere: compared with the other arm
    estimate = OverGrid("sensitivity", "placement=post", "placement=pre").estimate(runs(loss_in(table)))
    assert estimate.value == pytest.approx((3.2 - table[0, 0].mean(0)).mean())


def test_highest_learning_rate(runs, table):
    table[1, 0, :, 4] = 3.2  # learns at no rate: one step below the grid
    inside = table.copy()
    inside[:, 0, 2] = 3.2
    estimator = OverGrid("highest_rate", "placement=post", "placement=pre")
    estimate = estimator.estimate(runs(loss_in(inside)))
    logs = np.log([1.0] * 4 + [0.1] + [1.0] * 3)
    test = stats.ttest_1samp(logs, 0).confidence_interval()
    assert estimate.value == pytest.approx(math.exp(logs.mean()))
    assert (estimate.low, estimate.high) == pytest.approx((math.exp(test.low) * 0.3, math.exp(test.high) / 0.3))
    estimate = estimator.estimate(runs(loss_in(table)))
    assert (estimate.low, estimate.high) == (0, math.inf)  # both arms learn at the top of the grid
    with pytest.raises(ConfigError, match="unknown number 'lowest'"):
        OverGrid("lowest", "placement=post")


def test_deviation_over_seeds(runs, table):
    estimate = Deviation("placement=pre").estimate(runs(loss_in(table)))
    judged = table[0, 0, 1, CHOOSING_SEEDS:]
    assert estimate.value == pytest.approx(judged.std(ddof=1))
    low, high = ((len(judged) - 1) * judged.var(ddof=1) / stats.chi2.ppf([0.975, 0.025], len(judged) - 1)) ** 0.5
    assert (estimate.low, estimate.high) == pytest.approx((low, high))


@pytest.mark.exhaustive
def test_false_positives_of_equal_arms(runs):
    noise = np.random.default_rng(3).normal(0, 0.01, (len(RATES), 16))
    losses = 2 + noise + np.array([0.3, 0.0, 0.2])[:, None]
    made = runs(lambda _p, _d, lr, seed: float(losses[RATES.index(lr), seed]), ("pre",), seeds=range(16))
    estimate = FalsePositives("placement=pre").estimate(made)
    assert estimate.n == 1000
    assert 0.03 < estimate.value < 0.07
    assert math.isnan(FalsePositives("placement=pre").estimate(StudyRuns(made.results[:6])).value)


def test_an_arm_that_leaves_an_option_free_is_an_error(runs, table):
    with pytest.raises(ConfigError, match=r"its runs differ in model.depth 4 and 8; choose one"):
        difference("placement=post", "placement=pre").estimate(runs(loss_in(table), depths=(4, 8)))


def test_a_slope_with_a_diverged_level_is_infinite_and_not_that_of_the_survivors(runs, table):
    table[1, 2, 1, 5] = math.inf  # depth 16, at the best learning rate
    made = runs(loss_in(table), depths=(4, 8, 16))
    estimate = Slope("placement=post", "model.depth").estimate(made)
    assert (estimate.n, estimate.seeds["5"], estimate.diverged) == (len(JUDGED), math.inf, 1)


def test_a_measure_that_a_run_lacks_leaves_the_estimate_undefined(runs, table):
    estimate = Contrast({"placement=post": 1.0}, EvalGap()).estimate(runs(loss_in(table)))
    assert math.isnan(estimate.value)
    assert (estimate.undefined, estimate.low) == (len(JUDGED), None)


@pytest.mark.parametrize(
    ("criterion", "values", "verdict"),
    [
        (AtLeast(0.05), (0.1, 0.11, 0.12), "supported"),
        (AtLeast(0.2), (0.1, 0.11, 0.12), "refuted"),
        (AtLeast(0.11), (0.1, 0.11, 0.12), "undecided"),
        (AtMost(0.2), (0.1, 0.11, 0.12), "supported"),
        (Within(-0.5, 0.5), (0.1, 0.11, 0.12), "supported"),
        (Within(-0.05, 0.05), (0.1, 0.11, 0.12), "refuted"),
        (Within(-0.11, 0.11), (0.1, 0.11, 0.12), "undecided"),
        (AtLeast(0.05), (0.1,), "undecided"),
        (AtLeast(0.05), (), "undecided"),
    ],
)
def test_criteria(criterion, values, verdict):
    estimate = over_seeds({(seed, seed): value for seed, value in enumerate(values)})
    assert criterion.judge(estimate) == verdict
