"""The progress and the result of a sweep, read from the folders of its runs."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic_runs import Record

from normlab.base.options import plain_tree
from normlab.config.compose import compose_sweep
from normlab.store.plans import Pack, Plan, PlannedRun, run_of, sweep_folder
from normlab.store.runs import RunFolder
from normlab.sweeps import progress
from normlab.sweeps.files import MEMORY, PackOutcome, log_of, write_plan
from normlab.sweeps.overview import sweep_rows
from normlab.sweeps.progress import ProgressDisplay, result_lines

TRAIN = {"kind": "train", "loss": 1.0, "grad_norm": 1.0, "clip": 1.0, "lr": 1e-3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sweep_folder(tmp_path / "results", "x")


@pytest.fixture
def plan() -> Plan:
    """Six runs of 500 steps: a pack of one, one of three, and two of one."""
    _, composed = compose_sweep(["seed=range(6)"])
    runs = [PlannedRun(f"run{index}", texts, plain_tree(config)) for index, (texts, config) in enumerate(composed)]
    return Plan("x", "3", runs, [Pack(1, [0]), Pack(2, [1, 2, 3]), Pack(3, [4]), Pack(4, [5])])


def write(folder: Path, run: PlannedRun, state: str, step: int, **more: Any) -> None:
    record = RunFolder.create(run_of(folder, run).path, Record().run() | {"run_id": run.run_id, "config": run.config})
    if state == "finished":
        more = {"outcome": "finished", "val_loss": 2.0, "best_val_loss": 2.0} | more
    if state == "diverged":
        more = {"outcome": "diverged", "diverged": {"step": step, "loss": math.nan, "grad_norm": 1.0}} | more
    record.write_status({"state": state, "step": step, **more})
    with record.lock():
        record.append([TRAIN | {"step": step - 1}, {"kind": "pace", "step": step, "seconds": 1.0, "tokens_per_s": 1.0}])


def test_lines(folder: Path, plan: Plan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    display = ProgressDisplay(folder)
    failed = {4: PackOutcome(4, "failed", "ValueError: no")}
    display.start(plan, 3, failed)
    assert capsys.readouterr().err == "normlab: 6 runs: 0 completed, 0% of the work done, 1 pack failed\n"
    display.refresh()
    assert capsys.readouterr().err == ""
    write(folder, plan.runs[0], "finished", 500, val_loss=2.25)
    display.pack_ended(plan.packs[0], PackOutcome(1, "finished"), [])
    assert capsys.readouterr().err == "normlab: pack 1 seed=0: finished\n"
    for index, state in enumerate(["running", "diverged", "running"], 1):
        write(folder, plan.runs[index], state, 125, outcome=None)  # a pack gives its outcomes at its end
    (run_of(folder, plan.runs[3]).path / "status.json").write_text("no record")
    clock.now += 90
    display.refresh()  # 1 + 1/4 + 1 + 1/4 of 6 runs in 90 s
    assert (
        capsys.readouterr().err == "normlab: 6 runs: 2 completed, 42% of the work done, 1 pack failed, left 2 min 6 s\n"
    )
    halves = [Pack(5, [1], 2), Pack(6, [2, 3], 2)]
    display.pack_ended(plan.packs[1], PackOutcome(2, MEMORY, "no memory"), halves)
    line = "normlab: pack 2 seed=1 and 2 more: out of memory: no memory; split into packs 5 and 6\n"
    assert capsys.readouterr().err == line


def test_a_run_without_its_status_is_not_done(folder: Path, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    for run in plan.runs:
        write(folder, run, "finished", 500)
    (run_of(folder, plan.runs[3]).path / "status.json").unlink()
    ProgressDisplay(folder).start(plan, 1, {})
    assert capsys.readouterr().err == "normlab: 6 runs: 5 completed, 99% of the work done\n"
    folder.mkdir(parents=True)
    write_plan(folder, plan)
    assert sweep_rows(folder.parent.parent)[0]["states"] == "1 damaged, 5 finished"
    (run_of(folder, plan.runs[1]).path / "run.json").write_text("{")
    assert sweep_rows(folder.parent.parent)[0]["states"] == "2 damaged, 4 finished"


def test_result(folder: Path, plan: Plan) -> None:
    for index in (0, 1, 2):
        write(folder, plan.runs[index], "diverged" if index == 1 else "finished", 500, val_loss=2.0)
    write(folder, plan.runs[3], "finished", 500)
    (run_of(folder, plan.runs[3]).path / "status.json").write_text("no record")
    write(folder, plan.runs[5], "running", 5)  # and no process holds its lock
    log_of(folder, 3).parent.mkdir(parents=True)
    log_of(folder, 3).touch()
    counts, failure, *hints = result_lines(plan, folder, {3: PackOutcome(3, "failed", "ValueError: no")})
    assert counts == "x: 6 runs, 1 damaged, 1 diverged, 1 failed, 2 finished, 1 left to train"
    assert failure.startswith("pack 3 failed: seed=4: ValueError: no (")
    assert failure.endswith("logs/pack_003.log)")
    assert hints == [
        "failed packs are skipped; the same command with --retry-failed retries them",
        "the same command trains the remaining runs",
        f"normlab summarize {folder}",
    ]
