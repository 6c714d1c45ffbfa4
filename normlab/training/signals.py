"""Stop after the current step at the first SIGINT, SIGTERM or SIGHUP, and at once at the second SIGINT or SIGTERM.

A terminal that closes may send SIGHUP twice, so a SIGHUP after another signal is ignored. nohup lets
its command ignore SIGHUP, which then stays ignored. Before the first step, a signal ends the process with a message.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from normlab.base.errors import notify
from normlab.system.processes import STOP_SIGNALS, handled_stop_signals


class StopRequest:
    """A context that stores the first signal in `received`, and restores the old handlers for the second.

    Python runs its handlers only between two of its own instructions, so a signal during a call into torch waits for
    the end of the call.

    Args:
        ends_process: Whether the second signal ends the process, like a kill: files stay intact, and the run resumes
            from its last checkpoint.
        only_first: Whether the process ignores the stop signals after the first one.
    """

    def __init__(self, *, ends_process: bool = False, only_first: bool = False) -> None:
        self.received: int | None = None
        self._old_handlers: dict[int, Any] = {}
        self._ends_process, self._only_first = ends_process, only_first

    def __enter__(self) -> StopRequest:
        """Install the handlers in the main thread, which receives all signals; else do nothing."""
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in STOP_SIGNALS if not _is_ignored_hangup(number)]
            for number in handled:
                handler = signal.signal(number, self._handle)
                # The run has steps now, so a later signal must not print that it has none.
                if handler is _end_before_start:
                    handler = _default_handler(number)
                self._old_handlers[number] = handler
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Restore the old handlers, unless they ignore further signals; a second call does nothing."""
        ignores = self.received is not None and self._only_first
        if not ignores:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
        self._old_handlers = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:  # with `ends_process`
            if number == signal.SIGHUP:
                return
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = number
        if self._ends_process:  # this handler also receives the second signal
            return
        for later, handler in self._old_handlers.items():
            is_ignored = self._only_first or later == signal.SIGHUP
            signal.signal(later, signal.SIG_IGN if is_ignored else handler)


@contextmanager
def interruptible_start() -> Iterator[None]:
    """Print a line at a stop signal that comes before a `StopRequest` handles it; then the process ends as without.

    A signal that the process ignores stays ignored.
    """
    with handled_stop_signals(_end_before_start):
        yield


def _end_before_start(number: int, frame: FrameType | None) -> None:
    with suppress(OSError, RuntimeError, ValueError):  # the terminal is gone, or another line is being printed
        notify("interrupted before the first step: the same command starts the run")
    signal.signal(number, _default_handler(number))
    signal.raise_signal(number)


def _default_handler(number: int) -> Any:
    """Return Python's own handler: of SIGINT the one that raises KeyboardInterrupt, which deletes temporary files."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _is_ignored_hangup(number: int) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
