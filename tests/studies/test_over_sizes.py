"""Estimators over models of several sizes, on losses of laws that are known."""

import itertools
import math
from collections.abc import Sequence

import pytest

from normlab.analysis.arms import CHOOSING_SEEDS, StudyRuns
from normlab.analysis.comparability import intact_runs
from normlab.analysis.sequences import typical_sequence
from normlab.base.errors import ConfigError
from normlab.store.record import RunRecord
from normlab.studies.over_sizes import ForecastError, Multiplier

SIZES = {16: 1e12, 24: 1e13, 32: 1e14, 48: 1e15}
"""The FLOPs of training pre-norm, by width."""
COST = 1.5
"""The FLOPs of post-norm over those of pre-norm."""
SEEDS = range(CHOOSING_SEEDS + 2)
E, ALPHA = 1.4, 0.12


def law(compute: float) -> float:
    return E + 0.7 * (compute / 1e15) ** -ALPHA


@pytest.fixture
def runs(make_run):
    """Writes runs with the losses of a function of (placement, width, seed); returns them."""
    number = itertools.count()

    def make(loss, widths: Sequence[int] = tuple(SIZES)) -> StudyRuns:
        records = []
        for width, placement in itertools.product(widths, ("pre", "post")):
            flops = SIZES[width] * (COST if placement == "post" else 1)
            for seed, lr in itertools.product(SEEDS, (1e-3, 3e-3)):
                value = loss(placement, width, seed) + 0.2 * (lr != 3e-3)
                tokens = 1000
                folder = make_run(
                    f"run{next(number)}",
                    run={"flops_per_token": flops / tokens},
                    status={"val_loss": value, "best_val_loss": value, "tokens": tokens},
                    placement=placement, width=width, seed=seed, lr=lr, depth=4,
                )  # fmt: skip
                records.append(RunRecord.read(folder))
        return StudyRuns(intact_runs(records)[0])

    return make


def multiplier_of(width: int, seed: int) -> float:
    """The multiplier of post-norm over pre-norm in these tests."""
    return 1.3 + 0.01 * seed + width / 100


def loss(placement: str, width: int, seed: int) -> float:
    if placement == "pre":
        return law(SIZES[width])
    return law(multiplier_of(width, seed) * COST * SIZES[width])


def test_multiplier_is_the_compute_with_which_the_baseline_has_the_same_loss(runs):
    estimate = Multiplier("placement=post", "placement=pre").estimate(runs(loss))
    expected = {f"{seed}": multiplier_of(48, seed) for seed in SEEDS[CHOOSING_SEEDS:]}
    assert estimate.seeds == pytest.approx(expected, rel=1e-4)
    logarithms = [math.log(value) for value in estimate.seeds.values()]
    assert estimate.bounds == pytest.approx(tuple(map(math.exp, typical_sequence(logarithms, 0.05))))
    assert (estimate.n, estimate.left_out, estimate.bad) == (2, 0, 0)


def test_growth_is_the_multiplier_at_the_largest_size_over_that_at_the_smallest(runs):
    estimate = Multiplier("placement=post", "placement=pre", growth=True).estimate(runs(loss))
    expected = {f"{seed}": multiplier_of(48, seed) / multiplier_of(16, seed) for seed in SEEDS[CHOOSING_SEEDS:]}
    assert estimate.seeds == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("estimator", "judged"),
    [
        (Multiplier("placement=post", "placement=pre"), ["post 48", "pre 48"]),
        (Multiplier("placement=post", "placement=pre", growth=True), ["post 16", "post 48", "pre 16", "pre 48"]),
        (ForecastError("placement=pre"), ["pre 48"]),
    ],
    ids=["multiplier", "growth", "forecast"],
)
def test_judging_seeds_are_needed_only_where_they_are_in_the_estimate(estimator, judged, runs):
    made = runs(loss)
    estimator.estimate(made)
    names = made.used.keys() - made.chosen_only
    assert names == {"placement={},model.width={}".format(*each.split()) for each in judged}


def test_multiplier_has_the_power_of_its_choosing_seeds(runs):
    pilot = Multiplier("placement=post", "placement=pre").pilot(runs(loss))
    expected = [math.log(multiplier_of(48, seed)) for seed in SEEDS[:CHOOSING_SEEDS]]
    assert pilot == pytest.approx(expected, rel=1e-3)


def test_forecast_error_is_the_loss_minus_the_law_of_the_smaller_sizes(runs):
    def with_a_worse_largest_size(placement: str, width: int, seed: int) -> float:
        return law(SIZES[width]) + (0.01 * seed if width == 48 else 0)

    estimate = ForecastError("placement=pre").estimate(runs(with_a_worse_largest_size))
    assert estimate.seeds == pytest.approx({f"{seed}": 0.01 * seed for seed in SEEDS[CHOOSING_SEEDS:]}, abs=1e-4)


def test_seeds_that_have_not_learned_are_left_out(runs):
    def with_a_stuck_seed(placement: str, width: int, seed: int) -> float:
        return 3.2 if (placement, width, seed) == ("post", 48, CHOOSING_SEEDS) else loss(placement, width, seed)

    estimate = Multiplier("placement=post", "placement=pre").estimate(runs(with_a_stuck_seed))
    assert (estimate.n, estimate.left_out, estimate.bad) == (1, 1, 1)
    assert str(CHOOSING_SEEDS) not in estimate.seeds


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (
            lambda placement, width, seed: 2.0,
            "the choosing seeds of .placement=pre,model.width=16. .* determine no law",
        ),
        (lambda placement, width, seed: 3.2, "no choosing seed of .placement=pre,model.width=16. has learned"),
    ],
    ids=["flat", "stuck"],
)
def test_losses_without_a_law_are_errors(losses, message, runs):
    with pytest.raises(ConfigError, match=message):
        Multiplier("placement=post", "placement=pre").estimate(runs(losses))


def test_three_sizes_are_too_few(runs):
    with pytest.raises(ConfigError, match=r"placement=pre needs more than 3 values of model\.width"):
        ForecastError("placement=pre").estimate(runs(loss, widths=(16, 24, 32)))
