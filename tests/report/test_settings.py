"""Settings besides the overrides in which runs differ: when they are reported."""

from __future__ import annotations

from typing import Any

import pytest

from normlab.analysis.results import comparability_warnings, read_results
from normlab.analysis.table import summarize_by
from normlab.report.cells_table import json_rows
from normlab.store.plans import Plan, PlannedRun, sweep_folder
from normlab.store.record import RunRecord
from normlab.sweeps.files import write_plan

OF_ONE_SWEEP = [{"sweep": "first", "runs": ["a", "b", "c"]}, {"sweep": "first", "runs": ["d"]}]
ACROSS_SWEEPS = [{"sweep": "first", "runs": ["a", "b", "c"]}, {"sweep": "second", "runs": ["d"]}]
PACKED_AND_SINGLE = [{"sweep": "first", "runs": ["a", "b", "c"]}, None]
OF_ONE_SIZE = [{"sweep": "first", "runs": ["a", "b"]}, {"sweep": "second", "runs": ["c", "d"]}]


@pytest.mark.parametrize(
    ("packs", "reported"),
    [(OF_ONE_SWEEP, False), (OF_ONE_SIZE, False), (ACROSS_SWEEPS, True), (PACKED_AND_SINGLE, True)],
)
def test_pack_sizes_are_reported_across_sweeps_only(
    packs: list[dict[str, Any] | None], reported: bool, make_run, tmp_path
) -> None:
    folders = [
        make_run(f"run{seed}", seed=seed, run={} if pack is None else {"pack": pack}) for seed, pack in enumerate(packs)
    ]
    results, _ = read_results(list(map(RunRecord.read, folders)))
    line = "the runs differ in numerics: pack size 1 and 3: equal options and seeds give different bits"
    assert comparability_warnings(results) == [line] * reported
    (row,) = json_rows(summarize_by(tmp_path, ["norm"]))
    assert any("pack size" in warning for warning in row["warnings"]) == reported


def test_a_sweep_does_not_warn_of_pack_sizes_that_its_plan_has_reported(make_run, tmp_path) -> None:
    """It reuses the packed run of another sweep; both in one selection of folders are reported."""
    for seed, pack in enumerate(ACROSS_SWEEPS):
        make_run(f"run{seed}", seed=seed, run={"pack": pack})
    jobs = [PlannedRun(f"run{seed}", [], {}) for seed in range(len(ACROSS_SWEEPS))]
    sweep = sweep_folder(tmp_path, "second")
    sweep.mkdir(parents=True)
    write_plan(sweep, Plan("second", "off", jobs, []))
    (row,) = json_rows(summarize_by("second", ["norm"], results_dir=tmp_path))
    assert row["runs"] == 2
    assert not any("pack size" in warning for warning in row["warnings"])
    (row,) = json_rows(summarize_by(tmp_path, ["norm"]))
    assert any("pack size" in warning for warning in row["warnings"])
