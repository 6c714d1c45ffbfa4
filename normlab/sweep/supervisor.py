"""The supervisor of a sweep: submit the packs to an executor, and record their outcomes.

Each pack is a process, here (`local.py`) or in Slurm (`slurm.py`), and a failure ends one pack alone. Outcomes are
recorded in the sweep's folder. When the same command runs again, packs that failed wait for `--retry-failed`, and all
others that are not completed resume.
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

from normlab.config.sweep import SweepOptions
from normlab.errors import StoreError
from normlab.store.files import delete_temporaries, make_folder
from normlab.store.lock import file_lock
from normlab.store.plans import (
    FAILURES,
    MEMORY,
    Pack,
    PackOutcome,
    Plan,
    append_outcome,
    archive_outcomes,
    has_plan,
    lock_of,
    read_outcomes,
    read_plan,
    write_plan,
)  # fmt: skip
from normlab.store.queue import has_queue
from normlab.sweep.local import LocalExecutor
from normlab.sweep.plan import all_completed, reconcile_with_stored
from normlab.sweep.process import POLL_EVERY_S
from normlab.sweep.slurm import SlurmExecutor


class Executor(Protocol):
    """Runs packs."""

    @property
    def active(self) -> set[int]:
        """The numbers of the submitted packs whose outcome is not known yet."""
        ...

    def submit(self, plan: Plan, waiting: Sequence[Pack]) -> list[Pack]:
        """Submit as many packs as there is room for, and return the others."""
        ...

    def started(self) -> Iterable[int]:
        """Return the numbers of the packs that have started since the last call."""
        ...

    def outcomes(self, plan: Plan) -> Iterable[PackOutcome]:
        """Yield new outcomes; the caller has recorded one before it asks for the next."""
        ...

    def stop(self, *, again: bool) -> str:
        """Stop after a signal, `again` after a second one; return a message for the user, or nothing."""
        ...

    def close(self) -> None:
        """Release everything; nothing else is called afterwards."""
        ...


class Monitor(Protocol):
    """Shows the progress of a sweep."""

    def start(self, plan: Plan, packs: Sequence[Pack], completed: int, failed: Sequence[PackOutcome]) -> None:
        """Start with the packs to train, the number of completed packs, and earlier failures that are not retried."""
        ...

    def pack_started(self, pack: Pack) -> None:
        """Show that a pack runs."""
        ...

    def pack_ended(self, pack: Pack, outcome: PackOutcome, halves: Sequence[Pack]) -> None:
        """Show the outcome of a pack's process; `halves` replace a pack that ran out of memory."""
        ...

    def refresh(self) -> None:
        """Update the display, if it is time to."""
        ...

    def print(self, line: str) -> None:
        """Show a message."""
        ...

    def finish(self) -> None:
        """Finish: no pack runs any more."""
        ...


@dataclass(slots=True)
class SweepResult:
    """The result of `supervise`."""

    plan: Plan
    """The latest plan."""
    failed: dict[int, PackOutcome]
    """The outcomes of the packs that have failed, now or earlier, by number."""
    incomplete: int = 0
    """Packs that are neither completed nor failed."""
    signal: int | None = None
    """The signal that stopped the sweep."""

    @property
    def code(self) -> int:
        """The command's exit code: 0 if all packs are completed, 1 if not, 128 + n after signal n."""
        return 128 + self.signal if self.signal else int(bool(self.failed or self.incomplete))


def supervise(
    folder: Path,
    plan: Plan,
    options: SweepOptions,
    monitor: Monitor,
    *,
    retry_failed: bool = False,
) -> SweepResult:
    """Train the packs of a sweep that are not completed.

    Args:
        folder: The sweep's; it is made.
        plan: The plan of the command's overrides; the packs of a stored plan take precedence.
        options: Where packs run, how many at once, and their timeout.
        monitor: Shows the progress.
        retry_failed: Whether to retry packs that failed before.

    Raises:
        ConfigError: The stored plan is another sweep's, or the packs cannot run where they should.
        StoreError: Another process supervises the sweep, Slurm has some of its packs, or the system refused a file.
    """
    executor: Executor = SlurmExecutor(folder, options) if options.on == "slurm" else LocalExecutor(folder, options)
    make_folder(folder)
    with file_lock(lock_of(folder), f"sweep {plan.name}", alternative="another sweep.name"):
        delete_temporaries(folder)
        # Another supervisor may have written or halved the plan since the command read it.
        if has_plan(folder):
            plan = reconcile_with_stored(folder, plan)
        else:
            archive_outcomes(folder)
        if not has_plan(folder) or plan != read_plan(folder):
            write_plan(folder, plan)
        if has_queue(folder):
            _record_slurm_outcomes(folder, plan, options, executor)
        return _Supervisor(folder, plan, executor, monitor).run(retry_failed)


def _record_slurm_outcomes(folder: Path, plan: Plan, options: SweepOptions, executor: Executor) -> None:
    """Record the outcomes of Slurm tasks that ended without a supervisor.

    Raises:
        StoreError: Some tasks are still active, and the sweep is to run here.
    """
    slurm = executor if isinstance(executor, SlurmExecutor) else SlurmExecutor(folder, options)
    slurm.load_queue()
    # A sweep that runs here never asks Slurm again, so this one answer decides.
    for outcome in slurm.outcomes(plan, gone_for_s=None if slurm is executor else 0.0):
        append_outcome(folder, outcome)
    if slurm is not executor and slurm.active:
        raise StoreError(
            f"sweep {plan.name}: Slurm has {len(slurm.active)} of its packs; sweep.on=slurm watches them, and "
            f"`{slurm.cancel_command}` ends them"
        )


@dataclass(slots=True)
class _Supervisor:
    folder: Path
    plan: Plan
    executor: Executor
    monitor: Monitor
    waiting: list[Pack] = field(default_factory=list)
    failed: dict[int, PackOutcome] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)

    def run(self, retry_failed: bool) -> SweepResult:
        latest = {outcome.pack: outcome for outcome in read_outcomes(self.folder)}
        self._halve_recorded(latest)
        active = self.executor.active
        to_train = [pack for pack in self.plan.packs if pack.number in active or not self._is_completed(pack)]
        completed = len(self.plan.packs) - len(to_train)
        if not retry_failed:
            self.failed = {
                pack.number: latest[pack.number]
                for pack in to_train
                if pack.number in latest and pack.number not in active and latest[pack.number].cause in FAILURES
            }
            to_train = [pack for pack in to_train if pack.number not in self.failed]
        self.waiting = [pack for pack in to_train if pack.number not in active]
        self.monitor.start(self.plan, to_train, completed, list(self.failed.values()))
        signals_handled = 0
        try:
            with _recorded_signals(self.signals):
                while self.executor.active or (self.waiting and not self.signals):
                    if not self.signals:
                        self.waiting = self.executor.submit(self.plan, self.waiting)
                    elif len(self.signals) > signals_handled:
                        signals_handled = len(self.signals)
                        if message := self.executor.stop(again=signals_handled > 1):
                            self.monitor.print(message)
                    for number in self.executor.started():
                        self.monitor.pack_started(self.plan.pack_of(number))
                    for outcome in self.executor.outcomes(self.plan):
                        self._record(outcome)
                    self.monitor.refresh()
                    time.sleep(POLL_EVERY_S)
        finally:
            self.executor.close()
            self.monitor.finish()
        incomplete = sum(not (pack.number in self.failed or self._is_completed(pack)) for pack in self.plan.packs)
        return SweepResult(self.plan, self.failed, incomplete, self.signals[0] if self.signals else None)

    def _halve_recorded(self, latest: dict[int, PackOutcome]) -> None:
        """Halve the packs that ran out of memory while no supervisor lived to halve them."""
        for pack in list(self.plan.packs):
            outcome = latest.get(pack.number)
            if outcome is None or outcome.cause != MEMORY or len(pack.jobs) < 2 or pack.number in self.executor.active:
                continue
            if not self._is_completed(pack):
                self._halve(pack)

    def _record(self, outcome: PackOutcome) -> None:
        pack = self.plan.pack_of(outcome.pack)
        append_outcome(self.folder, outcome)
        halves: list[Pack] = []
        if outcome.cause == MEMORY and len(pack.jobs) > 1:
            halves = self._halve(pack)
            self.waiting[:0] = halves
        elif outcome.cause in FAILURES:
            self.failed[pack.number] = outcome
        self.monitor.pack_ended(pack, outcome, halves)

    def _halve(self, pack: Pack) -> list[Pack]:
        plan = self.plan.halve(pack)
        write_plan(self.folder, plan)
        self.plan = plan
        return [half for half in plan.packs if half.halved_from == pack.number]

    def _is_completed(self, pack: Pack) -> bool:
        return all_completed(self.folder, self.plan.jobs_of(pack))


@contextmanager
def _recorded_signals(received: list[int]) -> Iterator[None]:
    """Append SIGINT and SIGTERM to a list instead of ending the process, in the main thread."""

    def record(number: int, frame: FrameType | None) -> None:
        received.append(number)

    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:  # a shell lets its background jobs ignore SIGINT
            signal.signal(number, record)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
