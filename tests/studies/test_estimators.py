"""Estimators and criteria of studies, against scipy, statsmodels and numpy."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from normlab.analysis.arms import CHOOSING_SEEDS, StudyRuns, chosen_lrs
from normlab.analysis.comparability import intact_runs
from normlab.analysis.intervals import Replicate
from normlab.analysis.sequences import share_sequence, typical_sequence, typical_value
from normlab.base.errors import ConfigError
from normlab.store.record import RunRecord
from normlab.studies.base import AtLeast, AtMost, Within
from normlab.studies.estimate import over_seeds
from normlab.studies.estimators import Contrast, Share, Slope, difference
from normlab.studies.measures import EvalGap
from normlab.studies.noise import Deviation, DeviationRatio, FalsePositives
from normlab.studies.over_grid import OverGrid

RATES = (1e-3, 3e-3, 1e-2)
SEEDS = range(14)
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


def ends(values, alpha=0.05):
    return pytest.approx(typical_sequence(list(values), alpha))


def test_difference_is_the_mean_over_the_judging_seeds_with_its_confidence_sequence(runs, table):
    estimate = difference("placement=post", "placement=pre").estimate(runs(loss_in(table)))
    differences = table[1, 0, 1, CHOOSING_SEEDS:] - table[0, 0, 1, CHOOSING_SEEDS:]
    assert (estimate.value, estimate.n) == (pytest.approx(typical_value(differences)), len(JUDGED))
    assert estimate.bounds == ends(differences)
    assert estimate.interval(0.1) == ends(differences, 0.1)
    assert [*estimate.rates.values()] == [[3e-3], [3e-3]]
    assert estimate.deviation == pytest.approx(differences.std(ddof=1))


def test_the_learning_rate_is_chosen_on_other_seeds_than_it_is_judged_on(runs, table):
    table[0, 0, 2, CHOOSING_SEEDS:] = 0.1  # a rate that looks best on the judging seeds only
    made = runs(loss_in(table))
    assert made.arm("placement=pre").best_lr == 3e-3
    estimate = Contrast({"placement=pre": 1.0}).estimate(made)
    assert estimate.value == pytest.approx(typical_value(table[0, 0, 1, CHOOSING_SEEDS:]))


def by_seed(*losses: float) -> dict[Replicate, float]:
    return {(seed, seed): loss for seed, loss in enumerate(losses)}


def test_chosen_are_the_learning_rates_within_one_standard_error_of_the_best():
    best = by_seed(2.0, 2.0, 2.0, 2.0)
    within = by_seed(2.01, 1.98, 2.04, 1.99)  # mean 0.005, standard error 0.013
    beyond = by_seed(2.03, 2.0, 2.05, 2.0)  # mean 0.02, standard error 0.012
    losses = {3e-4: within, 1e-3: beyond, 3e-3: best}
    assert chosen_lrs(3e-3, losses, ()) == [3e-4, 3e-3]
    assert chosen_lrs(3e-3, losses, {3e-4}) == [3e-3]
    assert chosen_lrs(3e-3, {3e-4: by_seed(2.5, 2.6, 2.5, 2.6), 3e-3: best}, ()) == [3e-3]


def test_an_arm_is_its_mean_over_the_chosen_learning_rates(runs, table):
    table[1, 0, 2] = table[1, 0, 1] + np.tile([0.01, -0.004], len(SEEDS) // 2)
    table[1, 0, 2, -1] = math.inf  # a seed that diverges at one of them is left out
    estimate = difference("placement=post", "placement=pre").estimate(runs(loss_in(table)))
    assert estimate.rates == {"placement=post": [3e-3, 1e-2], "placement=pre": [3e-3]}
    differences = (table[1, 0, 1:].mean(0) - table[0, 0, 1])[CHOOSING_SEEDS:-1]
    assert (estimate.value, estimate.n, estimate.left_out) == (
        pytest.approx(typical_value(differences)),
        len(differences),
        1,
    )
    assert estimate.bounds == ends(differences)
    best = difference("placement=post", "placement=pre").estimate_at_best(runs(loss_in(table)))
    assert best.bounds == ends((table[1, 0, 1] - table[0, 0, 1])[CHOOSING_SEEDS:])


def test_a_single_learning_rate_is_judged_by_all_seeds(runs, table):
    made = runs(loss_in(table))
    single = StudyRuns([run for run in made.results if run.lr == RATES[1]])
    assert difference("placement=post", "placement=pre").estimate(single).n == len(SEEDS)


def test_the_contrast_at_a_common_learning_rate_is_that_of_the_choosing_seeds(runs, table):
    table[1, 0, 0, :CHOOSING_SEEDS] = 0.1  # the best of post
    found = difference("placement=post", "placement=pre").at_a_common_rate(runs(loss_in(table)))
    assert found is not None
    value, lr = found
    assert lr in RATES
    chosen = table[:, 0, RATES.index(lr), :CHOOSING_SEEDS]
    assert value == pytest.approx((chosen[1] - chosen[0]).mean())


@pytest.mark.parametrize("margin", [0.02, 0.06, 0.08])
def test_within_is_supported_if_the_interval_of_90_percent_is_inside(runs, table, margin):
    estimate = difference("placement=post", "placement=pre").estimate(runs(loss_in(table)))
    low, high = typical_sequence((table[1, 0, 1] - table[0, 0, 1])[CHOOSING_SEEDS:].tolist(), 0.1)
    assert (Within(-margin, margin).verdict(estimate.interval) == "supported") == (-margin <= low and high <= margin)


def test_slope_is_the_mean_of_the_slopes_of_the_seeds(runs, table):
    made = runs(loss_in(table), depths=(4, 8, 16))
    slope = Slope("placement=post", "model.depth", minus="placement=pre").estimate(made)
    x = np.log([4, 8, 16])
    slopes: list[float] = []
    for seed in JUDGED:
        of_post: Any = stats.linregress(x, table[1, :, 1, seed])
        of_pre: Any = stats.linregress(x, table[0, :, 1, seed])
        slopes.append(of_post.slope - of_pre.slope)
    assert slope.value == pytest.approx(typical_value(slopes))
    assert slope.bounds == ends(slopes)


def test_a_slope_over_learning_rates_that_end_at_the_best_one_names_it(runs, table):
    made = runs(loss_in(table))
    Slope("placement=pre,optim.lr<=3e-3", "optim.lr").estimate(made)
    assert made.used["placement=pre,optim.lr<=3e-3"].has_best_at_edge


def test_share_of_runs_that_have_not_learned(runs, table):
    table[1, 0, 1, 7:9] = math.inf
    table[1, 0, 1, 9] = 3.19  # in the band around the unigram loss
    made = runs(loss_in(table))
    share = Share("placement=post").estimate(made)
    assert (share.value, share.bad, share.n) == (3 / 8, 3, 8)
    assert share.bounds == share_sequence(3, 8, 0.05)
    assert Share("placement=post", states=("diverged",)).estimate(made).value == 2 / 8
    both = Share("placement=post", "placement=pre").estimate(made)
    (low, high), (other_low, other_high) = share_sequence(3, 8, 0.025), share_sequence(0, 8, 0.025)
    assert both.bounds == (low - other_high, high - other_low)
    assert (both.value, both.n) == (3 / 8, 16)


def test_share_of_seeds_that_learn_at_no_learning_rate(runs, table):
    table[1, 0, :, 2:5] = math.inf
    table[1, 0, 0, 5] = math.inf  # one learning rate of three
    share = Share("placement=post", lr="every").estimate(runs(loss_in(table)))
    assert (share.value, share.n) == (3 / len(SEEDS), len(SEEDS))
    made = runs(loss_in(table))
    later = [run for run in made.results if run.replicate[0] < 9 or run.lr == RATES[1]]
    # Later seeds have the chosen rate only, and say nothing about the others.
    share = Share("placement=post", lr="every").estimate(StudyRuns(later))
    assert (share.value, share.n) == (3 / 9, 9)


def test_seeds_that_diverged_or_have_not_learned_are_left_out_and_counted(runs, table):
    table[1, 0, 1, 7], table[1, 0, 1, 8] = math.inf, 3.19
    estimate = difference("placement=post", "placement=pre").estimate(runs(loss_in(table)))
    kept = [seed for seed in JUDGED if seed not in (7, 8)]
    assert estimate.bounds == ends((table[1, 0, 1] - table[0, 0, 1])[kept])
    assert (estimate.n, estimate.left_out, estimate.bad, estimate.diverged) == (len(kept), 2, 2, 1)


def test_sensitivity_is_the_mean_of_that_of_the_seeds(runs, table):
    table[1, 0, 2] += 5.0  # far above ln V, which bounds it
    estimate = OverGrid("sensitivity", "placement=post", "placement=pre").estimate(runs(loss_in(table)))
    bounded = np.minimum(table[:, 0], 5.5)
    pre, post = bounded.mean(1) - table[:, 0].min(1)
    assert estimate.value == pytest.approx(typical_value(post - pre))
    assert estimate.bounds == ends(post - pre)
    table[1, 0, :, 4] = 3.2  # learns nowhere: compared with the other arm
    post[4] = 3.2 - table[0, 0, :, 4].min()
    estimate = OverGrid("sensitivity", "placement=post", "placement=pre").estimate(runs(loss_in(table)))
    assert estimate.value == pytest.approx(typical_value(post - pre))
    table[1, 0] = 3.2
    with pytest.raises(ConfigError, match=r"no run of \[placement=post\] has learned"):
        OverGrid("sensitivity", "placement=post", "placement=pre").estimate(runs(loss_in(table)))


def test_highest_learning_rate(runs, table):
    rates = np.log(RATES)
    # Where the line between the second and the third loss is 0.1 above the second, the lowest.
    highest = rates[1] + (rates[2] - rates[1]) * 0.1 / (table[:, 0, 2] - table[:, 0, 1])
    estimator = OverGrid("highest_rate", "placement=post", "placement=pre")
    for learns in (True, False):
        if not learns:
            table[1, 0, :, 4] = 3.2  # at no rate: one step below the grid, or further
            highest[1, 4] = rates[0] - np.diff(rates).max()
        estimate = estimator.estimate(runs(loss_in(table)))
        logs = highest[1] - highest[0]
        low, high = typical_sequence(logs.tolist(), 0.05)
        assert estimate.value == pytest.approx(math.exp(typical_value(logs)))
        assert estimate.bounds == pytest.approx((math.exp(low) if learns else 0, math.exp(high)))
    table[:, 0, 2] -= 0.15
    estimate = estimator.estimate(runs(loss_in(table)))
    assert estimate.bounds == (0, math.inf)  # both arms train well at the top of the grid
    with pytest.raises(ConfigError, match="unknown number 'lowest'"):
        OverGrid("lowest", "placement=post")


def test_deviation_over_seeds(runs, table):
    estimate = Deviation("placement=pre").estimate(runs(loss_in(table)))
    judged = table[0, 0, 1, CHOOSING_SEEDS:]
    assert estimate.value == pytest.approx(judged.std(ddof=1))
    low, high = ((len(judged) - 1) * judged.var(ddof=1) / stats.chi2.ppf([0.975, 0.025], len(judged) - 1)) ** 0.5
    assert estimate.bounds == pytest.approx((low, high))


def test_a_deviation_is_undefined_for_good_once_a_judging_run_has_not_learned(runs, table):
    table[0, 0, 1, CHOOSING_SEEDS] = math.inf
    made = runs(loss_in(table))
    for estimator in (Deviation("placement=pre"), DeviationRatio("placement=post", "placement=pre")):
        estimate = estimator.estimate(made)
        assert math.isnan(estimate.value)
        assert estimate.stays_undefined


def test_a_ratio_of_deviations_over_one_of_zero_is_undefined(runs, table):
    table[0, 0, 1, :] = 2.0
    estimate = DeviationRatio("placement=post", "placement=pre").estimate(runs(loss_in(table)))
    assert math.isnan(estimate.value)


@pytest.mark.exhaustive
def test_false_positives_of_equal_arms(runs):
    noise = np.random.default_rng(3).normal(0, 0.01, (len(RATES), 28))
    losses = 2 + noise + np.array([0.3, 0.0, 0.2])[:, None]
    made = runs(lambda _p, _d, lr, seed: float(losses[RATES.index(lr), seed]), ("pre",), seeds=range(28))
    estimate = FalsePositives("placement=pre").estimate(made)
    assert estimate.n == 1000
    assert estimate.value < 0.05
    assert math.isnan(FalsePositives("placement=pre").estimate(StudyRuns(made.results[:6])).value)


def test_an_arm_that_leaves_an_option_free_is_an_error(runs, table):
    with pytest.raises(ConfigError, match=r"its runs differ in model.depth 4 and 8; choose one"):
        difference("placement=post", "placement=pre").estimate(runs(loss_in(table), depths=(4, 8)))


def test_a_measure_that_a_run_lacks_leaves_the_estimate_undefined(runs, table):
    estimate = Contrast({"placement=post": 1.0}, EvalGap()).estimate(runs(loss_in(table)))
    assert math.isnan(estimate.value)
    assert (estimate.undefined, estimate.bounds) == (len(JUDGED), (-math.inf, math.inf))


TWELVE = (0.1, 0.11, 0.12, 0.11) * 3


@pytest.mark.parametrize(
    ("criterion", "values", "verdict"),
    [
        (AtLeast(0.05), TWELVE, "supported"),
        (AtLeast(0.2), TWELVE, "refuted"),
        (AtLeast(0.11), TWELVE, "undecided"),
        (AtMost(0.2), TWELVE, "supported"),
        (Within(-0.5, 0.5), TWELVE, "supported"),
        (Within(-0.05, 0.05), TWELVE, "refuted"),
        (Within(-0.11, 0.11), TWELVE, "undecided"),
        (AtLeast(0.05), (0.1,), "undecided"),
        (AtLeast(0.05), (), "undecided"),
    ],
)
def test_criteria(criterion, values, verdict):
    estimate = over_seeds({(seed, seed): value for seed, value in enumerate(values)})
    assert criterion.verdict(estimate.interval) == verdict
    p = criterion.p_value(estimate)
    assert (p <= 0.05) == (verdict != "undecided")
    if 1e-9 < p < 1:
        assert [criterion.verdict(estimate.interval, alpha) == "undecided" for alpha in (p / 1.01, p * 1.01)] == [
            True,
            False,
        ]
