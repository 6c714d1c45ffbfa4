"""A follower sends the runs that no other follower sends, and leaves a resumed run to the follower of its process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from normlab.config.compose import compose_run
from normlab.store.format import STATUS_FILE, with_checksum
from normlab.store.lock import file_lock, is_locked
from normlab.store.runs import RunFolder
from normlab.tracking import follower as follower_module
from normlab.tracking.background import Task, WandbState, lock_of
from normlab.tracking.follower import Follower, report
from normlab.training.run import train
from support.small_run import small_run


class RecordingService:
    """Records the steps and the state that it receives."""

    next_step, where = 0, ""

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
    lock = file_lock(lock_of(first.path, "online"), "the test")
    lock.__enter__()
    pauses: list[list[str]] = []

    def sleep(seconds: float) -> None:
        if len(pauses) == 2:
            lock.__exit__(None, None, None)
        pauses.append([service.path.name for service in services if service.ended])
        assert len(pauses) < 10

    follower.acquire()
    monkeypatch.setattr(follower_module.time, "sleep", sleep)
    follower.follow("online")
    assert pauses == [[second.path.name]] * 3
    assert [(service.path.name, service.ended) for service in services] == [
        (second.path.name, ["finished"]), (first.path.name, ["finished"]),
    ]  # fmt: skip
    follower.close()


def test_a_server_that_is_gone_at_the_end_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later run of a pack is not sent, and not called complete."""
    folders = [folder_of(tmp_path, f"seed={seed}") for seed in range(3)]

    def fail(self: object, summary: object, state: str) -> None:
        finished.append(state)
        raise TimeoutError("no answer")

    finished: list[str] = []
    monkeypatch.setattr(RecordingService, "finish", fail)
    WandbState(is_complete=True).write(folders[2].path)
    follower = Follower(Task(runs=[folder.path for folder in folders], service="online"))
    follower.follow("online")
    assert finished == ["finished"]
    for run in follower.runs:
        assert WandbState.read(run.folder.path) == WandbState(problem="TimeoutError: no answer")
    (line,) = report(follower.runs, "online")
    assert line.startswith("W&B did not receive all of 3 runs (TimeoutError: no answer); `normlab sync ")


def test_sync_leaves_a_run_to_the_follower_that_sends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path)
    follower = Follower(Task(runs=[folder.path], service="online", until_end=False))
    with file_lock(lock_of(folder.path, "online"), "the test"):
        follower.follow("online")
    assert "another process is sending it already" in capsys.readouterr().err
    assert not services
