"""The progress display of a sweep, read from the folders of its runs, with and without a terminal."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic_runs import Record

from normlab.config.compose import compose_sweep
from normlab.options import plain_tree
from normlab.store.plans import (
    FINISHED,
    GPU_FAULT,
    RAISED,
    Pack,
    PackOutcome,
    Plan,
    PlannedRun,
    log_of,
    run_of,
    sweep_folder,
)
from normlab.store.runs import RunFolder
from normlab.sweeps import progress
from normlab.sweeps.progress import PackProgress, ProgressDisplay, result_lines


@pytest.fixture(scope="module")
def jobs() -> list[PlannedRun]:
    """Forty runs of 500 steps."""
    _, composed = compose_sweep(["norm=layernorm,rmsnorm", "seed=range(20)"])
    return [
        PlannedRun(f"run{number}", overrides, plain_tree(config)) for number, (overrides, config) in enumerate(composed)
    ]


TRAIN = {"kind": "train", "loss": 1.0, "grad_norm": 1.0, "clip": 1.0, "lr": 1e-3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sweep_folder(tmp_path / "results", "x")


def write(folder: Path, job: PlannedRun, state: str, step: int, **more: Any) -> None:
    run = RunFolder.create(run_of(folder, job).path, Record().run() | {"run_id": job.run_id, "config": job.config})
    if state == "finished":
        more = {"outcome": "finished", "best_val_loss": more["val_loss"]} | more
    if state == "diverged":
        more |= {"diverged": {"step": step, "loss": float("nan"), "grad_norm": 1.0}}
    run.write_status({"state": state, "step": step, **more})
    with run.lock():
        run.append([{"kind": "pace", "step": step, "seconds": 1.0, "tokens_per_s": 1.0}])


def test_progress_of_a_pack(folder: Path, jobs: list[PlannedRun]) -> None:
    def progress_of(*indices: int) -> PackProgress:
        return PackProgress(folder, Plan("x", "4", jobs, []), Pack(1, list(indices)))

    assert progress_of(0, 1, 2, 3).step == 0
    write(folder, jobs[0], "running", 100)
    write(folder, jobs[1], "finished", 500, val_loss=2.5)
    write(folder, jobs[2], "diverged", 50, val_loss=float("nan"))
    pack = progress_of(0, 1, 2, 3)
    assert (pack.step, pack.steps, pack.outcomes) == ((100 + 500 + 500 + 0) / 4, 500, {"finished": 1, "diverged": 1})
    assert pack.loss is None
    assert progress_of(1).loss == 2.5
    assert progress_of(2).loss is None
    with run_of(folder, jobs[0]).lock():
        run_of(folder, jobs[0]).append([TRAIN | {"step": 100}])
    assert progress_of(0).step == 101
    (run_of(folder, jobs[3]).path).mkdir()
    (run_of(folder, jobs[3]).path / "run.json").write_text("{}")
    (run_of(folder, jobs[3]).path / "status.json").write_text("no record")
    assert progress_of(3).step == 0


def test_plain_lines(
    folder: Path, jobs: list[PlannedRun], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packs = [Pack(1, [0]), Pack(2, [1, 2, 3]), Pack(3, [4]), Pack(4, [5])]
    plan = Plan("x", "4", jobs, packs)
    display = ProgressDisplay(folder)
    display.start(plan, packs[:3], {4: PackOutcome(4, RAISED, "ValueError: no", 1, 1.0, 1.0)})
    assert capsys.readouterr().err == "normlab: 4 packs: 1 failed, 3 waiting\n"
    display.pack_started(1)
    display.pack_started(2, 5)
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    for number in (1, 2, 3):
        write(folder, jobs[number], "diverged" if number == 2 else "running", 250)
    display.refresh()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("normlab: 4 packs: 2 running, 1 failed, 1 waiting, 1 run diverged; left 0:0")
    assert line.endswith("and 2 more running  1 of 3 diverged  GPU 5  step 333/500")
    write(folder, jobs[0], "finished", 500, val_loss=2.25)
    display.pack_ended(plan, PackOutcome(1, FINISHED, "", 0, 1.0, 1.0), [])
    assert capsys.readouterr().err == "normlab: pack 1 norm=layernorm seed=0: finished  val 2.2500\n"
    halves = [Pack(5, [1], 2), Pack(6, [2, 3], 2)]
    display.pack_ended(plan, PackOutcome(2, "memory", "out of memory", 12, 1.0, 1.0), halves)
    assert "ran out of memory" in (line := capsys.readouterr().err)
    assert line.endswith(": out of memory; split into packs 5 and 6\n")
    display.refresh()
    assert "5 packs: 1 completed, 1 failed, 3 waiting" in capsys.readouterr().err
    display.pack_started(3, 5)
    display.pack_ended(plan, PackOutcome(3, GPU_FAULT, "it broke", 1, 1.0, 1.0, "GPU-5a"), [])
    assert capsys.readouterr().err.endswith(" seed=4: waiting: it broke\n")
    display.finish()


def test_sweep_is_not_over_before_its_slowest_pack(
    folder: Path, jobs: list[PlannedRun], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second pack takes 100 s for the half of its steps, the first took 10 s for all."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    plan = Plan("x", "off", jobs, packs := [Pack(1, [0]), Pack(2, [1])])
    display = ProgressDisplay(folder)
    display.start(plan, packs, {})
    display.pack_started(1)
    clock.now += 10
    write(folder, jobs[0], "finished", 500, val_loss=2.0)
    display.pack_ended(plan, PackOutcome(1, FINISHED, "", 0, 10.0, 1.0), [])
    display.pack_started(2)
    clock.now += 100
    write(folder, jobs[1], "running", 250)
    capsys.readouterr()
    display.refresh()
    assert "left 1:40; " in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_table_on_a_terminal(folder: Path, jobs: list[PlannedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setattr(progress, "REFRESH_S", 0.0)
    packs = [Pack(number + 1, [number]) for number in range(40)]
    display = ProgressDisplay(folder)
    display.start(plan := Plan("x", "off", jobs, packs), packs, {})
    display.pack_started(7)
    write(folder, jobs[6], "running", 125)
    write(folder, jobs[7], "diverged", 60)
    display.pack_ended(plan, PackOutcome(8, FINISHED, "", 0, 1.0, 1.0), [])
    display.pack_ended(plan, PackOutcome(9, RAISED, "ValueError: no", 1, 1.0, 1.0), [])
    display.refresh()
    display.print("a line")
    display.finish()
    last = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue()).rpartition("pack  runs")[2]
    rows = re.findall(r"^(\d+) +norm=layernorm seed=(\d+) [━╸╺ ]+(.*?) *$", last, flags=re.MULTILINE)
    assert [(pack, seed, status.partition("   ")[0]) for pack, seed, status in rows] == [
        ("7", "6", "running  step 125/500"), ("8", "7", "diverged"), ("9", "8", "raised an exception  step 0/500"),
    ]  # fmt: skip
    assert "40 packs: 1 completed, 1 running, 1 failed, 37 waiting, 1 run diverged" in last
    assert "a line" in terminal.getvalue()


def test_closed_stderr_is_ignored(folder: Path, jobs: list[PlannedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    display = ProgressDisplay(folder)
    display.start(Plan("x", "off", jobs, packs := [Pack(1, [0])]), packs, {})
    display.print("a line")


def test_table_of_many_runs_shows_only_unusual_ones(folder: Path, jobs: list[PlannedRun]) -> None:
    packs = [Pack(number + 1, [number]) for number in range(40)]
    plan = Plan("x", "off", jobs, packs)
    for number in range(38):
        write(folder, jobs[number], "diverged" if number == 3 else "finished", 500, val_loss=2.0)
    write(folder, jobs[39], "running", 5)  # and no process holds its lock
    failed = {39: PackOutcome(39, RAISED, "ValueError: no", 1, 1.0, 1.0)}
    log_of(folder, 39).parent.mkdir(parents=True)
    log_of(folder, 39).touch()
    title, *lines = result_lines(plan, folder, failed)
    assert title == "failed, diverged, regressed, stuck or damaged: 3 of 40 runs:"
    rows = [line.split() for line in lines if line.startswith("norm=") and ":" not in line]
    assert [row[:3] for row in rows] == [
        ["norm=layernorm", "seed=3", "diverged"],
        ["norm=rmsnorm", "seed=18", "raised"],
        ["norm=rmsnorm", "seed=19", "killed"],
    ]
    count = lines.index("x: 40 runs, 1 diverged, 1 failed, 37 finished, 1 left to train")
    assert lines[count + 1].startswith("pack 39 raised an exception: norm=rmsnorm seed=18: ValueError: no (")
    assert lines[count + 1].endswith("logs/pack_039.log)")
    assert "the same command trains the remaining runs" in lines
    lines = result_lines(Plan("x", "off", jobs[:10], packs[:10]), folder, {})
    assert sum(line.startswith("norm=layernorm seed=") for line in lines) == 10


@pytest.mark.parametrize(("diverged", "lines_of_runs"), [(0, 0), (31, 30)])
def test_table_of_unusual_runs_is_short(
    folder: Path, jobs: list[PlannedRun], diverged: int, lines_of_runs: int
) -> None:
    for number, job in enumerate(jobs):
        write(folder, job, "diverged" if number < diverged else "finished", 500, val_loss=2.0)
    packs = [Pack(number + 1, [number]) for number in range(40)]
    lines = "\n".join(result_lines(Plan("x", "off", jobs, packs), folder, {})).splitlines()
    title = "failed, diverged, regressed, stuck or damaged: 31 of 40 runs; the first 30 are:"
    assert lines[0] == (title if diverged else "x: 40 runs, 40 finished")
    assert sum(line.startswith("norm=layernorm seed=") or line.startswith("norm=rmsnorm seed=") for line in lines) == (
        lines_of_runs
    )
