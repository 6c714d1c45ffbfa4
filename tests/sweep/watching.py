"""What the tests of sweeps share: a supervisor's silent watcher, and a look at processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from normlab.store.plans import End, Pack, Plan


class Silent:
    """A watcher that notes what it is told, and does something at each look."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.told: list[Any] = []
        self.look = act

    def begin(self, plan: Plan, waiting: Sequence[Pack], done: int, failed: Sequence[End]) -> None:
        self.told.append(("begin", [pack.number for pack in waiting], done, [end.pack for end in failed]))

    def started(self, pack: Pack) -> None:
        self.told.append(("started", pack.number))

    def ended(self, pack: Pack, end: End, halves: Sequence[Pack]) -> None:
        self.told.append((end.cause, pack.number, [half.number for half in halves]))

    def say(self, line: str) -> None:
        self.told.append(line)

    def finish(self) -> None:
        self.told.append("finish")


def wait_for(holds: Callable[[], bool], seconds: float = 180) -> None:
    """Until something holds; an error if it takes too long."""
    since = time.monotonic()
    while not holds():
        assert time.monotonic() - since < seconds
        time.sleep(0.2)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers_of(folder: Path) -> list[int]:
    """The processes whose command line names a sweep's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() if entry.name.isdecimal() else b""
        except OSError:
            continue
        if b"normlab.sweep.worker" in line and os.fsencode(folder) in line:
            found.append(int(entry.name))
    return found
