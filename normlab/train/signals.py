"""SIGINT and SIGTERM as a request to stop at the next step boundary; the second one stops at once."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_S = 1.0
"""How long the second signal's own handler has to be heard."""


class StopRequest:
    """While entered, remembers the first signal in `received` and gives the handlers back for the second.

    Python runs a handler between two of its own instructions. In a long call into torch the second signal would
    wait for the call's end, and, where the first one waits there too, count as the same one. So a thread
    counts them as they come and, unless the second is heard within `PATIENCE_S`, ends the process as a kill would:
    what is written is whole, and the run goes on from its last checkpoint.

    Args:
        ends_process: Whether that may be done, the process being the run's own.
    """

    def __init__(self, *, ends_process: bool = False) -> None:
        self.received: int | None = None
        self._old: dict[int, Any] = {}
        self._ends_process = ends_process
        self._watch: _Watch | None = None

    def __enter__(self) -> StopRequest:
        """Take the handlers, in the main thread; elsewhere signals never arrive."""
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._note) for number in NUMBERS}
            self._watch = _Watch() if self._ends_process else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Give the handlers back, and count no more."""
        self.end()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}

    def end(self) -> None:
        """Give the handlers back, and count no more; once is enough."""
        self._give_back()
        if self._watch is not None:
            self._watch.end()
            self._watch = None


class _Watch:
    """Ends the process `PATIENCE_S` after the second signal, unless ended before."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        # Python's C handler writes a signal's number here the moment that it comes, whatever runs.
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        threading.Thread(target=self._count, name="normlab signals", daemon=True).start()

    def end(self) -> None:
        """Stand down; the thread closes what it reads."""
        self._ended.set()
        signal.set_wakeup_fd(self._before)
        os.close(self._writes)

    def _count(self) -> None:
        seen = 0
        with os.fdopen(self._reads, "rb", buffering=0) as coming:
            while number := coming.read(1):
                seen += number[0] in NUMBERS
                if seen == 2 and not self._ended.wait(PATIENCE_S):
                    line = "normlab: stopped inside a step: the same command goes on from the last checkpoint\n"
                    with suppress(OSError):
                        os.write(2, line.encode())
                    os._exit(128 + number[0])
