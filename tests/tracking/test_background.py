"""Waits for all W&B sinks of a process, with sinks that never start or finish."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from normlab.tracking import background
from normlab.tracking.background import Background, abandon, wait_for_finish, wait_for_start
from normlab.tracking.wandb import WandbSink


class Stuck:
    """Starts or finishes only when W&B's process is killed; `calls` is shared by all."""

    def __init__(self, calls: list[str], killed: threading.Event, *, starts: bool, online: bool = True) -> None:
        self.calls, self.killed, self.starts, self.online = calls, killed, starts, online

    def start(self, run: Any, first_step: int) -> None:
        if not self.starts:
            self.killed.wait()

    def finish(self, status: Any) -> None:
        self.killed.wait()

    def cut_off(self) -> bool:
        self.calls.append("cut off")
        return self.online

    def abandon(self, why: str) -> None:
        self.calls.append(why)

    def release(self) -> None:
        self.calls.append("release")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(background, "WAIT_S", 0.2)
    return []


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> Iterator[threading.Event]:
    event = threading.Event()
    monkeypatch.setattr(background, "end_service", lambda: (calls.append("kill"), event.set()))
    yield event
    event.set()


def start_sinks(*sinks: Stuck) -> list[Background]:
    made = [Background(cast("WandbSink", sink)) for sink in sinks]
    for sink in made:
        sink.start({}, 0)
    return made


def test_pack_with_a_silent_server_waits_once(calls: list[str], killed: threading.Event) -> None:
    pack = start_sinks(*(Stuck(calls, killed, starts=False, online=number == 3) for number in range(4)))
    wait_for_start(pack)
    assert calls == ["cut off"] * 4 + ["kill"]
    assert all(sink.started.wait(20) for sink in pack)


def test_slow_sink_may_start_late_when_others_have_started(calls: list[str], killed: threading.Event) -> None:
    first, second = start_sinks(Stuck(calls, killed, starts=True), Stuck(calls, killed, starts=False))
    assert first.started.wait(20)
    wait_for_start([first, second])
    assert calls == []
    wait_for_start(start_sinks(Stuck(calls, killed, starts=False, online=False)))
    assert calls == ["cut off"], "it does not wait for a server"


def test_pack_that_does_not_finish_is_abandoned(calls: list[str], killed: threading.Event) -> None:
    pack = start_sinks(*(Stuck(calls, killed, starts=True) for _ in range(4)))
    for sink in pack:
        sink.finish({})
    wait_for_finish(pack)
    assert calls[:5] == ["does not answer and is abandoned"] * 4 + ["kill"]
    assert all(sink.finished.wait(20) for sink in pack)
    assert calls[5:] == ["release"] * 4
    abandon(pack)
    assert len(calls) == 9, "an abandoned sink is not abandoned again"
