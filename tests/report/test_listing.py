from __future__ import annotations

import time

from normlab.report.runs_table import RUN_COLUMNS, list_runs
from normlab.report.tables import render


def test_runs_are_listed_newest_first(make_run, tmp_path):
    make_run("old", run={"created": 1_700_000_000.5})
    make_run("new", run={"created": 1_780_000_000.0})
    make_run("middle", "diverged", run={"created": 1_720_000_000})
    (make_run("unknown").path / "run.json").unlink()
    rows = list_runs(tmp_path)
    assert [row["id"] for row in rows] == ["new", "middle", "old", "unknown"]
    assert [tuple(row) for row in rows] == [RUN_COLUMNS] * 4
    assert [row["state"] for row in rows] == ["finished", "diverged", "finished", "damaged"]


def test_times_are_local_times(make_run, tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    try:
        make_run("aa", run={"created": 1_785_664_800})
        make_run("bb", run={"created": 0})
        text = render(list_runs(tmp_path), "table", 160)
    finally:
        monkeypatch.undo()
        time.tzset()
    for created in ("2026-08-02 12:00", "1970-01-01 02:00"):
        assert created in text
