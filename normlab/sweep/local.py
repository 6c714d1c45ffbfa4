"""Packs on this machine: one process each, a few at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from normlab.store.plans import INTERRUPTED, End, Pack, Plan
from normlab.sweep.ends import end_of
from normlab.sweep.options import SweepOptions
from normlab.sweep.plan import is_done
from normlab.sweep.process import Worker, threads_each


class Local:
    """Runs the packs of a sweep here.

    Args:
        folder: The sweep's.
        options: How many at once, and how long they may be silent.
    """

    def __init__(self, folder: Path, options: SweepOptions) -> None:
        self._folder = folder
        self._at_once = options.jobs or 1
        self._timeout_minutes = options.timeout_minutes
        self._workers: list[Worker] = []
        self._begun: list[int] = []

    @property
    def under_way(self) -> set[int]:
        """The numbers of the packs whose processes run."""
        return {worker.pack.number for worker in self._workers}

    def start(self, plan: Plan, waiting: Sequence[Pack]) -> list[Pack]:
        """Start what may run beside what runs; the cores are shared evenly."""
        left = list(waiting)
        while left and len(self._workers) < self._at_once:
            self._workers.append(Worker(self._folder, plan, left.pop(0), threads_each(self._at_once)))
            self._begun.append(self._workers[-1].pack.number)
        return left

    def begun(self) -> list[int]:
        """Those that were started since it was last asked."""
        begun, self._begun = self._begun, []
        return begun

    def ended(self, plan: Plan) -> Iterator[End]:
        """Those whose processes have ended; the others are looked after."""
        for worker in list(self._workers):
            if worker.ended():
                self._workers.remove(worker)
                yield end_of(worker, all_ended=is_done(self._folder, worker.members))
            else:
                worker.mind(self._timeout_minutes)

    def stop(self, *, again: bool) -> str:
        """Once: the packs are asked to stop. Again: they are killed."""
        if not self._workers:
            return ""
        for worker in self._workers:
            worker.kill(INTERRUPTED) if again else worker.stop()
        return "" if again else "stopping: the runs write their checkpoints (again to end them at once)"

    def close(self) -> None:
        """Let go of what still runs, which stops by itself: only where something went wrong in the supervisor."""
        for worker in self._workers:
            worker.let_go()
