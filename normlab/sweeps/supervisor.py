"""The supervisor of a sweep: submit the packs to an executor, and record their outcomes.

Processes train the packs, on this machine (`local.py`) or in Slurm (`slurm.py`), and a failure ends only one pack. The
supervisor records outcomes in the folder of the sweep. When the same command runs again, the packs that are not
completed resume, except failed ones, which need `--retry-failed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from normlab.base.errors import StoreError
from normlab.config.sweep_options import SweepOptions
from normlab.store.files import check_links, delete_temporaries, make_folder
from normlab.store.format import LOCK_FILE, OUTCOMES_FILE
from normlab.store.lock import file_lock
from normlab.store.plans import Pack, Plan, has_plan, read_plan, run_of
from normlab.sweeps import files
from normlab.sweeps.cost import cost_of, recorded_packs
from normlab.sweeps.executor import Executor, make_executor
from normlab.sweeps.files import MEMORY, PackOutcome
from normlab.sweeps.measured_packs import LARGEST
from normlab.sweeps.plan import PlannedSweep
from normlab.sweeps.process import POLL_EVERY_S
from normlab.sweeps.progress import ProgressDisplay
from normlab.sweeps.stored_plan import all_completed, halve, reconcile
from normlab.system.processes import collected_signals


def supervise(
    planned: PlannedSweep, options: SweepOptions, display: ProgressDisplay | None = None, *, retry_failed: bool = False
) -> Supervision:
    """Train the packs of a sweep that are not completed.

    The packs of a plan that is stored in the folder take precedence.

    Raises:
        ConfigError: The stored plan is of another sweep, or `options.on` is not available on this machine.
        StoreError: Another process supervises the sweep, Slurm has some of its packs, or a file cannot be written; or
            a symbolic link leads out of the folder of the sweep or of a run.
    """
    folder, plan = planned.folder, planned.plan
    display = display or ProgressDisplay(folder)
    executor = make_executor(folder, options, planned.gpus, display.print)
    check_links(folder)
    for run in plan.runs:
        check_links(run_of(folder, run).path)
    make_folder(folder)
    with file_lock(folder / LOCK_FILE, f"sweep {plan.name}", alternative="another sweep.name"):
        delete_temporaries(folder)
        stored = None
        if has_plan(folder):
            stored = read_plan(folder)
            # Another supervisor may have changed the plan since the command read it.
            if stored != planned.extended:
                plan = reconcile(stored, plan, folder)
        else:
            # The outcomes of a deleted plan, whose numbers of packs this plan reuses, would count for its packs.
            outcomes = folder / OUTCOMES_FILE
            if outcomes.exists():
                outcomes.replace(folder / f"before_{OUTCOMES_FILE}")
        if plan != stored:
            files.write_plan(folder, plan)
        for outcome in executor.take_over(plan):
            files.append_outcome(folder, outcome)
        forecasts: dict[int, float] = {}
        # A run that cannot be read has no forecast; its process reports the damage.
        with suppress(StoreError):
            for pack in cost_of(planned, recorded_packs(planned.results_dir)).packs:
                # The measurements may be a stranger's, and the outcome must be readable.
                if pack.seconds is not None and pack.seconds <= LARGEST:
                    forecasts[pack.number] = pack.seconds
        supervision = Supervision(folder, plan, executor, display, forecasts)
        supervision.run(retry_failed)
        return supervision


@dataclass(slots=True)
class Supervision:
    folder: Path
    plan: Plan
    executor: Executor
    display: ProgressDisplay
    forecasts: Mapping[int, float]
    """The seconds that a pack will take, by its number; packs without an equal one on record are left out."""
    waiting: list[Pack] = field(default_factory=list)
    failed: dict[int, PackOutcome] = field(default_factory=dict)
    """The outcomes of the failed packs, by number, also of those that failed in an earlier command."""
    incomplete: int = 0
    """Packs that are neither completed nor failed."""
    signal: int | None = None

    @property
    def code(self) -> int:
        """The exit code: 0 if all packs are completed, 128 + n after signal n, else 1."""
        if self.signal:
            return 128 + self.signal
        return int(bool(self.failed or self.incomplete))

    def run(self, retry_failed: bool) -> None:
        """Train the packs that are left, without those that have failed unless `retry_failed`."""
        latest = {outcome.pack: outcome for outcome in files.read_outcomes(self.folder)}
        active = self.executor.active
        for pack in list(self.plan.packs):
            # The pack may have run out of memory after its supervisor died, so it is not halved yet.
            if pack.number in latest and pack.number not in active and not self._is_completed(pack):
                self._halve_after(latest[pack.number])
        incomplete_packs = [
            pack for pack in self.plan.packs if pack.number not in active and not self._is_completed(pack)
        ]
        if not retry_failed:
            for pack in incomplete_packs:
                if pack.number in latest and latest[pack.number].is_failure:
                    self.failed[pack.number] = latest[pack.number]
        self.waiting = [pack for pack in incomplete_packs if pack.number not in self.failed]
        self.display.start(self.plan, len(self.waiting) + len(active), self.failed)
        signals_handled = 0
        try:
            with collected_signals() as signals:
                while self.executor.active or (self.waiting and not signals):
                    if not signals:
                        self.waiting = self.executor.submit(self.plan, self.waiting)
                    elif len(signals) > signals_handled:
                        signals_handled = len(signals)
                        message = self.executor.stop(again=signals_handled > 1)
                        if message:
                            self.display.print(message)
                    self.executor.wait(POLL_EVERY_S)
                    for outcome in self.executor.outcomes(self.plan):
                        self._record(outcome)
                    self.display.refresh()
        finally:
            self.executor.close()
        if signals:
            self.signal = signals[0]
        for pack in self.plan.packs:
            if pack.number not in self.failed and not self._is_completed(pack):
                self.incomplete += 1

    def _record(self, outcome: PackOutcome) -> None:
        forecast = self.forecasts.get(outcome.pack)
        files.append_outcome(self.folder, replace(outcome, forecast_seconds=forecast))
        pack, halves = self.plan.pack_of(outcome.pack), self._halve_after(outcome)
        self.waiting[:0] = halves
        if outcome.is_failure and not halves:
            self.failed[outcome.pack] = outcome
        self.display.pack_ended(pack, outcome, halves)

    def _halve_after(self, outcome: PackOutcome) -> list[Pack]:
        """If a pack ran out of memory, replace it by two halves in the plan; return the halves."""
        pack = self.plan.pack_of(outcome.pack)
        if outcome.cause != MEMORY or len(pack.runs) < 2:
            return []
        plan = halve(self.plan, pack)
        files.write_plan(self.folder, plan)
        self.plan = plan
        return [half for half in plan.packs if half.halved_from == pack.number]

    def _is_completed(self, pack: Pack) -> bool:
        return all_completed(self.folder, self.plan.runs_of(pack))
