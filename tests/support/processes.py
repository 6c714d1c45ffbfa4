"""Helpers of the sweep tests: sweeps whose display records its calls, and functions that find processes."""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from normlab.config.compose import compose_sweep
from normlab.store.plans import Pack, Plan
from normlab.sweeps.files import PackOutcome
from normlab.sweeps.plan import make_plan
from normlab.sweeps.progress import ProgressDisplay
from normlab.sweeps.supervisor import Supervision, supervise
from normlab.system.processes import children_of as children_of


class RecordingDisplay(ProgressDisplay):
    """Records the calls of the supervisor, and calls `on_refresh` at each refresh."""

    def __init__(self, on_refresh: Callable[[], object] = lambda: None) -> None:
        self.events: list[Any] = []
        self.on_refresh = on_refresh

    def start(self, plan: Plan, left: int, failed: Collection[int]) -> None:
        self.events.append(("start", left, [*failed]))

    def pack_ended(self, pack: Pack, outcome: PackOutcome, halves: Sequence[Pack]) -> None:
        self.events.append((outcome.cause, outcome.pack, [half.number for half in halves]))

    def refresh(self) -> None:
        self.on_refresh()

    def print(self, line: str) -> None:
        self.events.append(line)


def run_sweep(
    overrides: Sequence[str], on_refresh: Callable[[], object] = lambda: None, *, retry_failed: bool = False
) -> tuple[Supervision, list[Any], Path]:
    """Run a sweep; return its result, the calls of its display, and its folder."""
    options, composed = compose_sweep(overrides)
    planned, display = make_plan(options, composed), RecordingDisplay(on_refresh)
    result = supervise(planned, options, display, retry_failed=retry_failed)
    return result, display.events, planned.folder


def wait_for(condition: Callable[[], bool], seconds: float = 180) -> None:
    """Wait until a condition holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def workers_of(folder: Path) -> list[int]:
    """Return the worker processes whose command line names a sweep's folder."""
    return [pid for pid, _ in _workers(folder)]


def worker_of(folder: Path, pack: int) -> int:
    """Return the worker process that trains a pack of a sweep."""
    (pid,) = (pid for pid, number in _workers(folder) if number == pack)
    return pid


def _workers(folder: Path) -> list[tuple[int, int]]:
    """Return the worker processes of a sweep, each with the number of its latest pack, whose log it writes."""
    workers = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() if entry.name.isdecimal() else b""
        except OSError:
            continue
        if b"normlab.sweeps.worker" in line and os.fsencode(folder) in line:
            with contextlib.suppress(OSError):  # it has ended
                log = (entry / "fd" / "2").readlink().name
                workers.append((int(entry.name), int(log.removeprefix("pack_").partition(".")[0])))
    return workers
