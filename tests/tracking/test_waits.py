"""Waits for all W&B trackers of a process, with runs that never start or finish."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from normlab.config.schema import TrackingConfig
from normlab.store.status import Status
from normlab.tracking import wandb
from normlab.tracking.wandb import WandbTracker, abandon, wait_for_finish, wait_for_start


class Stuck(WandbTracker):
    """Starts or finishes only when W&B's process is killed; `calls` is shared by all."""

    def __init__(self, calls: list[str], killed: threading.Event, *, starts: bool, online: bool = True) -> None:
        super().__init__(TrackingConfig(), Path())
        self.calls, self.killed, self.starts, self.starts_online = calls, killed, starts, online

    def _start(self, run: Any, first_step: int) -> None:
        if not self.starts:
            self.killed.wait()

    def _finish(self, status: Any) -> None:
        self.killed.wait()

    def _warn(self, problem: str) -> None:
        self.calls.append(problem)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(wandb, "WAIT_S", 0.2)
    return []


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> Iterator[threading.Event]:
    event = threading.Event()
    monkeypatch.setattr(wandb, "kill_service", lambda: (calls.append("kill"), event.set()))
    yield event
    event.set()


def start(*trackers: Stuck) -> list[Stuck]:
    for tracker in trackers:
        tracker.start({}, 0)
    return [*trackers]


def test_pack_with_a_silent_server_waits_once(calls: list[str], killed: threading.Event) -> None:
    pack = start(*(Stuck(calls, killed, starts=False, online=number == 3) for number in range(4)))
    wait_for_start(pack)
    assert calls == ["kill"]
    assert wandb._SERVICE.refusal == "it does not answer"
    assert all(tracker.started.wait(20) for tracker in pack)
    abandon(pack)
    assert all(tracker.finished.wait(20) for tracker in pack)
    assert wandb._SERVICE.refusal == "", "the last tracker leaves nothing behind"


def test_slow_run_may_start_late_when_others_have_started(calls: list[str], killed: threading.Event) -> None:
    first, second = start(Stuck(calls, killed, starts=True), Stuck(calls, killed, starts=False))
    assert first.started.wait(20)
    wait_for_start([first, second])
    wait_for_start(start(Stuck(calls, killed, starts=False, online=False)))
    assert calls == [], "it does not wait for a server"


def test_pack_that_does_not_finish_is_abandoned(calls: list[str], killed: threading.Event) -> None:
    pack = start(*(Stuck(calls, killed, starts=True) for _ in range(4)))
    for tracker in pack:
        tracker.finish(Status())
    wait_for_finish(pack)
    assert calls[:5] == ["does not answer and is abandoned"] * 4 + ["kill"]
    assert all(tracker.finished.wait(20) for tracker in pack)
    finished = len(calls)
    abandon(pack)
    assert len(calls) == finished, "an abandoned tracker is not abandoned again"


def test_tracker_that_falls_too_far_behind_is_abandoned(
    calls: list[str], killed: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "MAX_CALLS", 2)
    (tracker,) = start(Stuck(calls, killed, starts=False))
    for _ in range(4):
        tracker.log([])
    assert calls[:2] == ["does not answer and is abandoned", "kill"]
    assert tracker.finished.wait(20)
