"""Run W&B sinks on threads of their own, so that training waits for them at most a few seconds.

The runs of a pack share one W&B process, one wait at the start and one at the end. W&B's own timeouts do not bound
everything (a stopped process, a disk that hangs), so a sink that exceeds the wait is cut off here.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from normlab.stats.profiles import Profiles
from normlab.tracking.base import Row
from normlab.tracking.wandb import WandbSink, end_service

WAIT_S = 9.0
"""Longest wait for all sinks of a process to start, and to finish, in seconds."""
LAST_WAIT_S = 1.0
"""Longest further wait, in seconds, once W&B's process has been killed."""
NO_ANSWER = "does not answer and is abandoned"
MAX_CALLS = 10_000
"""Most calls that wait for a sink; a sink that falls further behind is abandoned."""


class Background:
    """Passes every call to a sink, in order, on a separate thread; no call waits.

    `wait_for_start` and `wait_for_finish` wait for all sinks of a process together.

    Args:
        sink: Used from one thread only; must not raise.
    """

    def __init__(self, sink: WandbSink) -> None:
        self.sink = sink
        self.started = threading.Event()
        # Waited for instead of the thread: a join that Ctrl-C interrupts may return before the thread has ended.
        self.finished = threading.Event()
        self.finished.set()
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_CALLS)
        self._thread = threading.Thread(target=self._work, name="normlab W&B", daemon=True)
        self._abandoned = False

    def start(self, run: Mapping[str, Any], first_step: int) -> None:
        """Start the sink."""

        def start() -> None:
            self.sink.start(run, first_step)
            self.started.set()

        self._calls.put(start)
        self.finished.clear()
        self._thread.start()

    def log(self, rows: Sequence[Row]) -> None:
        """Pass on rows, oldest first."""
        self._enqueue(lambda: self.sink.log(rows))

    def log_statistics(self, profiles: Profiles) -> None:
        """Pass on the statistics of a measured step."""
        self._enqueue(lambda: self.sink.log_statistics(profiles))

    def finish(self, status: Mapping[str, Any]) -> None:
        """Finish the sink, with the content of status.json."""
        self._enqueue(lambda: self.sink.finish(status))
        self._enqueue(None)

    @property
    def is_active(self) -> bool:
        """Whether the sink has neither finished nor been abandoned."""
        return not (self._abandoned or self.finished.is_set())

    def abandon(self, why: str) -> None:
        """Drop all waiting calls. The caller then kills W&B's process, so that the thread ends."""
        self._abandoned = True
        self.sink.abandon(why)
        with suppress(queue.Full):  # wakes a thread that waits for a call
            self._calls.put_nowait(None)

    def _enqueue(self, call: Callable[[], None] | None) -> None:
        if self._abandoned:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            abandon([self], NO_ANSWER, wait_s=0)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and not self._abandoned:
            call()
        if self._abandoned:
            self.sink.release()
        self.finished.set()


def wait_for_start(sinks: Sequence[Background]) -> None:
    """Return when all sinks have started, or after `WAIT_S` and `LAST_WAIT_S` at most.

    If no sink has started and one waits for the server, kill W&B's process; all then start offline. If some have
    started, the server answers: the others continue to start in the background, within W&B's own timeouts.
    """
    started = [sink.started for sink in sinks]
    if _wait(started, WAIT_S) == len(sinks) and any(sink.sink.cut_off() for sink in sinks):
        end_service()
        _wait(started, LAST_WAIT_S)


def wait_for_finish(sinks: Sequence[Background]) -> None:
    """Return when all sinks have finished, or after `WAIT_S` and `LAST_WAIT_S` at most; abandon the others."""
    _wait([sink.finished for sink in sinks if sink.is_active], WAIT_S)
    abandon(sinks, NO_ANSWER)


def abandon(sinks: Sequence[Background], why: str = "is not waited for", *, wait_s: float = LAST_WAIT_S) -> None:
    """Abandon the sinks that have not finished, kill W&B's process, and give their threads `wait_s` to end."""
    active = [sink for sink in sinks if sink.is_active]
    for sink in active:
        sink.abandon(why)
    if active:
        end_service()
        _wait([sink.finished for sink in active], wait_s)


def _wait(events: Sequence[threading.Event], seconds: float) -> int:
    """Wait for all events, `seconds` in all; return how many are missing."""
    deadline = time.monotonic() + seconds
    return sum(not event.wait(max(0.0, deadline - time.monotonic())) for event in events)
