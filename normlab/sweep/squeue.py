"""Ask Slurm which tasks have left its queue, with or without accounting.

squeue knows every pending or running task, and for some minutes how a task ended (`MinJobAge`); sacct knows the final
state for good, but only where accounting is set up. A command that fails is no evidence.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection

from normlab.store.plans import EXITED, INTERRUPTED, KILLED, MEMORY

ASK_EVERY_S = 15.0
"""Shortest time, in seconds, between two calls of squeue; one call asks for all tasks of a sweep."""
GONE_FOR_S = 60.0
"""Seconds that a task must be out of the queue to count as over: it may be requeued, or its files may be late."""
ANSWER_WITHIN_S = 20.0
"""Longest time that one command of Slurm may take, in seconds."""
CAUSES = {
    **dict.fromkeys(("CANCELLED", "DEADLINE", "PREEMPTED", "REVOKED", "TIMEOUT"), INTERRUPTED),
    **dict.fromkeys(("BOOT_FAIL", "FAILED", "NODE_FAIL"), KILLED),
    "OUT_OF_MEMORY": MEMORY,
    "COMPLETED": EXITED,
}
"""Slurm's states of a task that is over, and the cause of its outcome if the task reported none.

In every other state it is queued, running or about to be requeued.
"""


class Squeue:
    """Records since when each task is out of the queue."""

    def __init__(self) -> None:
        self._asked = self._answered = -float("inf")
        self._gone: dict[str, tuple[float, str]] = {}
        """By task: when it was first out of the queue, and its final state, "" if unknown."""

    def gone(self, tasks: Collection[str], *, min_seconds: float) -> dict[str, str]:
        """Return the tasks that have been out of the queue for `min_seconds`, with their final state, "" if unknown.

        Args:
            tasks: Slurm's names, JOB or ARRAY_INDEX.
            min_seconds: Between two answers of squeue.
        """
        now = time.monotonic()
        if tasks and now - self._asked >= ASK_EVERY_S:
            self._asked = now
            states = _ask(tasks, "squeue", "--array", "--states=all", "--format=%i|%T")
            if states is not None:
                self._answered = now
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
            if task in tasks and self._answered - since >= min_seconds
        }
        if unknown := [task for task, state in gone.items() if not state]:
            # None without accounting.
            final = _ask(unknown, "sacct", "--allocations", "--parsable2", "--format=JobID,State") or {}
            gone |= {task: state for task, state in final.items() if state in CAUSES}
        return gone


def _ask(tasks: Collection[str], program: str, *options: str) -> dict[str, str] | None:
    """Return the states of the tasks that one of Slurm's programs knows, or None if it does not answer."""
    jobs = ",".join(sorted({task.partition("_")[0] for task in tasks}))  # one name for all tasks of an array
    command = [program, "--noheader", *options, f"--jobs={jobs}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # "Invalid job id" means that squeue knows none of them.
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return None
    rows = (line.strip().partition("|") for line in answer.stdout.splitlines())
    # "CANCELLED by 1000" is CANCELLED.
    return {task: state.split()[0] for task, _, state in rows if task in tasks and state.split()}
