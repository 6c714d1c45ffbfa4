"""Ask Slurm which tasks have left its queue, with or without accounting.

squeue lists every pending or running task and, for some minutes (`MinJobAge`), the final state of a task. sacct keeps
the final state, but works only if accounting is set up. The failure of a command is no evidence that a task has ended.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection
from typing import NamedTuple

from normlab.store.plans import EXITED, INTERRUPTED, KILLED, MEMORY

ASK_EVERY_S = 15.0
"""Shortest time, in seconds, between two calls of squeue; one call asks for all tasks of a sweep."""
GONE_FOR_S = 60.0
"""Seconds after which a task outside the queue counts as ended if its outcome is missing, because files may be late."""
ANSWER_WITHIN_S = 20.0
"""Longest time that one command of Slurm may take, in seconds."""
CAUSES = {
    **dict.fromkeys(("CANCELLED", "DEADLINE", "PREEMPTED", "REVOKED", "TIMEOUT"), INTERRUPTED),
    **dict.fromkeys(("BOOT_FAIL", "NODE_FAIL"), KILLED),
    **dict.fromkeys(("COMPLETED", "FAILED"), EXITED),
    "OUT_OF_MEMORY": MEMORY,
}
"""The final states in Slurm, and the cause of the outcome of a task that wrote no outcome.

In every other state a task is queued, running or about to be requeued.
"""


class Gone(NamedTuple):
    """A task that is out of the queue."""

    state: str
    """Its final state, from squeue or sacct; empty if neither knows it."""
    seconds: float
    """Time between the first and the last answer of squeue without the task."""


class Squeue:
    """Asks for the states of tasks, and records the time at which each left the queue."""

    def __init__(self) -> None:
        self._last_call = self._last_answer = -float("inf")
        self._gone: dict[str, tuple[float, str]] = {}
        """By task: the time at which it left the queue, and its final state ("" if unknown)."""

    def ask(self, tasks: Collection[str]) -> dict[str, tuple[str, str]] | None:
        """Return the state of each task in the queue and its reason to wait; None if not asked, or without an answer.

        Args:
            tasks: Slurm's names, JOB or ARRAY_INDEX.
        """
        now = time.monotonic()
        if not tasks or now - self._last_call < ASK_EVERY_S:
            return None
        self._last_call = now
        answer = _ask(tasks, "squeue", "--array", "--states=all", "--format=%i|%T|%r")
        if answer is None:
            return None
        self._last_answer = now
        active = {task: answer[task] for task in answer if answer[task][0] not in CAUSES}
        for task in active:
            self._gone.pop(task, None)
        left = [task for task in tasks if task not in active]
        for task in left:
            since, state = self._gone.get(task, (now, ""))
            self._gone[task] = since, answer[task][0] if task in answer else state
        if unknown := [task for task in left if not self._gone[task][1]]:
            # The answer is None without accounting.
            final = _ask(unknown, "sacct", "--allocations", "--parsable2", "--format=JobID,State") or {}
            for task, (state, _) in final.items():
                if state in CAUSES:
                    self._gone[task] = self._gone[task][0], state
        return active

    def gone(self, tasks: Collection[str]) -> dict[str, Gone]:
        """Return the tasks that are out of the queue, by the last answer."""
        return {
            task: Gone(state, self._last_answer - since) for task, (since, state) in self._gone.items() if task in tasks
        }


def state_of(task: str) -> str:
    """Return the state of a task in the queue; empty if squeue does not answer."""
    return (_ask([task], "squeue", "--array", "--states=all", "--format=%i|%T") or {}).get(task, ("", ""))[0]


def requeue(task: str) -> bool:
    """Queue a running task again, and return whether Slurm does."""
    try:
        command = ["scontrol", "requeue", task]
        return subprocess.run(command, capture_output=True, timeout=ANSWER_WITHIN_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _ask(tasks: Collection[str], program: str, *options: str) -> dict[str, tuple[str, str]] | None:
    """Return the states of tasks, and the reasons to wait, by a program of Slurm; None if the program fails."""
    jobs = ",".join(sorted({task.partition("_")[0] for task in tasks}))  # the tasks of an array share one job id
    command = [program, "--noheader", *options, f"--jobs={jobs}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # "Invalid job id" means that none of the tasks is in the queue.
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return None
    rows = (f"{line.strip()}||".split("|")[:3] for line in answer.stdout.splitlines())
    # Of "CANCELLED by 1000", keep "CANCELLED".
    return {task: (state.split()[0], reason) for task, state, reason in rows if task in tasks and state.split()}
