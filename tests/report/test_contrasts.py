"""Contrasts, pooled intervals and the tests over factors, against statsmodels, scipy and simulations."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from scipy import stats

from normlab.analysis.contrasts import MIN_P_EQUAL, Key, pool_residuals
from normlab.analysis.factor_tests.run import run_test
from normlab.analysis.intervals import Replicate, mean_interval
from normlab.analysis.table import summarize_by
from normlab.base.errors import ConfigError

SEEDS = (0, 1, 2)


def losses_of(placement: str, depth: int, warmup: int, rng: np.random.Generator) -> float:
    effect = {"pre": 0.0, "post": 0.1}[placement] * (1 if warmup else 3)
    return 2.5 - 0.1 * math.log(depth) + effect + float(rng.normal(0, 0.02))


@pytest.fixture
def make_sweep(make_run, tmp_path):
    """Writes a grid of placement, depth, warm-up and seed; returns the table of its cells and the losses."""

    def make(outcomes=None, seeds: Iterable[int] = SEEDS, depths: Iterable[int] = (2, 4, 8)):
        rng = np.random.default_rng(0)
        rows = []
        for placement, depth, warmup, seed in itertools.product(("pre", "post"), depths, (0, 100), seeds):
            loss = losses_of(placement, depth, warmup, rng) + 0.05 * seed
            rows.append({"placement": placement, "depth": depth, "warmup": warmup, "seed": seed, "loss": loss})
            config = {
                "norm": {"name": "rmsnorm"}, "placement": {"name": placement}, "model": {"depth": depth, "width": 128},
                "optim": {"name": "adamw", "lr": 1e-3, "warmup_steps": warmup}, "train": {"steps": 100},
                "data": {"seed": seed}, "seed": seed,
            }  # fmt: skip
            state = (outcomes or {}).get((placement, depth, warmup, seed), "finished")
            losses = {"val_loss": loss, "best_val_loss": loss}
            make_run(f"{placement}-{depth}-{warmup}-{seed}", state, run={"config": config}, status=losses)
        return summarize_by(tmp_path), pd.DataFrame(rows)

    return make


def test_interaction_is_that_of_statsmodels(make_sweep):
    """At each depth: the coefficient of the interaction in a linear model with cells and seeds, residuals pooled."""
    table, frame = make_sweep()
    rows = run_test("interaction", table.cells, table.factors, over=["placement", "warmup_steps"])
    assert [row["where"] for row in rows] == ["depth 2", "depth 4", "depth 8"]
    frame["cell"] = frame.placement + frame.depth.astype(str) + "_" + frame.warmup.astype(str)
    fit = smf.ols("loss ~ C(cell) + C(seed)", frame).fit()
    for row, depth in zip(rows, (2, 4, 8), strict=True):
        name = "C(cell)[T.{}]"
        signs = {f"pre{depth}_100": 1, f"pre{depth}_0": -1, f"post{depth}_100": -1, f"post{depth}_0": 1}
        weights = [
            next((sign for cell, sign in signs.items() if name.format(cell) == term), 0) for term in fit.params.index
        ]
        test = fit.t_test(np.array(weights))
        low, high = test.conf_int()[0]
        assert row["estimate"] == pytest.approx(test.effect[0], abs=1e-12)
        assert (row["low"], row["high"]) == pytest.approx((low, high), abs=1e-9)
        assert row["p"] == pytest.approx(float(test.pvalue), rel=1e-6)
        assert row["method"] == f"pooled t, {int(fit.df_resid)} degrees of freedom"


def test_without_pooling_the_interval_is_that_of_a_t_test(make_sweep):
    """Five seeds are enough: each contrast has its own variance."""
    table, frame = make_sweep(seeds=range(5))
    row = run_test("trend", table.cells, table.factors, over=["depth"])[0]
    group = frame[(frame.placement == "post") & (frame.warmup == 0)]
    slopes: list[float] = []
    for _, each in group.groupby("seed"):
        fit: Any = stats.linregress(np.log(each.depth), each.loss)
        slopes.append(fit.slope)
    test: Any = stats.ttest_1samp(slopes, 0)
    assert (row["method"], row["p"]) == ("paired t", pytest.approx(test.pvalue, rel=1e-9))
    assert (row["low"], row["high"]) == pytest.approx(tuple(test.confidence_interval()), rel=1e-9)


@pytest.mark.parametrize(
    ("diverged", "expected"),
    [
        ({("post", 8, 0)}, math.inf),
        ({("pre", 8, 0)}, -math.inf),
    ],
)
def test_divergence_counts_as_infinity_in_an_interaction(make_sweep, diverged, expected):
    """(pre - post) x (warm-up - none): a loss of post without warm-up that is infinite makes it -(-(+inf))."""
    outcomes = {(*cell, seed): "diverged" for cell in diverged for seed in SEEDS}
    table, _ = make_sweep(outcomes)
    rows = run_test("interaction", table.cells, table.factors, over=["placement", "warmup_steps"])
    row = next(row for row in rows if row["where"] == "depth 8")
    assert row["estimate"] == expected
    assert row["method"].startswith("signed-rank")


@pytest.mark.parametrize("seeds", [(0, 1), (0, 1, 2)], ids=["two of three seeds", "all seeds"])
def test_seeds_that_diverged_on_both_sides_estimate_nothing(make_sweep, seeds):
    outcomes = {(placement, 8, 0, seed): "diverged" for placement in ("pre", "post") for seed in seeds}
    table, _ = make_sweep(outcomes)
    rows = run_test("interaction", table.cells, table.factors, over=["placement", "warmup_steps"])
    row = next(row for row in rows if row["where"] == "depth 8")
    if len(seeds) < len(SEEDS):
        assert row["method"].startswith("signed-rank")
    else:
        assert (row["estimate"], row["p"], row["missing"]) == (None, None, "both sides diverged")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"over": ["depth", "model.depth"]},
            "--over depth,model.depth: names model.depth twice; name each option once",
        ),
        ({"against": "depth=2,depth=4"}, "--against depth=2,depth=4: names model.depth twice"),
    ],
)
def test_an_option_that_is_named_twice_is_an_error(make_sweep, arguments, message):
    """Its rows would count twice in Holm's correction."""
    table, _ = make_sweep()
    with pytest.raises(ConfigError, match=message):
        run_test("counts", table.cells, table.factors, **arguments)


def test_one_common_seed_is_named(make_sweep):
    table, _ = make_sweep(seeds=[0])
    rows = run_test("anytime", table.cells, table.factors, over=["placement"])
    assert {row["missing"] for row in rows} == {"one common seed"}


# Pooling


def table_of(values: np.ndarray) -> dict[Key, dict[Replicate, float]]:
    """(k, n) losses as cells by key and replicate."""
    return {(cell,): {(seed, seed): float(loss) for seed, loss in enumerate(row)} for cell, row in enumerate(values)}


@pytest.mark.parametrize("problem", ["two cells", "one seed", "other seeds", "divergence", "five seeds", "crossed"])
def test_cells_that_cannot_be_pooled(problem):
    values = np.random.default_rng(4).normal(size=(4, 3))
    table = table_of(values)
    assert pool_residuals(table) is not None
    if problem == "other seeds":
        table[0,] = {(seed, seed): loss for seed, loss in enumerate(table[0,].values(), start=1)}
    elif problem == "divergence":
        table[0,][0, 0] = table[1,][0, 0] = math.inf
    elif problem == "crossed":
        pairs: list[Replicate] = list(itertools.product((0, 1), (0, 1)))
        table = {key: dict(zip(pairs, [*losses.values(), 2.0], strict=True)) for key, losses in table.items()}
    else:
        shape = {"two cells": (2, 3), "one seed": (4, 1), "five seeds": (4, 5)}[problem]
        table = table_of(np.random.default_rng(2).normal(size=shape))
    assert pool_residuals(table) is None


@pytest.mark.few(1)
@pytest.mark.parametrize(("cells", "seeds", "seed_effect"), [(4, 2, 0.0), (6, 3, 3.0)])
def test_coverage(cells, seeds, seed_effect):
    """95 % intervals of a difference cover it in 95 % of sweeps with equally variable cells, for any effect of seeds.

    The binomial standard deviation of the estimate is 0.7 %.
    """
    rng = np.random.default_rng(cells * 10 + seeds)
    covered = pooled = 0
    sweeps = 1000
    for _ in range(sweeps):
        values = rng.normal(size=(cells, seeds)) + seed_effect * rng.normal(size=seeds)
        differences = values[0] - values[1]
        estimate = differences.mean()
        if pool := pool_residuals(table_of(values)):
            pooled += 1
            low, high, _ = pool.interval(estimate, (1, -1), seeds)
        else:
            interval = mean_interval({(i, i): float(value) for i, value in enumerate(differences)})
            assert interval.low is not None
            assert interval.high is not None
            low, high = interval.low, interval.high
        covered += low <= 0 <= high
    assert 0.93 < covered / sweeps < 0.97
    assert pooled / sweeps == pytest.approx(1 - MIN_P_EQUAL, abs=0.04)


def test_a_much_more_variable_cell_prevents_pooling():
    rng = np.random.default_rng(3)
    scales = np.array([[100.0]] + [[1.0]] * 5)
    pooled = sum(pool_residuals(table_of(rng.normal(size=(6, 3)) * scales)) is not None for _ in range(500))
    assert pooled < 25
