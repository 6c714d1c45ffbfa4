"""Factors: labels and levels, and the options of a sweep's design in `summarize --runs`."""

import csv
import io
import itertools
import json

import pytest
from synthetic_runs import Record, write_sweep

from normlab.analysis.comparability import differences, intact_runs, names_of
from normlab.analysis.factors import Factor, distinguishing_options, factors_of, label
from normlab.store.query import select_runs

SMALL = {"context": 32, "steps": 20, "batch_size": 4, "stats_every": None}


@pytest.fixture
def results_of(tmp_path):
    """Writes a sweep `made` of these records; returns the results of its runs."""

    def write(*records: Record):
        write_sweep(tmp_path, "made", records)
        return intact_runs(select_runs(["made"], tmp_path).records)[0]

    return write


# Labels


@pytest.mark.parametrize(
    ("levels", "text"),
    [
        ({"placement": "deepnorm", "model.depth": 8, "optim.warmup_steps": 0}, "DeepNorm, depth 8, no warm-up"),
        (
            {"norm": "rmsnorm", "model.width": 128, "seed": 3, "optim.lr": 0.001},
            "RMSNorm, width 128, seed 3, lr 0.001",
        ),
        ({"norm": "none", "placement": "pre"}, "no norm, pre-norm"),
        ({"norm.eps": 1e-05}, "norm eps 1e-05"),
        ({"model.bias": True, "norm.bias": False}, "bias, no norm bias"),
        ({"model.positions": "none"}, "no positions"),
        ({"model.qk_norm": "full"}, "QK norm over all heads"),
        ({"optim.clip": None}, "no clip"),
        ({"model.dropout": 0.0}, "no dropout"),
        ({"model.mlp_width": 512}, "MLP width 512"),
        ({}, "all runs"),
    ],
)
def test_labels(levels, text):
    assert label(levels.keys(), levels.values()) == text


@pytest.mark.parametrize(
    ("levels", "is_numeric"),
    [((1, 2.5), True), ((0, 100), True), (("a", "b"), False), ((False, True), False), ((1, None), False)],
)
def test_only_numbers_are_numeric(levels, is_numeric):
    assert Factor("model.depth", levels).is_numeric is is_numeric


# Factors of runs


def test_levels_are_sorted(results_of):
    grid = itertools.product(("pre", "deepnorm"), (16, 2, 8))
    results = results_of(*(Record(**SMALL, placement=placement, depth=depth) for placement, depth in grid))
    assert [(factor.option, factor.levels, factor.name) for factor in factors_of(results)] == [
        ("placement", ("deepnorm", "pre"), "placement"),
        ("model.depth", (2, 8, 16), "depth"),
    ]


def test_the_learning_rate_and_the_seeds_are_no_factors(results_of):
    grid = itertools.product((1e-3, 3e-3), (0, 1), ("rmsnorm", "dyt"))
    results = results_of(*(Record(**SMALL, lr=lr, seed=seed, norm=norm) for lr, seed, norm in grid))
    assert distinguishing_options(results) == ["norm"]
    assert [factor.levels for factor in factors_of(results)] == [("dyt", "rmsnorm")]
    chosen = factors_of(results, ["optim.lr", "placement"])
    assert [(factor.option, factor.levels) for factor in chosen] == [
        ("optim.lr", (1e-3, 3e-3)),
        ("placement", ("pre",)),
    ]


def test_an_option_that_follows_from_another_is_no_factor(results_of):
    """The synthetic runs have an MLP of four times the width, as real runs by default."""
    results = results_of(*(Record(**SMALL, width=width) for width in (32, 64)))
    assert {run.options["model.mlp_width"] for run in results} == {128, 256}
    assert distinguishing_options(results) == ["model.width"]


def test_steps_that_follow_from_the_size_are_no_factor(results_of):
    """As `train.tokens_per_parameter` sets them: a comparison by norm and width has one length for each width."""
    records: list[Record] = []
    for norm in ("dyt", "rmsnorm"):
        for width, steps in ((32, 100), (64, 400)):
            records.append(Record(**(SMALL | {"norm": norm, "width": width, "steps": steps})))
    results = results_of(*records)
    assert distinguishing_options(results) == ["norm", "model.width"]


@pytest.mark.parametrize(
    ("ratios", "warmups", "expected"),
    [
        ((20.0, 20.0), (15, 50), []),
        ((20.0, 20.0), (15, 40), ["optim.warmup_steps"]),
        ((20.0, 10.0), (15, 50), ["train.steps", "optim.warmup_steps"]),
        ((None, None), (15, 50), ["train.steps", "optim.warmup_steps"]),
    ],
)
def test_tokens_per_parameter_explain_the_steps(results_of, ratios, warmups, expected):
    """And the default warm-up, which is half of the steps and at most 50."""
    records: list[Record] = []
    for width, steps, ratio, warmup in zip((32, 64), (30, 120), ratios, warmups, strict=True):
        options = {"width": width, "steps": steps, "tokens_per_parameter": ratio, "warmup_steps": warmup}
        records.append(Record(**(SMALL | options)))
    assert sorted(names_of(differences(results_of(*records), ["model.width"]))) == sorted(expected)


def test_confounded_factors_of_a_design_are_both_reported(results_of):
    """Norm, placement and depth are never left out, even if one follows from another."""
    results = results_of(
        Record(**SMALL, norm="rmsnorm", placement="pre", depth=2),
        Record(**SMALL, norm="dyt", placement="post", depth=4),
    )
    assert distinguishing_options(results) == ["norm", "placement", "model.depth"]


# The design in `summarize --runs`

DESIGN = {"norm": ("layernorm", "rmsnorm"), "width": (32, 64), "depth": (2, 4), "optim.warmup_steps": (0, 5)}


@pytest.mark.parametrize("format", ["json", "csv"])
def test_each_row_has_a_column_for_each_factor(format, tmp_path, run_command):
    fields = ("norm", "width", "depth", "warmup_steps")
    grid = list(itertools.product(*DESIGN.values()))
    records = [Record(**SMALL | dict(zip(fields, levels, strict=True))) for levels in grid]
    write_sweep(tmp_path, "made", records)
    _, out, _ = run_command("summarize", "made", "--runs", "--format", format, f"--results-dir={tmp_path}")
    rows = {row["id"]: row for row in (json.loads(out) if format == "json" else csv.DictReader(io.StringIO(out)))}
    found = [tuple(str(rows[record.run_id][option]) for option in DESIGN) for record in records]
    assert found == [tuple(map(str, levels)) for levels in grid]
    # No column for what follows from the width.
    assert not [column for column in rows[records[0].run_id] if "mlp" in column]
