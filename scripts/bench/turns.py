"""Processes that take turns: while one works, the others wait, so that all sides meet the same load.

A `Side` is a process; its work calls `pause()` at the end of each turn and never returns. The first pause ends the
set-up. A turn ends when the device has computed what was queued in it.
"""

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of a side took."""

    seconds: float
    cpu_seconds: float
    """Processor seconds of all threads; they hardly depend on other processes."""
    peak_bytes: int | None
    """Largest memory that torch has allocated on the GPU so far; None on a CPU."""


class SideError(Exception):
    """The work of a side failed; the message ends with its error."""


class Pause:
    """Ends a turn, and waits until the next one starts."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._start()

    def _start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def __call__(self) -> None:
        """End the turn, and return when the next one starts."""
        peak_bytes = None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            peak_bytes = torch.cuda.max_memory_allocated()
        self._pipe.send(Turn(time.perf_counter() - self._wall, time.process_time() - self._cpu, peak_bytes))
        try:
            self._pipe.recv()
        except EOFError:  # the side is stopped; what the work leaves unfinished is in a temporary folder
            os._exit(0)
        self._start()


Work = Callable[[Pause, Path], object]
"""Works in turns, and may write into a temporary folder."""


class Side:
    """A process that works in turns.

    Args:
        name: What the table calls it.
        work: The work; it must be possible to pickle it.
        environment: Additional environment variables of the process.
        fork: Whether to fork this process, so that the other one imports nothing again. Libraries keep the environment
            that they were loaded with, and a process that has used CUDA cannot be forked.
    """

    def __init__(
        self, name: str, work: Work, environment: Mapping[str, str] | None = None, *, fork: bool = False
    ) -> None:
        self.name = name
        self.turns: list[Turn] = []
        self.setup_s = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="normlab-bench-", ignore_cleanup_errors=True)
        context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, work, self._folder.name), daemon=True)
        before = dict(os.environ)
        os.environ.update(environment or {})
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        child.close()

    def wait(self, timeout_s: float | None = None) -> Turn:
        """Return the set-up or the turn that was started last.

        Raises:
            SideError: The work failed, or did not end in time.
        """
        try:
            if not self._pipe.poll(timeout_s):
                raise SideError("not done in time")
            result = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise SideError(f"the process ended with exit code {self._process.exitcode}") from None
        if isinstance(result, str):
            raise SideError(result)
        return result

    def set_up(self, timeout_s: float | None = None) -> None:
        self.setup_s = self.wait(timeout_s).seconds

    def start_turn(self) -> None:
        self._pipe.send(True)

    def turn(self) -> None:
        self.start_turn()
        self.turns.append(self.wait())

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._folder.cleanup()


def take_turns(sides: Sequence[Side], rounds: int) -> None:
    for number in range(rounds):
        first = number % len(sides)
        for side in (*sides[first:], *sides[:first]):
            side.turn()


def _serve(pipe: Connection, work: Work, folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that takes the measurements stops this one
    try:
        work(Pause(pipe), Path(folder))
    except BaseException as error:
        lines = "".join(traceback.format_exception(error)).splitlines()
        pipe.send("\n".join(lines[-12:]))


def shorten(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, list):
        return "-".join(map(shorten, value))
    return "" if value is None else " ".join(str(value).splitlines()[-1:])[:300]


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | None = None) -> str:
    """Return rows as a table in Markdown; `columns` maps keys to titles, and leaves out what no row has."""
    columns = columns or {key: key for row in rows for key in row}
    used = {key: title for key, title in columns.items() if any(row.get(key) is not None for row in rows)}
    lines = [[*used.values()], ["---"] * len(used), *([shorten(row.get(key)) for key in used] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
