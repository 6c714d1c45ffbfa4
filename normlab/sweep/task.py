"""What a task of Slurm's does: what the supervisor does on this machine, for one pack.

The pack's process is the same one, started, minded and judged by the same code; its parent is this one. submitit runs
`Task` and has its `checkpoint` called when Slurm announces that the time is up or the node is wanted: the pack writes
its checkpoint, and the task is queued again. The next one goes on from the newest step that all the pack's runs hold.
"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from normlab.store.plans import FAILURES, INTERRUPTED, read_plan
from normlab.store.queue import forget_end, write_end
from normlab.sweep.ends import end_of
from normlab.sweep.plan import is_done
from normlab.sweep.process import LOOK_EVERY_S, PATIENCE_S, Worker

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

NOTICE_S = 120
"""How long before the time is up Slurm is to say so."""


class PackFailed(Exception):
    """By this Slurm knows of a task that its pack failed."""


@dataclass(slots=True)
class Task:
    """Train one pack of a sweep.

    Args:
        folder: The sweep's, absolute.
        number: The pack's.
        threads: Threads of its process where the environment does not say.
        timeout_minutes: How long it may be silent.
    """

    folder: str
    number: int
    threads: int
    timeout_minutes: float
    _worker: Worker | None = field(default=None, init=False, repr=False)

    def __call__(self) -> str:
        """See the pack through, and say how it ended; the cause is the result.

        Raises:
            PackFailed: It failed.
            SystemExit: It was asked to stop and will not be queued again, or Slurm does that by itself.
        """
        folder = Path(self.folder)
        forget_end(folder, self.number)
        plan = read_plan(folder)
        worker = self._worker = Worker(folder, plan, plan.pack_of(self.number), self.threads)

        def stop(number: int, frame: FrameType | None) -> None:
            worker.stop()

        for number in (signal.SIGTERM, signal.SIGINT):  # scancel, and a system that wants the node without notice
            signal.signal(number, stop)
        try:
            while not worker.ended():
                worker.mind(self.timeout_minutes)
                time.sleep(LOOK_EVERY_S)
        finally:
            worker.let_go()
        end = end_of(worker, all_ended=is_done(folder, worker.members))
        write_end(folder, end)
        if end.cause in FAILURES:
            raise PackFailed(f"pack {self.number} {FAILURES[end.cause]}: {end.detail}")
        if end.cause == INTERRUPTED:
            sys.exit(128 + signal.SIGTERM)  # no result: the task may be queued again, and is not over by itself
        return end.cause

    def checkpoint(self) -> DelayedSubmission:
        """Have the pack write its checkpoint; the same task goes on. Called by submitit, in a signal's handler."""
        from submitit.helpers import DelayedSubmission

        if self._worker is not None:
            self._worker.stop(patience=PATIENCE_S)
            while not self._worker.ended():
                self._worker.insist()
                time.sleep(LOOK_EVERY_S)
        return DelayedSubmission(Task(self.folder, self.number, self.threads, self.timeout_minutes))
