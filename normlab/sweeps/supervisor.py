"""The supervisor of a sweep: submit the packs to an executor, and record their outcomes.

Processes train the packs, on this machine (`local.py`) or in Slurm (`slurm.py`), and a failure ends only one pack. The
supervisor records outcomes in the folder of the sweep. When the same command runs again, the packs that are not
completed resume, except failed ones, which need `--retry-failed`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normlab.analysis.phrases import counted
from normlab.config.sweep_options import SweepOptions
from normlab.errors import StoreError
from normlab.store import plans
from normlab.store.files import check_links, delete_temporaries, make_folder
from normlab.store.lock import file_lock
from normlab.store.plans import FAILURES, GPU_FAULT, MEMORY, Pack, PackOutcome, Plan
from normlab.sweeps.local import LocalExecutor
from normlab.sweeps.plan import all_completed, reconcile
from normlab.sweeps.process import POLL_EVERY_S
from normlab.sweeps.progress import ProgressDisplay
from normlab.sweeps.slurm import SlurmExecutor
from normlab.training.machine import Gpu


@dataclass(slots=True)
class SweepResult:
    """The result of `supervise`."""

    plan: Plan
    """The latest plan."""
    failed: dict[int, PackOutcome]
    """The outcomes of the failed packs, by number, also of those that failed in an earlier command."""
    incomplete: int = 0
    """Packs that are neither completed nor failed."""
    signal: int | None = None
    """The signal that stopped the sweep."""

    @property
    def code(self) -> int:
        """The exit code: 0 if all packs are completed, 128 + n after signal n, else 1."""
        return 128 + self.signal if self.signal else int(bool(self.failed or self.incomplete))


def supervise(
    folder: Path,
    plan: Plan,
    options: SweepOptions,
    display: ProgressDisplay,
    gpus: Sequence[Gpu] = (),
    *,
    retry_failed: bool = False,
) -> SweepResult:
    """Train the packs of a sweep that are not completed.

    Args:
        folder: The folder of the sweep, which is created if it does not exist.
        plan: The plan of the command's overrides; the packs of a stored plan take precedence.
        options: Where packs run, how many at once, and their timeout.
        display: Shows the progress.
        gpus: The GPUs of this machine on which the packs train; none for a sweep on the CPU or in Slurm.
        retry_failed: Whether to retry packs that failed before.

    Raises:
        ConfigError: The stored plan is of another sweep, or `options.on` is not available on this machine.
        StoreError: Another process supervises the sweep, Slurm has some of its packs, or a file cannot be written; or
            a symbolic link leads out of the folder of the sweep or of a run.
    """
    if options.on == "slurm":
        executor = SlurmExecutor(folder, options, display.pack_started, display.pack_requeued, display.print)
    else:
        executor = LocalExecutor(folder, options, display.pack_started, gpus, display.print)
    for path in (folder, *(plans.run_of(folder, run).path for run in plan.runs)):
        check_links(path)
    make_folder(folder)
    with file_lock(plans.lock_of(folder), f"sweep {plan.name}", alternative="another sweep.name"):
        delete_temporaries(folder)
        # Another supervisor may have changed the plan since the command read it.
        stored = plans.read_plan(folder) if plans.has_plan(folder) else None
        if stored is None:
            plans.archive_outcomes(folder)
        else:
            plan = reconcile(stored, plan, folder)
        if plan != stored:
            plans.write_plan(folder, plan)
        if plans.read_queue(folder):
            _record_slurm_outcomes(folder, plan, options, executor)
        return _Supervisor(folder, plan, executor, display).run(retry_failed)


def _record_slurm_outcomes(
    folder: Path, plan: Plan, options: SweepOptions, executor: LocalExecutor | SlurmExecutor
) -> None:
    """Record the outcomes of Slurm tasks that ended without a supervisor.

    Raises:
        StoreError: The command runs the sweep on this machine, and some tasks in Slurm are still active.
    """
    watches_slurm = isinstance(executor, SlurmExecutor)
    slurm = executor if watches_slurm else SlurmExecutor(folder, options)
    slurm.load_queue()
    # A local sweep asks Slurm only once, so a task counts as ended at once.
    for outcome in slurm.tasks_over(plan, at_once=not watches_slurm):
        plans.append_outcome(folder, outcome)
    if slurm.active and not watches_slurm:
        raise StoreError(
            f"sweep {plan.name}: {len(slurm.active)} of its packs are in Slurm; use sweep.on=slurm to watch them, or "
            f"`{slurm.cancel_command}` to cancel them"
        )


@dataclass(slots=True)
class _Supervisor:
    folder: Path
    plan: Plan
    executor: LocalExecutor | SlurmExecutor
    display: ProgressDisplay
    waiting: list[Pack] = field(default_factory=list)
    failed: dict[int, PackOutcome] = field(default_factory=dict)

    def run(self, retry_failed: bool) -> SweepResult:
        latest = {outcome.pack: outcome for outcome in plans.read_outcomes(self.folder)}
        active = self.executor.active
        for pack in list(self.plan.packs):
            # The pack may have run out of memory after its supervisor died, so it is not halved yet.
            if pack.number in latest and pack.number not in active and not self._is_completed(pack):
                self._halve_after(latest[pack.number])
        left = [pack for pack in self.plan.packs if pack.number in active or not self._is_completed(pack)]
        if not retry_failed:
            failures = {number: outcome for number, outcome in latest.items() if outcome.cause in FAILURES}
            numbers = [pack.number for pack in left if pack.number not in active]
            self.failed = {number: failures[number] for number in numbers if number in failures}
        to_train = [pack for pack in left if pack.number not in self.failed]
        self.waiting = [pack for pack in to_train if pack.number not in active]
        self.display.start(self.plan, to_train, self.failed)
        signals_handled = 0
        try:
            with _received_signals() as signals:
                while self.executor.active or (self.waiting and not signals):
                    if not signals:
                        self.waiting = self.executor.submit(self.plan, self.waiting)
                        if self.waiting and not self.executor.active:
                            packs = counted(len(self.waiting), "pack")
                            self.display.print(f"too few GPUs are left for {packs}; the same command resumes the sweep")
                            break
                    elif len(signals) > signals_handled:
                        signals_handled = len(signals)
                        if message := self.executor.stop(again=signals_handled > 1):
                            self.display.print(message)
                    self.executor.wait(POLL_EVERY_S)
                    for outcome in self.executor.outcomes(self.plan):
                        self._record(outcome)
                    self.display.refresh()
        finally:
            self.executor.close()
            self.display.finish()
        incomplete = sum(not (pack.number in self.failed or self._is_completed(pack)) for pack in self.plan.packs)
        return SweepResult(self.plan, self.failed, incomplete, signals[0] if signals else None)

    def _record(self, outcome: PackOutcome) -> None:
        plans.append_outcome(self.folder, outcome)
        halves = self._halve_after(outcome)
        self.waiting[:0] = [self.plan.pack_of(outcome.pack)] if outcome.cause == GPU_FAULT else halves
        if outcome.cause in FAILURES and not halves:
            self.failed[outcome.pack] = outcome
        self.display.pack_ended(self.plan, outcome, halves)

    def _halve_after(self, outcome: PackOutcome) -> list[Pack]:
        """If a pack ran out of memory, replace it by two halves in the plan; return the halves."""
        pack = self.plan.pack_of(outcome.pack)
        if outcome.cause != MEMORY or len(pack.runs) < 2:
            return []
        plan = self.plan.halve(pack)
        plans.write_plan(self.folder, plan)
        self.plan = plan
        return [half for half in plan.packs if half.halved_from == pack.number]

    def _is_completed(self, pack: Pack) -> bool:
        return all_completed(self.folder, self.plan.runs_of(pack))


@contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Yield a list that collects SIGINT and SIGTERM instead of ending the process."""
    received: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # a shell lets its background jobs ignore SIGINT
                handlers[number] = signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
