"""Damaged, incomplete, foreign and absurd records: the page lists each with its problem."""

import numpy as np

from normlab.catalogue.statistics.profiles import Profiles
from normlab.store.plans import Plan, PlannedRun, sweep_folder
from normlab.sweeps.files import write_plan
from support.compare_pages import lines_of


def test_missing_damaged_and_running_records_are_listed(trained, compare, run_command, tmp_path):
    good, bare = trained("good", measured=[0, 5]), trained("bare", measured=[0, 5], seed=1)
    (bare.path / "run.json").write_text("{")
    (tmp_path / "runs" / "hollow").mkdir()
    (tmp_path / "runs" / "hollow" / "lock").touch()
    (tmp_path / "runs" / "a_file").write_text("x")
    trained("killed", state="running", seed=2)
    running = trained("running", state="running", seed=3)
    torn = trained("torn", seed=4)
    with torn.metrics_path.open("ab") as file:
        file.write(b'{"kind":"train","step":20,"lo')
    lines = torn.metrics_path.read_bytes().split(b"\n")
    lines[5], lines[8] = b"\xff\x00[", b'{"kind": "train", "step": "x", "loss": [1]}'
    torn.metrics_path.write_bytes(b"\n".join(lines))
    names = ("good", "bare", "hollow", "killed", "running", "torn", "new")
    jobs = [PlannedRun(run_id, [], good.run()["config"]) for run_id in names]
    sweep_folder(tmp_path, "mine").mkdir(parents=True)
    write_plan(sweep_folder(tmp_path, "mine"), Plan("mine", "1", jobs, []))
    with running.lock():
        data = compare("mine")
        _, _, err = run_command("compare", "mine", "--results-dir", str(tmp_path))
    runs = {run["id"]: run for run in data["run_table"]["rows"]}
    note = {name: run["values"][-1] for name, run in runs.items()}
    assert {name: run["state"] for name, run in runs.items()} == {
        "good": "finished", "bare": "damaged", "hollow": "not started", "killed": "killed", "running": "running",
        "torn": "finished", "new": "not started",
    }  # fmt: skip
    assert note["good"] == ""
    assert "is damaged (its checksum does not match)" in note["bare"]
    assert note["killed"].startswith("killed at step 20 of 100")
    assert note["running"].startswith("still running")
    assert "metrics.jsonl: damaged rows, left out: 2" in note["torn"]
    assert note["new"] == "planned by the sweep mine, not started"
    assert data["title"] == "mine"
    lines = [f"warning: {warning}" for warning in data["warnings"]]
    assert err.splitlines()[: len(lines)] == lines
    assert lines[0] == "warning: runs that have not started: 2 of 7"
    broken = [line.split(": ")[:2] for line in err.splitlines()[len(lines) :]]
    assert sorted(broken) == [["warning", f"run {name}"] for name in ("torn",)]
    assert [line.split(": ")[:2] for line in err.splitlines() if "bare" in line] == [
        ["warning", "run bare is damaged and is left out"]
    ]
    assert "3 in no cell: damaged (1); not started (2)" in data["summary"][1]


def test_page_without_any_readable_run(trained, compare):
    for name in "ab":
        (trained(name).path / "run.json").write_text("no")
    data = compare()
    assert data["cell_table"]["rows"] == data["figures"] == []
    assert data["summary"] == [
        "No run has a final loss yet: there is nothing to compare.", "Of 2 runs, 2 in no cell: damaged (2).",
    ]  # fmt: skip
    assert [run["state"] for run in data["run_table"]["rows"]] == ["damaged", "damaged"]


def test_run_without_settings_is_in_no_cell(trained, compare, tmp_path):
    trained("a")
    trained("b", run={"config": 7})
    data = compare()
    assert data["summary"][1] == "Of 2 runs, 1 in no cell: damaged (1)."
    assert data["warnings"] == [
        f"run b is damaged and is left out: {tmp_path}/runs/b/run.json: is damaged (Expected `object`, got `int` - at "
        "`$.config`); restore a copy, or delete the run's folder and run it again"
    ]


def test_statistics_that_overflow(trained, compare):
    folder = trained("a", measured=[0])
    (part,), _ = folder.statistics.read("core")
    with folder.lock():
        for step, value in ((5, np.inf), (6, np.nan), (7, 3e38), (8, 0.0)):
            values = np.full((1, part.layout.width), value)
            folder.statistics.append("core", Profiles(part.layout, np.array([step]), values))
    data = compare()
    last = lines_of(data, "layers", "resid_rms")
    assert [*last.values()] == [[[layer, 0, 0, 0] for layer in range(1, 4)]]
