"""A Slurm task, which trains one pack in a process, as the supervisor does on this machine.

submitit runs `Task`, and calls `Task.checkpoint` when Slurm announces the time limit or a preemption: the pack writes
its checkpoint, and submitit queues the task again. The next task resumes from the newest step that all runs of the pack
have. On several nodes, `Task` runs on each of them, and that of the first node writes the outcome.
"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from normlab.errors import NormlabError
from normlab.store.plans import FAILURES, INTERRUPTED, delete_task_outcome, read_plan, write_task_outcome
from normlab.sweeps.process import POLL_EVERY_S, RunningPack
from normlab.sweeps.squeue import requeue, state_of

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission


@dataclass(slots=True)
class Task:
    """Train one pack of a sweep.

    Args:
        folder: Absolute path of the folder of the sweep.
        number: Number of the pack.
        threads: Threads of the process unless OMP_NUM_THREADS is set.
        timeout_minutes: Minutes after which a process that writes nothing counts as hung.
    """

    folder: str
    number: int
    threads: int
    timeout_minutes: float
    _process: RunningPack | None = field(default=None, init=False, repr=False)

    def __call__(self) -> str:
        """Train the pack, write its outcome, and return the cause of the outcome.

        Raises:
            NormlabError: The pack failed; the error marks the task as failed in Slurm.
            SystemExit: A signal stopped the pack; Slurm may queue the task again.
        """
        folder, (job, node) = Path(self.folder), _slurm_job()
        if not node:
            delete_task_outcome(folder, self.number)
        plan = read_plan(folder)
        process = self._process = RunningPack(
            folder, plan, plan.pack_of(self.number), self.threads, self.timeout_minutes, node=node
        )
        # scancel sends these signals, and so do a preemption and a system that shuts the node down.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: process.stop())
        try:
            while (outcome := process.poll()) is None:
                time.sleep(POLL_EVERY_S)
        finally:
            process.close()
        if node:  # without an error: Slurm could end the process of the first node before it writes the outcome
            return outcome.cause
        # A preempted task is still RUNNING. It must queue itself, because Slurm only queues it if it never exits.
        if outcome.cause == INTERRUPTED and job and state_of(job) == "RUNNING" and requeue(job):
            sys.exit(128 + signal.SIGTERM)
        write_task_outcome(folder, outcome)
        if outcome.cause in FAILURES:
            raise NormlabError(f"pack {self.number} {FAILURES[outcome.cause]}: {outcome.detail}")
        if outcome.cause == INTERRUPTED:
            sys.exit(128 + signal.SIGTERM)  # writes no result; Slurm may still queue the task again
        return outcome.cause

    def checkpoint(self) -> DelayedSubmission:
        """Stop the pack with a checkpoint and return the task to queue, in submitit's handler.

        Raises:
            SystemExit: The task was cancelled meanwhile; if it were queued, it would run again.
        """
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.stop()
            while (outcome := self._process.poll()) is None:
                time.sleep(POLL_EVERY_S)
            if (job := _slurm_job()[0]) and state_of(job) not in ("RUNNING", ""):
                write_task_outcome(Path(self.folder), outcome)
                sys.exit(128 + signal.SIGTERM)
        return DelayedSubmission(Task(self.folder, self.number, self.threads, self.timeout_minutes))


def _slurm_job() -> tuple[str, int]:
    """Return Slurm's name of this task (empty outside of Slurm), and the index of this node among those of the task."""
    from submitit import JobEnvironment

    environment = JobEnvironment()
    return (environment.job_id, environment.node) if environment.cluster == "slurm" else ("", 0)
