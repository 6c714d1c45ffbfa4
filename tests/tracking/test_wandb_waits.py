"""Waits for all W&B trackers of a process, with an imitation of W&B whose process hangs until it is killed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normlab.config.schema import TrackingConfig
from normlab.store.status import Status
from normlab.tracking import wandb
from normlab.tracking.wandb import WandbTracker, abandon, wait_for_finish, wait_for_start
from normlab.tracking.wandb_service import SETTINGS
from support.wandb_runs import RUN


class ImitatedWandb:
    """The functions of the module `wandb` that a tracker calls; online, `init` hangs unless `starts`."""

    def __init__(self) -> None:
        self.modes: list[str] = []
        """Of each call of `init`."""
        self.kills = 0
        self.starts = lambda run_id: True
        self.killed = threading.Event()
        self.Settings = type("Settings", (SimpleNamespace,), {"model_fields": {}})

    def setup(self, settings: Any) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(mode="online", base_url="https://wandb.test", api_key="a"))

    def init(self, *, mode: str, id: str, **options: Any) -> Any:
        self.modes.append(mode)
        if mode == "online" and not self.starts(id):
            self.hang()

        def finish(exit_code: int) -> None:
            if mode == "online":
                self.hang()

        settings = SimpleNamespace(sync_dir=f"wandb/{id}")
        return SimpleNamespace(
            offline=mode == "offline", settings=settings, summary={}, finish=finish, define_metric=lambda *_, **__: None
        )  # fmt: skip

    def teardown(self) -> None:
        pass

    def hang(self) -> None:
        self.killed.wait()
        raise ConnectionError("W&B's process was killed")

    def kill(self) -> None:
        self.kills += 1
        self.killed.set()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[ImitatedWandb]:
    imitated = ImitatedWandb()
    monkeypatch.setitem(sys.modules, "wandb", imitated)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(wandb, "kill_service", imitated.kill)
    monkeypatch.setattr(wandb, "WAIT_S", 0.2)
    for variable in ("WANDB_RUN_ID", "WANDB_SWEEP_ID"):
        monkeypatch.delenv(variable, raising=False)
    yield imitated
    imitated.killed.set()


@pytest.fixture
def start(service: ImitatedWandb, tmp_path: Path) -> Iterator[Callable[..., list[WandbTracker]]]:
    started: list[WandbTracker] = []

    def start(*run_ids: str, mode: str = "online") -> list[WandbTracker]:
        trackers = [WandbTracker(TrackingConfig(wandb=mode), tmp_path / run_id) for run_id in run_ids]
        for run_id, tracker in zip(run_ids, trackers, strict=True):
            tracker.start(RUN | {"run_id": run_id}, 0)
        started.extend(trackers)
        return trackers

    yield start
    service.kill()
    abandon(started)
    assert all(tracker.finished.wait(20) for tracker in started)


def warnings(capsys: pytest.CaptureFixture[str], text: str) -> int:
    """Return how many lines contain the text; every line names the local record."""
    lines = capsys.readouterr().err.splitlines()
    assert all("The local record has everything" in line for line in lines)
    return sum(text in line for line in lines)


def test_pack_with_a_silent_server_waits_once(
    service: ImitatedWandb, start: Callable[..., list[WandbTracker]], capsys: pytest.CaptureFixture[str]
) -> None:
    service.starts = lambda run_id: False
    began = time.monotonic()
    pack = start("a", "b", "c", "d")
    wait_for_start(pack)
    assert time.monotonic() - began >= 0.2
    assert all(tracker.started.wait(20) for tracker in pack)
    assert service.modes == ["online", "offline", "offline", "offline", "offline"], "one run asks the server"
    assert warnings(capsys, "continues offline: it does not answer") == 4
    abandon(pack)
    assert all(tracker.finished.wait(20) for tracker in pack)
    (later,) = start("later")
    assert later.started.wait(20)
    assert service.modes[5] == "online", "the last tracker of a pack leaves nothing behind"


def test_slow_run_may_start_late_when_others_have_started(
    service: ImitatedWandb, start: Callable[..., list[WandbTracker]]
) -> None:
    service.starts = lambda run_id: run_id == "first"
    (first,) = start("first")
    assert first.started.wait(20)
    (second,) = start("second")
    wait_for_start([first, second])
    assert not second.started.is_set()
    wait_for_start(start("offline", mode="offline"))  # W&B's process is slow, and not its server
    assert service.kills == 0


def test_pack_that_does_not_finish_is_abandoned(
    service: ImitatedWandb, start: Callable[..., list[WandbTracker]], capsys: pytest.CaptureFixture[str]
) -> None:
    pack = start("a", "b", "c", "d")
    wait_for_start(pack)
    for tracker in pack:
        tracker.finish(Status(state="finished"))
    assert service.kills == 0
    wait_for_finish(pack)
    assert all(tracker.finished.wait(20) for tracker in pack)
    assert warnings(capsys, "did not answer and was stopped") == 4
    abandon(pack)
    assert capsys.readouterr().err == "", "an abandoned tracker is not abandoned again"


def test_tracker_that_falls_too_far_behind_is_abandoned(
    service: ImitatedWandb,
    start: Callable[..., list[WandbTracker]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(wandb, "MAX_CALLS", 2)
    service.starts = lambda run_id: False
    (tracker,) = start("a")
    for _ in range(4):
        tracker.log([])
    assert warnings(capsys, "did not answer and was stopped") == 1
    assert service.kills > 0
    assert tracker.finished.wait(20)


def test_waits_are_ten_seconds_at_most() -> None:
    assert wandb.WAIT_S + wandb.LAST_WAIT_S <= 10
    assert SETTINGS["init_timeout"] > wandb.WAIT_S, "W&B's own timeout would come first"
