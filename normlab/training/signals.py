"""Stop after the current step at the first SIGINT or SIGTERM, and at once at the second."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 1.0
"""Seconds for the default handler of the second signal to end the process."""


class StopRequest:
    """A context that stores the first signal in `received` and restores the old handlers for the second.

    Python runs signal handlers only between two of its own instructions, so a second signal during a long call into
    torch waits for the end of the call. With `ends_process`, a thread counts signals as they arrive. If Python does not
    handle the second signal within `GRACE_S`, the thread ends the process, like a kill: files stay intact, and the run
    resumes from its last checkpoint.

    Args:
        ends_process: Whether the thread may end the process.
        only_first: Whether the process ignores SIGINT and SIGTERM after the first one.
    """

    def __init__(self, *, ends_process: bool = False, only_first: bool = False) -> None:
        self.received: int | None = None
        self._old_handlers: dict[int, Any] = {}
        self._ends_process, self._only_first = ends_process, only_first
        self._watch: _Watch | None = None

    def __enter__(self) -> StopRequest:
        """Install the handlers in the main thread, which receives all signals; else do nothing."""
        if threading.current_thread() is threading.main_thread():
            self._old_handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
            self._watch = _Watch() if self._ends_process else None
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the old handlers."""
        self.end()

    def end(self) -> None:
        """Restore the old handlers and stop the thread; a second call does nothing."""
        self._restore_handlers()
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore_handlers()
        if self._only_first:
            for other in SIGNALS:
                signal.signal(other, signal.SIG_IGN)

    def _restore_handlers(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers = {}


class _Watch:
    """A thread that ends the process `GRACE_S` after the second signal."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        # Python's C handler writes each signal number to this pipe at once, even during a call into torch.
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._old_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._count, name="normlab signals", daemon=True).start()

    def end(self) -> None:
        """Stop; the thread closes the pipe's read end."""
        self._ended.set()
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._write_end)

    def _count(self) -> None:
        count = 0
        with os.fdopen(self._read_end, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                count += number[0] in SIGNALS
                if count == 2 and not self._ended.wait(GRACE_S):
                    line = "normlab: stopped at once: the same command resumes from the last checkpoint\n"
                    with suppress(OSError):
                        os.write(2, line.encode())
                    os._exit(128 + number[0])
