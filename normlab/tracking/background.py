"""A sink on a thread of its own, so that a run never waits for it longer than a few seconds.

What a sink's own timeouts do not bound (a process of its that is stopped, a disk that hangs) is bounded here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from normlab.stats.profiles import Profiles
from normlab.tracking.base import Row, Sink

WAIT_S = 9.0
"""Longest wait for the other sink to begin, and to end, in seconds."""
LAST_WAIT_S = 1.0
"""How long a sink that was cut off has to come to itself, or to its end."""
NO_ANSWER = "does not answer and is left alone"
MOST = 10_000
"""Intervals that may wait to be sent; beyond that the sink is given up."""


class Abandonable(Sink, Protocol):
    """A sink that can be cut off from what it waits for, by another thread than the one that uses it."""

    def cut_off(self) -> bool:
        """Make what its thread waits for fail at once; the sink says so. Whether it then tries another way."""
        ...

    def abandon(self, why: str) -> None:
        """Cut it off for good, and say `why`, once, unless it has come to its end."""
        ...

    def let_go(self) -> None:
        """After `abandon`, and from its own thread: leave nothing behind that the end of the process waits for."""
        ...


class Background:
    """Hands a run on to another sink, in order, from a thread of its own.

    `start` waits a little, so that what the sink says of its beginning comes before the first step, and then
    cuts the sink off from what it waits for; `log` and `look` never wait; `finish` waits a little, and then abandons
    it.

    Args:
        sink: Where everything goes. It is used from one thread only, and must not raise.
        name: What its thread is called.
    """

    def __init__(self, sink: Abandonable, name: str) -> None:
        self.sink = sink
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST)
        self._thread = threading.Thread(target=self._work, name=f"normlab {name}", daemon=True)
        self._begun = threading.Event()
        # Asked instead of the thread: a join that Ctrl-C interrupts may take it for ended.
        self._ended = threading.Event()
        self._ended.set()
        self._given_up = False

    def start(self, run: Mapping[str, Any], first_step: int) -> None:
        """A run begins; return when the sink has begun, or after `WAIT_S` and `LAST_WAIT_S` at most."""

        def begin() -> None:
            self.sink.start(run, first_step)
            self._begun.set()

        self._calls.put(begin)
        self._ended.clear()
        self._thread.start()
        if not self._begun.wait(WAIT_S):
            tries_on = self.sink.cut_off()
            if not self._begun.wait(LAST_WAIT_S) and not tries_on:
                self._give_up(NO_ANSWER)

    def log(self, rows: Sequence[Row]) -> None:
        """Rows, oldest first; return at once."""
        self._hand_on(lambda: self.sink.log(rows))

    def look(self, profiles: Profiles) -> None:
        """What was seen inside a measured step; return at once."""
        self._hand_on(lambda: self.sink.look(profiles))

    def _hand_on(self, call: Callable[[], None]) -> None:
        if self._given_up:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._give_up(NO_ANSWER)

    def finish(self, status: Mapping[str, Any]) -> None:
        """The run ends; return when the sink has ended, or after `WAIT_S` and `LAST_WAIT_S` at most."""
        if not self._given_up and not self._ended.is_set():
            with suppress(queue.Full):
                self._calls.put_nowait(lambda: self.sink.finish(status))
                self._calls.put_nowait(None)
            self._ended.wait(WAIT_S)
            self.abandon(NO_ANSWER)

    def abandon(self, why: str = "is not waited for") -> None:
        """The run ends now: leave the sink alone, unless it has ended; what it can still do takes `LAST_WAIT_S`."""
        if not self._given_up and not self._ended.is_set():
            self._give_up(why)
            self._ended.wait(LAST_WAIT_S)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and not self._given_up:
            call()
        if self._given_up:
            self.sink.let_go()
        self._ended.set()

    def _give_up(self, why: str) -> None:
        self._given_up = True
        self.sink.abandon(why)
        with suppress(queue.Full):  # wakes a thread that has nothing to do
            self._calls.put_nowait(None)
