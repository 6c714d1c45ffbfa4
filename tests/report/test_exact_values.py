"""Two different values are never equal and never have one label, however close they are."""

import math
from pathlib import Path

import pytest
from synthetic_runs import Record, write_sweep

from normlab.analysis.factors import find_run
from normlab.analysis.table import summarize_by
from normlab.base.errors import ConfigError
from normlab.report.cells_table import json_rows, table_rows

SEEDS, RATES = (2**53, 2**53 + 1), (1e-3, 1.0001e-3, math.nextafter(1e-3, 1))


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
