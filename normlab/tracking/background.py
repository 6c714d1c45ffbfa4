"""A sink on a thread of its own, so that a run never waits for it longer than a few seconds.

What a sink's own timeouts do not bound (a process of its that is stopped, a disk that hangs) is bounded here.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from normlab.tracking.base import Row, Sink

WAIT_S = 9.0
"""Longest wait for the other sink to begin, and to end, in seconds."""
LAST_WAIT_S = 1.0
"""How long an abandoned sink has to come to its end."""
MOST = 10_000
"""Intervals that may wait to be sent; beyond that the sink is given up."""


class Abandonable(Sink, Protocol):
    """A sink that can be cut off from what it waits for."""

    def abandon(self) -> None:
        """Make whatever another thread waits for in this sink come to an end. Called from outside that thread."""
        ...


class Background:
    """Hands a run on to another sink, in order, from a thread of its own.

    `start` waits a little, so that what the sink says of its beginning comes before the first step; `log`
    never waits; `finish` waits a little, and then abandons the sink.

    Args:
        sink: Where everything goes. It is used from one thread only, and must not raise.
        name: What it is called in a message.
    """

    def __init__(self, sink: Abandonable, name: str) -> None:
        self.sink, self._name = sink, name
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST)
        self._thread = threading.Thread(target=self._work, name=f"normlab {name}", daemon=True)
        self._given_up = False

    def start(self, run: Mapping[str, Any], first_step: int) -> None:
        """A run begins; return when the sink has begun, or after `WAIT_S`."""
        begun = threading.Event()

        def begin() -> None:
            self.sink.start(run, first_step)
            begun.set()

        self._calls.put(begin)
        self._thread.start()
        begun.wait(WAIT_S)

    def log(self, rows: Sequence[Row]) -> None:
        """Rows, oldest first; return at once."""
        if self._given_up:
            return
        try:
            self._calls.put_nowait(lambda: self.sink.log(rows))
        except queue.Full:
            self._give_up()

    def finish(self, status: Mapping[str, Any]) -> None:
        """The run ends; return when the sink has ended, or after `WAIT_S` and `LAST_WAIT_S` at most."""
        if not self._given_up and self._thread.is_alive():
            with suppress(queue.Full):
                self._calls.put_nowait(lambda: self.sink.finish(status))
                self._calls.put_nowait(None)
            self._thread.join(WAIT_S)
            if self._thread.is_alive():
                self._give_up()
                self._thread.join(LAST_WAIT_S)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._given_up:
                call()

    def _give_up(self) -> None:
        self._given_up = True
        with suppress(OSError, ValueError):
            print(f"normlab: {self._name} does not answer and is left alone", file=sys.stderr)
        self.sink.abandon()
        with suppress(queue.Full):  # the thread may go on to its end
            self._calls.put_nowait(None)
