"""Child processes and signals: start a module of normlab, call a program, end a process group, collect signals."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals after which training stops with a checkpoint: Ctrl-C, `kill`, and the end of the terminal."""


def start_module(module: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Start a module as a process that leads a session, so that Ctrl-C and a closed terminal do not end it.

    The options are those of `subprocess.Popen`.

    Raises:
        OSError: The system has no memory for another process.
    """
    # -P: a file in the current folder must not replace a module.
    return subprocess.Popen([sys.executable, "-P", "-m", module, *arguments], start_new_session=True, **options)


def call(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    """Return the result of a program; None if it does not exist or has not ended after some seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def kill_sessions(*leaders: int) -> None:
    """Send SIGKILL to the processes of the sessions that some processes lead."""
    for pid in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """Return the child processes that the main thread of a process has started; empty if it is gone."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@contextlib.contextmanager
def collected_signals() -> Iterator[list[int]]:
    """Yield a list that collects the stop signals, which do not end the process during a `with` block.

    A terminal that closes may send SIGHUP twice, so a SIGHUP after any other signal is not collected.
    """
    numbers: list[int] = []

    def collect(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP or not numbers:
            numbers.append(number)

    with handled_stop_signals(collect):
        yield numbers


@contextlib.contextmanager
def handled_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` at the stop signals that the process does not ignore, during a `with` block in the main thread."""
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            # A shell lets its background jobs ignore SIGINT, and nohup lets its command ignore SIGHUP.
            if signal.getsignal(number) is not signal.SIG_IGN:
                handlers[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in handlers.items():
            signal.signal(number, previous)
