"""Damaged, incomplete, foreign and absurd records: the page lists each with its problem."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from normlab.stats.profiles import Profiles
from normlab.store.format import with_checksum
from normlab.store.plans import Plan, PlannedRun, sweep_folder
from normlab.sweeps.files import write_plan
from support.compare_pages import lines_of

IMG = "<img src=x onerror=alert(1)>"
ODD = [
    None, True, -1, 0, 1.5, 10**30, 10**400, 1e308, -1e308, "", "x", "nan", "-inf", "\u0000\u202e", IMG, [], [1], [[]],
    [None, {}], {}, {"a": 1}, {"lr": {"x": []}}, "</script><script>alert(1)</script>", "\ud800", ["a"] * 50,
]  # fmt: skip


def rewrite(path, record):
    path.write_bytes(with_checksum({key: value for key, value in record.items() if key != "sha256"}))


def put(tree, path, value):
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


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
    assert "is damaged (not a JSON object)" in note["bare"]
    assert note["killed"].startswith("killed at step 20 of 100")
    assert note["running"].startswith("still running")
    assert note["torn"].startswith("3 lines of the metrics cannot be read")
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


def test_names_that_a_terminal_would_obey(trained, run_command, tmp_path):
    trained("a", norm="\x1b[31mred", run={"name": "\ud800\n"})
    trained("b", norm="\ud800\u202e")
    path = sweep_folder(tmp_path, "mine")
    path.mkdir(parents=True)
    config = {"norm": {"name": "\x1b[2J"}}
    for name, expected in (("mine", 0), ("\ud800\x1b[2J", 2), (5, 2), (None, 2)):
        write_plan(path, Plan(name, "1", [PlannedRun(run_id, [], config) for run_id in "abc"], []))  # pyright: ignore
        code, out, err = run_command("compare", str(path))
        assert code == expected
        assert "\x1b" not in out + err
        assert ((out or err).splitlines()[-1] == str(path / "compare.html")) is (not expected)
        assert ("plan.json: is " in err) is bool(expected)


def test_run_without_settings_is_in_no_cell(trained, compare, tmp_path):
    trained("a")
    trained("b", run={"config": 7})
    data = compare()
    assert data["summary"][1] == "Of 2 runs, 1 in no cell: damaged (1)."
    assert data["warnings"] == [
        f"run b is damaged and is left out: {tmp_path}/runs/b/run.json: is damaged (Expected `object`, got `int` - at "
        "`$.config`); restore a copy, or delete the run's folder and run it again"
    ]


@pytest.mark.parametrize("value", ODD)
def test_absurd_rows(trained, compare, value):
    folder = trained("a", measured=[0, 5])
    with folder.metrics_path.open("ab") as file:
        for kind in ("train", "eval", "pace"):
            for row in (
                {"kind": kind, "step": value, "loss": 1.0, "seconds": 1.0},
                {"kind": kind, "step": 30, "loss": value, "grad_norm": value, "clip": value, "seconds": value},
            ):
                file.write(json.dumps(row).encode() + b"\n")
        file.write(json.dumps({"kind": value}).encode() + b"\n" + json.dumps([value]).encode() + b"\n[[[[\n")
    data = compare()
    assert [run["state"] for run in data["run_table"]["rows"]] == ["finished"]
    (points,) = lines_of(data, "loss", "train_loss").values()
    assert len(points) >= 20


@pytest.mark.parametrize("seed", range(3))
def test_absurd_statistics(trained, compare, seed):
    draw = random.Random(seed)
    for number in range(16):
        folder = trained(f"run{number:02}", measured=[0, 5, 10], seed=number)
        path = folder.path / "stats" / "core.json"
        record = json.loads(path.read_bytes())
        what = draw.choice(["depth", "groups", "families", "group", "bytes"])
        if what == "group":
            put(record["groups"][draw.randrange(3)], [draw.choice(["statistic", "site", "places"])], draw.choice(ODD))
        elif what == "bytes":
            rows = folder.path / "stats" / "core.bin"
            content = bytearray(rows.read_bytes())
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            rows.write_bytes(content[: draw.randrange(len(content))])
        else:
            record[what] = draw.choice([*ODD, 10**6, 3, 0])
        rewrite(path, record)
    trained("sound", measured=[0, 5, 10], seed=99)
    data = compare()
    assert len(data["run_table"]["rows"]) == 17
    assert data["figures"][-1]["id"] == "layers"


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
