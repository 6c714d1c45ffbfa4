"""The supervisor of a sweep: what is to be trained goes where it runs, and how it ended is written down.

A pack is a process that can end alone, here (`local.py`) or in Slurm (`slurm.py`). Whatever happens to it ends that
pack alone and is noted, once, in the sweep's folder. What the same command does again follows from there: packs that
failed wait for `--retry-failed`, all others that are not done go on.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
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
    MEMORY,
    End,
    Pack,
    Plan,
    append_end,
    has_plan,
    lock_of,
    read_ends,
    read_plan,
    set_ends_aside,
    write_plan,
)  # fmt: skip
from normlab.store.queue import has_queue
from normlab.sweep.local import Local
from normlab.sweep.options import SweepOptions
from normlab.sweep.plan import is_done, plan_there
from normlab.sweep.process import LOOK_EVERY_S
from normlab.sweep.slurm import Slurm


class Place(Protocol):
    """Where packs run."""

    @property
    def under_way(self) -> set[int]:
        """The numbers of the packs that it was given and that have not ended, as far as it was asked."""
        ...

    def start(self, plan: Plan, waiting: Sequence[Pack]) -> list[Pack]:
        """Take over as many packs as there is room for; those that still wait."""
        ...

    def begun(self) -> Iterable[int]:
        """The numbers of the packs that have begun to run since it was last asked."""
        ...

    def ended(self, plan: Plan) -> Iterable[End]:
        """The packs that have ended since it was last asked. Asked for the next, it knows the one before is noted."""
        ...

    def stop(self, *, again: bool) -> str:
        """The supervisor was asked to stop, and may be asked again: what is to be known of it, or nothing."""
        ...

    def close(self) -> None:
        """Nobody will ask any more."""
        ...


class Watcher(Protocol):
    """Is told how the sweep goes."""

    def begin(self, plan: Plan, waiting: Sequence[Pack], done: int, failed: Sequence[End]) -> None:
        """It begins: what is to be trained, how many packs are done already, and which failed before and stay."""
        ...

    def started(self, pack: Pack) -> None:
        """A pack runs."""
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
    left: int = 0
    """Packs that are not done and have not failed: something else stopped them."""
    signal: int | None = None
    """The signal that stopped it."""

    @property
    def code(self) -> int:
        """The command's exit code: 0 where all is done, 1 where something is not, 128 + n after signal n."""
        return 128 + self.signal if self.signal else int(bool(self.failed or self.left))


def supervise(
    folder: Path,
    plan: Plan,
    options: SweepOptions,
    watcher: Watcher,
    *,
    retry_failed: bool = False,
) -> Outcome:
    """Train what is left of a sweep, and say how it ended.

    Args:
        folder: The sweep's; it is made.
        plan: What the words made; the plan that is there already, if there is one, is the one that counts.
        options: How many at once, and how long they may be silent.
        watcher: Is told how it goes.
        retry_failed: Whether packs that failed before are tried again.

    Raises:
        ConfigError: The plan that is there is another sweep's; it cannot run where it is to.
        StoreError: Another process supervises the sweep, or Slurm has some of it; the system refuses its files.
    """
    place: Place = Slurm(folder, options) if options.on == "slurm" else Local(folder, options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal(folder, "made", error) from error
    with hold(lock_of(folder), f"sweep {plan.name}", beside="another sweep.name"):
        sweep_temporaries(folder)
        # It may have been begun, or halved, since it was looked at.
        if has_plan(folder):
            plan = plan_there(folder, plan)
        else:
            set_ends_aside(folder)
        if not has_plan(folder) or plan != read_plan(folder):
            write_plan(folder, plan)
        if has_queue(folder):
            _hear_from_slurm(folder, plan, options, place)
        return _Supervisor(folder, plan, place, watcher).run(retry_failed)


def _hear_from_slurm(folder: Path, plan: Plan, options: SweepOptions, place: Place) -> None:
    """Note what has ended there while nobody looked; what goes on there does not run here too.

    Raises:
        StoreError: Something goes on there, and the sweep is to go on here.
    """
    slurm = place if isinstance(place, Slurm) else Slurm(folder, options)
    slurm.take_up()
    # Nobody watches these tasks from here on if the sweep is to run elsewhere: one look decides.
    for end in slurm.ended(plan, patience_s=None if slurm is place else 0.0):
        append_end(folder, end)
    if slurm is not place and slurm.under_way:
        raise StoreError(
            f"sweep {plan.name}: {len(slurm.under_way)} of its packs are in Slurm's hands; sweep.on=slurm watches "
            f"them, and `{slurm.cancel}` ends them"
        )


@dataclass(slots=True)
class _Supervisor:
    folder: Path
    plan: Plan
    place: Place
    watcher: Watcher
    waiting: list[Pack] = field(default_factory=list)
    failed: dict[int, End] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)

    def run(self, retry_failed: bool) -> Outcome:
        """See every pack through that is to be trained now."""
        last = {end.pack: end for end in read_ends(self.folder)}
        self._recover(last)
        begun = self.place.under_way
        left = [pack for pack in self.plan.packs if pack.number in begun or not self._is_done(pack)]
        waits = [pack for pack in left if pack.number not in begun]
        if not retry_failed:
            self.failed = {pack.number: last[pack.number] for pack in waits if _failed(last.get(pack.number))}
        self.waiting = [pack for pack in waits if pack.number not in self.failed]
        to_train = [pack for pack in left if pack.number not in self.failed]
        self.watcher.begin(self.plan, to_train, len(self.plan.packs) - len(left), list(self.failed.values()))
        heard = 0
        try:
            with _noting_signals(self.signals):
                while self.place.under_way or (self.waiting and not self.signals):
                    if not self.signals:
                        self.waiting = self.place.start(self.plan, self.waiting)
                    elif len(self.signals) > heard:
                        heard = len(self.signals)
                        if told := self.place.stop(again=heard > 1):
                            self.watcher.say(told)
                    for number in self.place.begun():
                        self.watcher.started(self.plan.pack_of(number))
                    for end in self.place.ended(self.plan):
                        self._take_note(end)
                    self.watcher.look()
                    time.sleep(LOOK_EVERY_S)
        finally:
            self.place.close()
            self.watcher.finish()
        left = sum(not (pack.number in self.failed or self._is_done(pack)) for pack in self.plan.packs)
        return Outcome(self.plan, self.failed, left, self.signals[0] if self.signals else None)

    def _recover(self, last: dict[int, End]) -> None:
        """Halve what ran out of memory just before the supervisor was killed, or while there was none."""
        for pack in list(self.plan.packs):
            end = last.get(pack.number)
            under_way = pack.number in self.place.under_way
            if (
                end is not None
                and end.cause == MEMORY
                and len(pack.jobs) > 1
                and not (under_way or self._is_done(pack))
            ):
                self._halve(pack)

    def _take_note(self, end: End) -> None:
        pack = self.plan.pack_of(end.pack)
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
        return is_done(self.folder, self.plan.members(pack))


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
