"""The supervisor of a sweep on this machine: one process a pack, a few at once, each with its own end.

Whatever happens to a process ends its pack alone and is written down, once, in the sweep's folder. What the same
command does again follows from there: packs that failed wait for `--retry-failed`, all others that are not done go on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from normlab.errors import StoreError
from normlab.store.files import refusal, sweep_temporaries
from normlab.store.lock import hold
from normlab.store.plans import (
    FAILURES,
    HUNG,
    INTERRUPTED,
    MEMORY,
    End,
    Pack,
    Plan,
    append_end,
    has_plan,
    lock_of,
    read_ends,
    read_plan,
    run_of,
    write_plan,
)  # fmt: skip
from normlab.sweep.ends import end_of
from normlab.sweep.options import SweepOptions
from normlab.sweep.plan import has_ended, plan_there
from normlab.sweep.process import Worker

LOOK_EVERY_S = 0.1
"""Seconds between two looks at the processes."""
PATIENCE_S = 30.0
"""How long a run that is asked to stop may take to its checkpoint."""
PATIENCE_WITH_HUNG_S = 5.0
"""As much for one that has shown no sign of life."""


class Watcher(Protocol):
    """Is told how the sweep goes."""

    def begin(self, plan: Plan, waiting: Sequence[Pack], done: int, failed: Sequence[End]) -> None:
        """It begins: what is to be trained, how many packs are done already, and which failed before and stay."""
        ...

    def started(self, worker: Worker) -> None:
        """A pack's process was started."""
        ...

    def ended(self, pack: Pack, end: End, halves: Sequence[Pack]) -> None:
        """A pack's process ended; the halves go on where it ran out of memory."""
        ...

    def look(self) -> None:
        """Some time has passed."""
        ...

    def say(self, line: str) -> None:
        """Something is to be known."""
        ...

    def finish(self) -> None:
        """Nothing runs any more."""
        ...


@dataclass(slots=True)
class Outcome:
    """How a call of `supervise` ended."""

    plan: Plan
    """As it is now."""
    failed: dict[int, End]
    """The packs that have failed, now or before, and why."""
    signal: int | None = None
    """The signal that stopped it."""

    @property
    def code(self) -> int:
        """The command's exit code: 0 where nothing failed, 1 where something did, 128 + n after signal n."""
        return 128 + self.signal if self.signal else int(bool(self.failed))


def supervise(
    folder: Path, plan: Plan, options: SweepOptions, watcher: Watcher, *, retry_failed: bool = False
) -> Outcome:
    """Train what is left of a sweep, and say how it ended.

    Args:
        folder: The sweep's; it is made.
        plan: What the words made; the plan that is there already, if there is one, is the one that counts.
        options: How many at once, and how long they may be silent.
        watcher: Is told how it goes.
        retry_failed: Whether packs that failed before are tried again.

    Raises:
        ConfigError: The plan that is there is another sweep's.
        StoreError: Another process supervises the sweep, or the system refuses its files.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal(folder, "made", error) from error
    with hold(lock_of(folder), f"sweep {plan.name}", beside="another sweep.name"):
        sweep_temporaries(folder)
        if has_plan(folder):
            plan = plan_there(folder, plan)  # it may have been begun, or halved, since it was looked at
        if not has_plan(folder) or plan != read_plan(folder):
            write_plan(folder, plan)
        return _Supervisor(folder, plan, options, watcher).run(retry_failed)


@dataclass(slots=True)
class _Supervisor:
    folder: Path
    plan: Plan
    options: SweepOptions
    watcher: Watcher
    workers: list[Worker] = field(default_factory=list)
    waiting: list[Pack] = field(default_factory=list)
    failed: dict[int, End] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)

    def run(self, retry_failed: bool) -> Outcome:
        """See every pack through that is to be trained now."""
        last = {end.pack: end for end in read_ends(self.folder)}
        self._recover(last)
        left = [pack for pack in self.plan.packs if not self._is_done(pack)]
        if not retry_failed:
            self.failed = {pack.number: last[pack.number] for pack in left if _failed(last.get(pack.number))}
        self.waiting = [pack for pack in left if pack.number not in self.failed]
        self.watcher.begin(self.plan, self.waiting, len(self.plan.packs) - len(left), list(self.failed.values()))
        try:
            with _noting_signals(self.signals):
                while self.workers or (self.waiting and not self.signals):
                    self._heed_signals()
                    self._fill()
                    for worker in list(self.workers):
                        self._watch(worker)
                    self.watcher.look()
                    time.sleep(LOOK_EVERY_S)
        finally:
            for worker in self.workers:  # only where something went wrong here
                worker.let_go()
            self.watcher.finish()
        return Outcome(self.plan, self.failed, self.signals[0] if self.signals else None)

    def _recover(self, last: dict[int, End]) -> None:
        """Halve what ran out of memory just before the supervisor was killed."""
        for pack in list(self.plan.packs):
            end = last.get(pack.number)
            if end is not None and end.cause == MEMORY and len(pack.jobs) > 1 and not self._is_done(pack):
                self._halve(pack)

    def _fill(self) -> None:
        """Start what may run beside what runs."""
        while self.waiting and not self.signals and len(self.workers) < self.options.jobs:
            threads = None if self.options.jobs == 1 else max(1, (os.cpu_count() or 1) // self.options.jobs)
            worker = Worker(self.folder, self.plan, self.waiting.pop(0), threads)
            self.workers.append(worker)
            self.watcher.started(worker)

    def _watch(self, worker: Worker) -> None:
        if worker.ended():
            self.workers.remove(worker)
            self._take_note(worker)
            return
        worker.insist()
        if worker.told is None and (silent := worker.silent_for()) > 60 * self.options.timeout_minutes:
            minutes = f"{self.options.timeout_minutes:.3g} minutes"
            worker.stop(
                HUNG, PATIENCE_WITH_HUNG_S, f"no sign of life for {silent:.0f} s, of {minutes} that it may take"
            )

    def _take_note(self, worker: Worker) -> None:
        pack = worker.pack
        end = end_of(worker, all_ended=self._is_done(pack))
        append_end(self.folder, end)
        halves: list[Pack] = []
        if end.cause == MEMORY and len(pack.jobs) > 1:
            halves = self._halve(pack)
            self.waiting[:0] = halves
        elif end.cause in FAILURES:
            self.failed[pack.number] = end
        self.watcher.ended(pack, end, halves)

    def _halve(self, pack: Pack) -> list[Pack]:
        plan = self.plan.halved(pack)
        write_plan(self.folder, plan)
        self.plan = plan
        return [one for one in plan.packs if one.halved_from == pack.number]

    def _is_done(self, pack: Pack) -> bool:
        try:
            return all(has_ended(run_of(self.folder, job)) for job in self.plan.members(pack))
        except StoreError:
            return False  # a damaged record is named by the process that is to go on with it

    def _heed_signals(self) -> None:
        """Once: the packs are asked to stop. Twice: they are killed."""
        asked = [worker for worker in self.workers if worker.told is None] if self.signals else []
        if asked:
            self.watcher.say("stopping: the runs write their checkpoints (again to end them at once)")
        for worker in asked:
            worker.stop(INTERRUPTED, PATIENCE_S)
        for worker in self.workers if len(self.signals) > 1 else ():
            worker.kill(INTERRUPTED)


def _failed(end: End | None) -> bool:
    return end is not None and end.cause in FAILURES


@contextmanager
def _noting_signals(received: list[int]) -> Iterator[None]:
    """Keep SIGINT and SIGTERM in a list as they come; in the main thread, elsewhere they never arrive."""

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # a background job's, which is not to be stopped so
            signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
