"""Run the packs of a sweep on this machine: one process per pack, a few at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from normlab.config.sweep import SweepOptions
from normlab.store.plans import INTERRUPTED, Pack, PackOutcome, Plan
from normlab.sweep.pack_outcome import outcome_of_process
from normlab.sweep.plan import all_completed
from normlab.sweep.process import PackProcess, threads_per_process


class LocalExecutor:
    """Runs packs as processes of this machine; implements `supervisor.Executor`.

    Args:
        folder: The sweep's.
        options: The number of processes at once, and their timeout.
    """

    def __init__(self, folder: Path, options: SweepOptions) -> None:
        self._folder = folder
        self._max_processes = options.jobs or 1
        self._timeout_minutes = options.timeout_minutes
        self._processes: list[PackProcess] = []
        self._newly_started: list[int] = []

    @property
    def active(self) -> set[int]:
        """The numbers of the packs whose processes run."""
        return {process.pack.number for process in self._processes}

    def submit(self, plan: Plan, waiting: Sequence[Pack]) -> list[Pack]:
        """Start packs up to the limit, and return the rest; the processes share the cores evenly."""
        rest = list(waiting)
        while rest and len(self._processes) < self._max_processes:
            pack = rest.pop(0)
            self._processes.append(PackProcess(self._folder, plan, pack, threads_per_process(self._max_processes)))
            self._newly_started.append(pack.number)
        return rest

    def started(self) -> list[int]:
        """Return the packs that were started since the last call."""
        numbers, self._newly_started = self._newly_started, []
        return numbers

    def outcomes(self, plan: Plan) -> Iterator[PackOutcome]:
        """Yield the outcome of each process that has exited; check the timeouts of the others."""
        for process in list(self._processes):
            if process.has_exited():
                self._processes.remove(process)
                yield outcome_of_process(process, completed=all_completed(self._folder, process.jobs))
            else:
                process.check_timeout(self._timeout_minutes)

    def stop(self, *, again: bool) -> str:
        """Ask the processes to stop; the second time kill them."""
        if not self._processes:
            return ""
        for process in self._processes:
            process.kill(INTERRUPTED) if again else process.stop()
        return "" if again else "stopping: the runs write their checkpoints (Ctrl-C again kills them)"

    def close(self) -> None:
        """Close the pipes of processes that still run after an error, which makes them stop."""
        for process in self._processes:
            process.close_pipe()
