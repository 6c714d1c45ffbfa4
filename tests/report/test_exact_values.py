"""Two different values are never equal and never have one label, however close they are."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import Record, write_sweep

from normlab.analysis.factors import Factor, find_run, label
from normlab.analysis.settings import Condition, format_setting, sort_key
from normlab.analysis.table import summarize_by
from normlab.errors import ConfigError
from normlab.report.cells_table import json_rows, table_rows
from normlab.report.figure_data import factor_axis
from normlab.store.record import Setting

DRAW = np.random.default_rng(0)
FLOATS = [1e-3, 1.0, 1e6, 2.0**53, *(10 ** DRAW.uniform(-9, 9, 200)).tolist()]
INTEGERS = [0, 2**53, 2**63 - 2, *DRAW.integers(0, 2**62, 200).tolist()]
PAIRS: list[tuple[Setting, Setting]] = [
    *((value, math.nextafter(value, math.inf)) for value in FLOATS),
    *((value, value + 1) for value in INTEGERS),
]
SEEDS, RATES = (2**53, 2**53 + 1), (1e-3, 1.0001e-3, math.nextafter(1e-3, 1))


def test_a_condition_selects_one_of_two_adjacent_values() -> None:
    for pair in PAIRS:
        for value in pair:
            for text in (format_setting(value), repr(value)):
                assert [Condition("x", "=", text).accepts(other) for other in pair] == [
                    value is other for other in pair
                ]
        assert Condition("x", ">", format_setting(pair[0])).accepts(pair[1])


def test_adjacent_values_have_different_labels_and_an_order() -> None:
    for pair in PAIRS:
        assert sort_key(pair[0]) < sort_key(pair[1])
        assert len({label(["optim.lr"], [value]) for value in pair}) == 2
        assert len(set(factor_axis(Factor("x", pair))[0].values())) == 2


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A results folder with the sweeps `big`, over `SEEDS`, and `close`, over `RATES`."""
    write_sweep(tmp_path, "big", [Record(steps=20, stats_every=None, seed=seed) for seed in SEEDS])
    write_sweep(tmp_path, "close", [Record(steps=20, stats_every=None, lr=lr) for lr in RATES])
    return tmp_path


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_is_found_by_its_exact_seed(seed: int, results: Path) -> None:
    assert find_run("big", [f"seed={seed}"], results).run()["config"]["seed"] == seed
    with pytest.raises(ConfigError, match=f"seed is {SEEDS[0]}, {SEEDS[1]}"):
        find_run("big", [f"seed={SEEDS[1] + 1}"], results)


def test_the_table_of_cells_distinguishes_close_learning_rates(results: Path) -> None:
    table = summarize_by("close", ["optim.lr"], against="lr=1.0001e-3", results_dir=results)
    assert [row["optim.lr"] for row in table_rows(table)] == [repr(rate) for rate in sorted(RATES)]
    assert [row["baseline"] for row in json_rows(table)] == ["0.0010001", "0.0010001", None]
    with pytest.raises(ConfigError, match=r"no run matches.*; optim.lr is 0\.001, 0\.0010000000000000002, 0\.0010001$"):
        summarize_by("close", ["norm"], where=["lr=1.00001e-3"], results_dir=results)
