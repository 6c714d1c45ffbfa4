"""The thread that writes: its order, its errors, and what the loop does while the disk is slow."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from normlab.base.errors import StoreError
from normlab.config.compose import compose_run
from normlab.store.runs import RunFolder
from normlab.training.loop import Loop
from normlab.training.start import train_pack
from normlab.training.training_run import TrainingRun
from normlab.training.writer import Job, Writer
from support.run_folders import OVERRIDES, Command, Train, differences, steps_of

LONG_S = 120
"""Seconds after which a test that waits has failed."""
SHORT = [*OVERRIDES, "train.steps=7", "train.checkpoint_every=3", "eval.every=2", "train.log_every=2", "stats.every=2"]
"""Overrides of a run with few jobs, of every kind."""
LAST = 16
"""The last step of a run of OVERRIDES."""
WRITES = ["write_rows", "write_statistics", "write_status", "save"]


def test_jobs_of_one_call_run_at_the_same_time_and_before_the_next() -> None:
    writer, together = Writer(), threading.Barrier(3)
    done: list[str] = []
    writer.add(*[partial(together.wait, LONG_S)] * 3)
    writer.add(partial(done.append, "next"))
    writer.wait()
    assert done == ["next"]
    writer.end()


@pytest.mark.parametrize("failing", [0, 1])
def test_no_job_runs_after_one_that_failed(failing: int) -> None:
    error, done, writer = OSError("full"), list[str](), Writer()
    go = threading.Event()

    def fail() -> None:
        go.wait(LONG_S)
        raise error

    jobs: list[Job] = [partial(go.wait, LONG_S)]
    jobs.insert(failing, fail)
    writer.add(partial(done.append, "before"))
    number = writer.add(*jobs)
    writer.add(partial(done.append, "after"))
    go.set()
    for call in (partial(writer.wait, number), writer.wait, partial(writer.add, partial(done.append, "later"))):
        with pytest.raises(OSError, match="full") as raised:
            call()
        assert raised.value is error
    writer.end()
    assert done == ["before"]


# The loop.


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], object]], None]:
    """Return a function that has another function called with the path of each file that is synced."""

    def install(call: Callable[[Path], object]) -> None:
        monkeypatch.setattr(os, "fsync", lambda file: call(Path(os.readlink(f"/proc/self/fd/{file}"))))

    return install


def test_the_loop_takes_steps_while_a_checkpoint_is_written(
    train: Train, reference: Path, synced: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the next checkpoint, since there is one copy of the state. No step changes that copy."""
    waiting, saved = threading.Event(), list[list[int]]()
    take_step, wait = Loop.take_step, Writer.wait

    def take_a_step(loop: Loop, step: int) -> Any:
        saved.append(steps_of(loop.runs[0].folder))
        return take_step(loop, step)

    def wait_for(writer: Writer, call: Future[None] | None = None) -> None:
        waiting.set()
        wait(writer, call)
        waiting.clear()

    def slow(path: Path) -> None:
        if path.name == "metrics.jsonl":  # before the state is written
            assert waiting.wait(LONG_S), f"the loop waits for the disk after {len(saved)} steps"

    monkeypatch.setattr(Loop, "take_step", take_a_step)
    monkeypatch.setattr(Writer, "wait", wait_for)
    synced(slow)
    folder = train()
    assert saved == [[]] * 8 + [[4]] * 4 + [[4, 8]] * 4
    assert differences(reference, folder.path) == []


def test_a_checkpoint_is_synced_with_its_record_before_it_has_its_name(
    train: Train, synced: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut can leave a checkpoint that is newer than its record, or delete the last intact one."""
    events: list[str] = []
    rename, rmtree = Path.rename, shutil.rmtree

    def renaming(path: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return rename(path, target)

    def deleting(path: Path, **options: Any) -> None:
        events.append(f"delete {Path(path).name}")
        rmtree(path, **options)

    synced(lambda path: events.append(path.name))
    monkeypatch.setattr(Path, "rename", renaming)
    monkeypatch.setattr(shutil, "rmtree", deleting)
    train("stats.every=2")
    start = events.index("rename step_00000008") + 1
    end = events.index("rename step_00000012")
    # The status after the first of these checkpoints, and the record and the files of the second.
    (status,) = (name for name in events[start:end] if name.startswith(".status.json"))
    files = ["core.bin", "metrics.jsonl", "state.safetensors", "meta.json", "manifest.json"]
    assert events[start:end] == ["checkpoints", status, *files]
    assert events[end : end + 3] == ["rename step_00000012", "checkpoints", "delete step_00000004"]


class Folders:
    """Copies of a results folder, made after each job of a writer: what a kill after this job leaves."""

    def __init__(self, results: Path, copies: Path) -> None:
        self.results, self.copies = results, copies
        self.jobs: list[str] = []

    def after_each_job(self, add: Callable[..., Any]) -> Callable[..., Any]:
        """Return `add` with a copy after each job; the jobs of one call run in turn."""

        def job_and_copy(job: partial[None]) -> None:
            job()
            method: Any = job.func
            self.jobs.append(method.__name__)
            if self.jobs[-1] == "write_status":
                folder = RunFolder(method.__self__.folder.path)
                assert folder.status()["checkpoint"] == (steps_of(folder) or [None])[-1]
            shutil.copytree(self.results, self.copies / str(len(self.jobs)))

        def adding(writer: Writer, *jobs: partial[None]) -> Any:
            return [add(writer, partial(job_and_copy, job)) for job in jobs][-1]

        return adding


@pytest.mark.exhaustive
@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_a_run_killed_between_two_jobs_resumes_bit_identical(
    seeds: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_in(results: Path) -> list[Path]:
        configs = [compose_run([*SHORT, f"results_dir={results}", f"seed={seed}"]) for seed in seeds]
        return [outcome.folder.path for outcome in train_pack(configs, [[] for _ in configs])]

    folders = Folders(tmp_path / "results", tmp_path / "copies")
    with monkeypatch.context() as patched:
        patched.setattr(Writer, "add", folders.after_each_job(Writer.add))
        undisturbed = train_in(folders.results)
    assert {*folders.jobs} == {*WRITES}
    assert folders.jobs.count("save") == len(seeds) * 3
    for number, job in enumerate(folders.jobs, 1):
        resumed = train_in(folders.copies / str(number))
        for one, other in zip(undisturbed, resumed, strict=True):
            assert differences(one, other) == [], f"after job {number}, {job}"


@pytest.mark.few(1)
@pytest.mark.parametrize(("write", "step"), [("write_rows", 6), ("save", 6), ("write_status", LAST)])
def test_an_error_ends_the_run_with_one_line_and_nothing_is_written_after_it(
    write: str, step: int, command: Command, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, failed = getattr(TrainingRun, write), list[bytes]()

    def fail(run: TrainingRun, *arguments: Any) -> None:
        if run.recorded[0].step >= step and not failed:
            failed.append(run.folder.metrics_path.read_bytes())
            raise StoreError("the disk is full")
        method(run, *arguments)

    monkeypatch.setattr(TrainingRun, write, fail)
    code, _, err = command()
    assert (code, err.splitlines()[-1]) == (2, "error: the disk is full")
    assert err.count("the disk is full") == 1
    (path,) = (tmp_path / "results" / "runs").iterdir()
    folder, status = RunFolder(path), RunFolder(path).status()
    assert folder.metrics_path.read_bytes() == failed[0]
    assert (status["state"], status["error"]) == ("failed", "the disk is full")
    # The loop may be ahead of what is written; the status is not.
    assert status["step"] == folder.rows("train").rows[-1]["step"] + 1
    assert status["checkpoint"] == steps_of(folder)[-1]
    monkeypatch.undo()
    assert command()[0] == 0
    assert differences(reference, path) == []


@pytest.mark.process
def test_threads_find_the_modules_that_numpy_imports_at_their_first_use() -> None:
    """Where two threads save at once, numpy's import of ctypeslib has recursed without end."""
    code = "import sys, normlab.training.checkpoint; print('numpy.ctypeslib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
