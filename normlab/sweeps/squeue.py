"""Ask Slurm which tasks have left its queue, with or without accounting.

squeue lists every pending or running task and, for some minutes (`MinJobAge`), the final state of a task. sacct keeps
the final state, but works only if accounting is set up. The failure of a command is no evidence that a task has ended.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection

from normlab.store.plans import EXITED, INTERRUPTED, KILLED, MEMORY

ASK_EVERY_S = 15.0
"""Shortest time, in seconds, between two calls of squeue; one call asks for all tasks of a sweep."""
GONE_FOR_S = 60.0
"""Seconds after which a task outside the queue counts as ended; sooner, Slurm may requeue it or its files be late."""
ANSWER_WITHIN_S = 20.0
"""Longest time that one command of Slurm may take, in seconds."""
CAUSES = {
    **dict.fromkeys(("CANCELLED", "DEADLINE", "PREEMPTED", "REVOKED", "TIMEOUT"), INTERRUPTED),
    **dict.fromkeys(("BOOT_FAIL", "FAILED", "NODE_FAIL"), KILLED),
    "OUT_OF_MEMORY": MEMORY,
    "COMPLETED": EXITED,
}
"""The final states in Slurm, and the cause of the outcome of a task that wrote no outcome.

In every other state a task is queued, running or about to be requeued.
"""


class Squeue:
    """Records the time at which each task left the queue."""

    def __init__(self) -> None:
        self._last_call = self._last_answer = -float("inf")
        self._gone: dict[str, tuple[float, str]] = {}
        """By task: the time at which it left the queue, and its final state ("" if unknown)."""

    def gone(self, tasks: Collection[str], *, min_seconds: float) -> dict[str, str]:
        """Return the final state ("" if unknown) of tasks out of the queue for `min_seconds`.

        Args:
            tasks: Slurm's names, JOB or ARRAY_INDEX.
            min_seconds: Time between the first and the last answer of squeue without the task.
        """
        now = time.monotonic()
        if tasks and now - self._last_call >= ASK_EVERY_S:
            self._last_call = now
            states = _ask(tasks, "squeue", "--array", "--states=all", "--format=%i|%T")
            if states is not None:
                self._last_answer = now
                for task in tasks:
                    state = states.get(task, "")
                    if state and state not in CAUSES:
                        self._gone.pop(task, None)
                    else:
                        since, earlier_state = self._gone.get(task, (now, ""))
                        self._gone[task] = since, state or earlier_state
        gone = {
            task: state
            for task, (since, state) in self._gone.items()
            if task in tasks and self._last_answer - since >= min_seconds
        }
        if unknown := [task for task, state in gone.items() if not state]:
            # The answer is None without accounting.
            final = _ask(unknown, "sacct", "--allocations", "--parsable2", "--format=JobID,State") or {}
            gone |= {task: state for task, state in final.items() if state in CAUSES}
        return gone


def _ask(tasks: Collection[str], program: str, *options: str) -> dict[str, str] | None:
    """Return the states of tasks by a program of Slurm, or None if the program fails."""
    jobs = ",".join(sorted({task.partition("_")[0] for task in tasks}))  # the tasks of an array share one job id
    command = [program, "--noheader", *options, f"--jobs={jobs}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # "Invalid job id" means that none of the tasks is in the queue.
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return None
    rows = (line.strip().partition("|") for line in answer.stdout.splitlines())
    # Of "CANCELLED by 1000", keep "CANCELLED".
    return {task: state.split()[0] for task, _, state in rows if task in tasks and state.split()}
