"""A follower sends the runs that no other follower sends, and leaves a resumed run to the follower of its process."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from normlab.config.compose import compose_run
from normlab.errors import NormlabError
from normlab.store.format import STATUS_FILE, with_checksum
from normlab.store.lock import file_lock, is_locked
from normlab.store.runs import RunFolder
from normlab.tracking import follower as follower_module
from normlab.tracking.background import Task
from normlab.tracking.follower import Follower
from normlab.tracking.uploads import Upload, lock_of, upload_lines
from normlab.training.start import train
from support.processes import wait_for
from support.small_run import small_run


class RecordingService:
    """Records the steps and the state that it receives."""

    next_step, upload = 0, Upload(where="address")

    def __init__(self, path: Path, *_: object, **__: object) -> None:
        self.path = path
        self.steps: list[int] = []
        self.ended: list[str] = []
        services.append(self)

    def log(self, step: int, payload: object) -> None:
        self.steps.append(step)
        self.next_step = step + 1

    def finish(self, summary: object, state: str) -> None:
        assert is_locked(lock_of(self.path, "online"))
        self.ended.append(state)

    def close(self) -> None: ...


services: list[RecordingService] = []


@pytest.fixture(autouse=True)
def _service(monkeypatch: pytest.MonkeyPatch) -> None:
    services.clear()
    monkeypatch.setattr(follower_module, "WandbRun", RecordingService)


def folder_of(results: Path, *overrides: str) -> RunFolder:
    return train(compose_run([*small_run(results), "train.steps=4", *overrides]), trackers=[]).folder


def pretend_that_it_trains(folder: RunFolder) -> None:
    status: dict[str, Any] = {**folder.status(), "state": "running"}
    (folder.path / STATUS_FILE).write_bytes(with_checksum(status))


@pytest.mark.parametrize("trained_by", ["this process", "another process"])
def test_a_run_that_another_process_resumed_is_left_to_its_follower(
    trained_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path)
    pretend_that_it_trains(folder)
    process = os.getpid() if trained_by == "this process" else os.getppid()
    follower = Follower(Task(runs=[folder.path], service="online", process=process))

    def stop(seconds: float) -> None:
        raise InterruptedError

    monkeypatch.setattr(follower_module.time, "sleep", stop)
    with folder.lock():
        if trained_by == "this process":
            with pytest.raises(InterruptedError):
                follower.follow("online")
        else:
            follower.follow("online")
            assert not is_locked(lock_of(folder.path, "online"))
    assert services[0].ended == ([] if trained_by == "this process" else ["running"])
    follower.close()


def test_a_run_of_a_pack_does_not_wait_for_the_follower_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = folder_of(tmp_path, "seed=0"), folder_of(tmp_path, "seed=1")
    follower = Follower(Task(runs=[first.path, second.path], service="online"))
    monkeypatch.setattr(follower_module, "PAUSE_S", 1.0)
    lock = file_lock(lock_of(first.path, "online"), "the test")
    lock.__enter__()
    pauses: list[list[str]] = []

    def sleep(seconds: float) -> None:
        if len(pauses) == 2:
            lock.__exit__(None, None, None)
        pauses.append([service.path.name for service in services if service.ended])
        assert len(pauses) < 10

    monkeypatch.setattr(follower_module.time, "sleep", sleep)
    follower.follow("online")
    assert pauses == [[second.path.name]] * 3
    assert [(service.path.name, service.ended) for service in services] == [
        (second.path.name, ["finished"]), (first.path.name, ["finished"]),
    ]  # fmt: skip
    follower.close()


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (TimeoutError("no answer"), 1),
        (RuntimeError("returned error 503: try later"), 1),
        (RuntimeError("returned error 409: the run was deleted"), 3),
        (RuntimeError("returned error 403: permission denied"), 1),
        (NormlabError("the server has the steps before 3 of 5"), 3),
        (OSError(errno.ENOSPC, "no space"), 3),
    ],
)
def test_a_server_that_is_gone_at_the_end_is_tried_once(
    error: Exception, attempts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A problem of one run is none of the others."""
    folders = [folder_of(tmp_path, f"seed={seed}") for seed in range(3)]

    def fail(self: object, summary: object, state: str) -> None:
        finished.append(state)
        raise error

    finished: list[str] = []
    monkeypatch.setattr(RecordingService, "finish", fail)
    follower = Follower(Task(runs=[folder.path for folder in folders], service="online"))
    follower.follow("online")
    assert finished == ["finished"] * attempts
    text = str(error) if isinstance(error, NormlabError) else f"{type(error).__name__}: {error}"
    is_rejected = "permission denied" in text
    (problem,) = {Upload.read(run.folder.path, "online").problem for run in follower.runs}
    assert problem.endswith(text)
    assert ("the login was rejected; " in problem) == is_rejected == (problem != text)
    assert upload_lines([folder.path for folder in folders[:2]], "online", ["x"]) == [
        f"W&B lacks data of 2 runs ({problem}); `normlab sync x` sends what is missing"
    ]


def test_the_end_of_a_run_ends_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path)
    lock, pauses = folder.lock(), 0
    follower = Follower(Task(runs=[folder.path], service="online"))

    def sleep(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 3:
            lock.__exit__(None, None, None)

    monkeypatch.setattr(follower_module, "PAUSE_S", 99.0)
    monkeypatch.setattr(follower_module.time, "sleep", sleep)
    lock.__enter__()
    follower.follow("online")
    assert pauses == 3
    assert services[0].ended == ["finished"]
    follower.close()


def test_sync_leaves_a_run_to_the_follower_that_sends_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    follower = Follower(Task(runs=[folder.path], service="online", until_end=False))
    with file_lock(lock_of(folder.path, "online"), "the test"):
        follower.follow("online")
        assert upload_lines([folder.path], "online", ["x"]) == [
            "W&B: the upload of 1 run continues in the background; if it fails, `normlab sync x` sends what is missing"
        ]
    assert not services


def test_a_killed_process_that_imported_wandb_leaves_no_temporary_folder(tmp_path: Path) -> None:
    code = (
        "import os, signal; from normlab.tracking.wandb import wandb_environment; print(wandb_environment().mode); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    variables = {**os.environ, "TMPDIR": str(tmp_path), "WANDB_MODE": "offline"}
    done = subprocess.run([sys.executable, "-uc", code], env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "offline\n"), done.stderr
    wait_for(lambda: not os.listdir(tmp_path))  # W&B's process, which ends with the other one, deletes its own
