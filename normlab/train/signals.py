"""SIGINT and SIGTERM as a request to stop at the next step boundary; the second one stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """While entered, remembers the first signal in `received` and gives the handlers back for the second."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        """Take the handlers, in the main thread; elsewhere signals never arrive."""
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Give the handlers back."""
        self.end()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.end()

    def end(self) -> None:
        """Give the handlers back; once is enough."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}
