"""Stop after the current step at the first SIGINT or SIGTERM, and at once at the second."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A context that stores the first signal in `received`, and restores the old handlers for the second.

    Python runs its handlers only between two of its own instructions. A second signal during a long call into torch
    therefore waits for the end of the call, except with `ends_process`: then the system ends the process, like a kill.
    Files stay intact, and the run resumes from its last checkpoint.

    Args:
        ends_process: Whether the second signal ends the process.
        only_first: Whether the process ignores SIGINT and SIGTERM after the first one.
    """

    def __init__(self, *, ends_process: bool = False, only_first: bool = False) -> None:
        self.received: int | None = None
        self._old_handlers: dict[int, Any] = {}
        self._second = signal.SIG_DFL if ends_process else signal.SIG_IGN if only_first else None

    def __enter__(self) -> StopRequest:
        """Install the handlers in the main thread, which receives all signals; else do nothing."""
        if threading.current_thread() is threading.main_thread():
            self._old_handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Restore the old handlers, unless they ignore further signals; a second call does nothing."""
        ignores = self.received is not None and self._second is signal.SIG_IGN
        for number, handler in self._old_handlers.items() if not ignores else ():
            signal.signal(number, handler)
        self._old_handlers = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for each, handler in self._old_handlers.items():
            signal.signal(each, handler if self._second is None else self._second)
