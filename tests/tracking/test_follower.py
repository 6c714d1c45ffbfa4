"""A follower sends the runs that no other follower sends, until they end, and gives up or tries again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normlab.config.compose import compose_run
from normlab.store.format import STATUS_FILE, with_checksum
from normlab.store.lock import file_lock, is_locked
from normlab.store.runs import RunFolder
from normlab.tracking import follower as follower_module
from normlab.tracking.background import FollowerTask
from normlab.tracking.follower import Follower
from normlab.tracking.uploads import Upload, lock_of, upload_lines
from normlab.training.start import train
from support.small_run import small_run


class RecordingService:
    """Records the steps and the state that it receives."""

    next_step, upload = 0, Upload(where="http://x")

    def __init__(self, path: Path, *_: object, **__: object) -> None:
        self.path = path
        self.steps: list[int] = []
        self.ended: list[str] = []
        services.append(self)

    def log(self, step: int, payload: object) -> None:
        self.steps.append(step)
        self.next_step = step + 1

    def finish(self, summary: object, state: str) -> None:
        assert is_locked(lock_of(self.path))
        self.ended.append(state)


services: list[RecordingService] = []


@pytest.fixture(autouse=True)
def _service(monkeypatch: pytest.MonkeyPatch) -> None:
    services.clear()
    monkeypatch.setattr(follower_module, "WandbRun", RecordingService)
    monkeypatch.setattr(follower_module, "restart_client", lambda: None)


def folder_of(results: Path, *overrides: str) -> RunFolder:
    return train(compose_run([*small_run(results), "train.steps=4", *overrides]), trackers=[]).folder


def on_pause(monkeypatch: pytest.MonkeyPatch, number: int, call: Callable[[], object]) -> list[float]:
    """Call a function in the pause of this number, from 1, and return the list of all pauses, in seconds."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        assert len(pauses) < 10
        if len(pauses) == number:
            call()

    monkeypatch.setattr(follower_module.time, "sleep", sleep)
    return pauses


def test_a_run_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path)
    end: dict[str, Any] = folder.status()
    (folder.path / STATUS_FILE).write_bytes(with_checksum(end | {"state": "running"}))
    lock = folder.lock()
    lock.__enter__()

    def finish() -> None:
        assert (services[0].steps, services[0].ended) == ([0, 1, 2, 3], [])
        (folder.path / STATUS_FILE).write_bytes(with_checksum(end))
        lock.__exit__(None, None, None)

    on_pause(monkeypatch, 2, finish)
    Follower(FollowerTask(runs=[folder.path], mode="online"), "online").follow()
    assert [(service.steps, service.ended) for service in services] == [([0, 1, 2, 3, 4], ["finished"])]
    assert not is_locked(lock_of(folder.path))
    assert upload_lines([folder.path], ["x"]) == ["W&B: http://x"]


def test_a_run_of_a_pack_does_not_wait_for_the_follower_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = folder_of(tmp_path, "seed=0"), folder_of(tmp_path, "seed=1")
    lock = file_lock(lock_of(first.path), "the test")
    lock.__enter__()
    on_pause(monkeypatch, 3, lambda: lock.__exit__(None, None, None))
    Follower(FollowerTask(runs=[first.path, second.path], mode="online"), "online").follow()
    assert [(service.path.name, service.ended) for service in services] == [
        (second.path.name, ["finished"]), (first.path.name, ["finished"]),
    ]  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(("problem", "attempts"), [("no answer", 2), ("{} was deleted", 3)])
def test_a_server_that_is_gone_at_the_end_is_tried_twice(
    problem: str, attempts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A problem of one run is none of the others."""
    folders = [folder_of(tmp_path, f"seed={seed}") for seed in range(3)]

    def fail(self: RecordingService, summary: object, state: str) -> None:
        finished.append(state)
        raise TimeoutError(problem.format(self.path.name))

    finished: list[str] = []
    monkeypatch.setattr(RecordingService, "finish", fail)
    monkeypatch.setattr(follower_module, "GIVE_UP_S", -1.0)
    on_pause(monkeypatch, 0, lambda: None)
    Follower(FollowerTask(runs=[folder.path for folder in folders], mode="online"), "online").follow()
    assert finished == ["finished"] * attempts
    text = f"TimeoutError: {problem.format(folders[0].path.name)}"
    assert upload_lines([folder.path for folder in folders], ["x"]) == [
        f"W&B lacks data of 3 runs ({text}); `normlab sync x` sends what is missing"
    ]


def test_a_server_that_is_gone_for_a_while_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path)

    def fail(self: object, summary: object, state: str) -> None:
        raise ConnectionError

    monkeypatch.setattr(follower_module, "RETRY_S", 0.0)
    monkeypatch.setattr(follower_module, "LONGEST_RETRY_S", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(RecordingService, "finish", fail)
        on_pause(monkeypatch, 2, patched.undo)
        Follower(FollowerTask(runs=[folder.path], mode="online"), "online").follow()
    assert [service.ended for service in services] == [[], [], ["finished"]]


def test_sync_leaves_a_run_to_the_follower_that_sends_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    with file_lock(lock_of(folder.path), "the test"):
        Follower(FollowerTask(runs=[folder.path], mode="online", until_end=False), "online").follow()
        (line,) = upload_lines([folder.path], ["x"])
    assert line.startswith("W&B: sending 1 run continues in the background; if it fails, `normlab sync x`")
    assert not services
