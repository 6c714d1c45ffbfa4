"""A Slurm task, which trains one pack in a process, as the supervisor does on this machine.

submitit runs `Task`, and calls `Task.checkpoint` when Slurm announces the time limit or a preemption: the pack writes
its checkpoint, and submitit queues the task again. The next task resumes from the newest step that all runs of the pack
have.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from normlab.base.errors import NormlabError
from normlab.store.format import INTERRUPTED
from normlab.store.plans import read_plan
from normlab.sweeps.files import PackOutcome, log_of, task_outcome_file, write_task_outcome
from normlab.sweeps.process import POLL_EVERY_S, RunningPack, WorkerProcess, process_options
from normlab.sweeps.worker import STOPPED
from normlab.system.processes import STOP_SIGNALS, call

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

ANSWER_WITHIN_S = 20.0
"""Longest time that one command of Slurm may take, in seconds."""


@dataclass(slots=True)
class Task:
    """Train one pack of a sweep."""

    folder: str
    """Absolute path of the folder of the sweep."""
    number: int
    """Number of the pack."""
    threads: int
    timeout_minutes: float
    _process: RunningPack | None = field(default=None, init=False, repr=False)

    def __call__(self) -> str:
        """Train the pack, write its outcome, and return the cause of the outcome.

        Raises:
            NormlabError: The pack failed; the error marks the task as failed in Slurm.
            SystemExit: A signal stopped the pack; Slurm may queue the task again.
        """
        from submitit import JobEnvironment

        folder = Path(self.folder)
        task_outcome_file(folder, self.number).unlink(missing_ok=True)
        plan = read_plan(folder)
        pack = plan.pack_of(self.number)
        worker = WorkerProcess(folder, process_options(plan, pack), self.threads, (), log_of(folder, self.number))
        process = self._process = RunningPack(folder, plan, pack, worker, self.timeout_minutes)
        # scancel sends these signals, and so do a preemption and a system that shuts the node down.
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: process.stop())
        outcome = self._wait(process)
        # A preempted task is still RUNNING. It must queue itself, because Slurm only queues it if it never exits.
        job = JobEnvironment().job_id
        # A disk error is an interruption, too, but has another detail: the disk needs space before the next start.
        was_stopped = outcome.cause == INTERRUPTED and outcome.detail == STOPPED
        if was_stopped and _state_of(job) == "RUNNING":
            answer = call(["scontrol", "requeue", job], ANSWER_WITHIN_S)
            if answer is not None and answer.returncode == 0:
                sys.exit(128 + signal.SIGTERM)
        write_task_outcome(folder, outcome)
        if outcome.is_failure:
            raise NormlabError(f"pack {self.number} {outcome.cause}: {outcome.detail}")
        # An exit writes no result for submitit, and Slurm may still queue the task again.
        if outcome.cause == INTERRUPTED:
            sys.exit(128 + signal.SIGTERM)
        return outcome.cause

    def _wait(self, process: RunningPack) -> PackOutcome:
        try:
            outcome = process.poll()
            while outcome is None:
                time.sleep(POLL_EVERY_S)
                outcome = process.poll()
            return outcome
        finally:
            # A worker that still trains, because of an error here, stops when its connection closes.
            process.worker.connection.close()

    def checkpoint(self) -> DelayedSubmission:
        """Stop the pack with a checkpoint and return the task to queue, in submitit's handler.

        Raises:
            SystemExit: The task was cancelled meanwhile; if it were queued, it would run again.
        """
        from submitit import JobEnvironment
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.stop()
            outcome = self._wait(self._process)
            if _state_of(JobEnvironment().job_id) not in ("RUNNING", ""):
                write_task_outcome(Path(self.folder), outcome)
                sys.exit(128 + signal.SIGTERM)
        return DelayedSubmission(Task(self.folder, self.number, self.threads, self.timeout_minutes))


def ask(tasks: Collection[str]) -> dict[str, tuple[str, str]] | None:
    """Return the states of tasks, and the reasons to wait, by squeue; None if it fails."""
    # The tasks of an array share one job id.
    jobs = ",".join(sorted({task.partition("_")[0] for task in tasks}))
    options = ("--noheader", "--array", "--states=all", "--format=%i|%T|%r")
    answer = call(["squeue", *options, f"--jobs={jobs}"], ANSWER_WITHIN_S)
    # "Invalid job id" means that none of the tasks is in the queue.
    if answer is None or (answer.returncode and "Invalid job id" not in answer.stderr):
        return None
    states: dict[str, tuple[str, str]] = {}
    for line in answer.stdout.splitlines():
        # With two separators more, a line without them has three parts too.
        task, state, reason = f"{line.strip()}||".split("|")[:3]
        words = state.split()
        if task in tasks and words:
            # Of "CANCELLED by 1000", keep "CANCELLED".
            states[task] = words[0], reason
    return states


def _state_of(task: str) -> str:
    """Return the state of a task in Slurm; empty if it is unknown."""
    states = ask([task])
    if states is None or task not in states:
        return ""
    state, _ = states[task]
    return state
