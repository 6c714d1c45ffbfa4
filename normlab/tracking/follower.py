"""The process that follows the record of runs and sends it to a service: `python -m normlab.tracking.follower`.

It reads the record and nothing else, so training neither waits for a service nor notices its failure. It ends when the
runs have ended and the service has everything. A follower that is started later continues at the step that the service
has. Standard input holds the task.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from normlab.errors import NormlabError, StoreError, notify
from normlab.store.format import FAILED, RUNNING
from normlab.store.lock import file_lock
from normlab.store.plans import has_plan, read_plan, sweep_folder
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.tracking.background import NOTHING_SENT, TENSORBOARD, Task, lock_of, sync_hint
from normlab.tracking.payloads import config_of, labels_of, payloads, summary_of
from normlab.tracking.tensorboard import TensorBoardRun
from normlab.tracking.wandb import NO_LOGIN, WandbRun, wandb_environment

POLL_S = 1.0
"""Shortest time between two readings of a record."""
READING_SHARE = 0.02
"""Largest share of its time that the follower reads, because a reading of a long record takes long."""
RETRY_S = 15.0
"""Seconds between two attempts to reach the server."""
GIVE_UP_S = 60.0
"""Seconds after the end of a run after which no more attempts are made."""


@dataclass(slots=True)
class FollowedRun:
    """A run that is being sent."""

    folder: RunFolder
    service: WandbRun | TensorBoardRun | None = None
    retry_at: float = 0.0
    """When to try to reach the server again."""
    problem: str = ""
    """Why the service does not have everything; empty if it has."""
    is_done: bool = False
    ended_at: float = field(default=float("inf"))


class Follower:
    """Sends runs to a service until they have ended.

    Args:
        task: The runs, the service, and what else the process was started with.
    """

    def __init__(self, task: Task) -> None:
        self.runs = [FollowedRun(RunFolder(folder)) for folder in task.runs]
        self._task = task
        self._reading_s = 0.0
        """Time of the last reading of all records."""

    def follow(self) -> None:
        """Send all runs."""
        while not all(run.is_done for run in self.runs):
            self._reading_s = 0.0
            for run in self.runs:
                if not run.is_done:
                    self._advance(run)
            if not all(run.is_done for run in self.runs):
                time.sleep(max(POLL_S, self._reading_s / READING_SHARE))

    def _advance(self, run: FollowedRun) -> None:
        """Send the new steps of a run, and finish a run that has ended."""
        try:
            # In this order: a run that holds its lock may write one more status, and the rows are complete before it.
            is_active = run.folder.is_active()
            record = RunRecord.read(run.folder)
            is_ended = record.state != RUNNING and not is_active
            run.ended_at = min(run.ended_at, time.monotonic()) if is_ended else float("inf")
            if run.service is None and not self._start(run):
                return
            assert run.service is not None
            start = time.monotonic()
            steps = payloads(run.folder, run.folder.run(), run.service.next_step, record.state)
            self._reading_s += time.monotonic() - start
            for step, payload in steps:
                run.service.log(step, payload)
            if is_ended or not self._task.until_end:
                run.is_done = True
                run.service.finish(summary_of(record), is_failed=record.state == FAILED)
        except Exception as error:
            run.is_done, run.problem = True, _one_line(error)

    def _start(self, run: FollowedRun) -> bool:
        """Start the run at the service, and return whether it has started."""
        if time.monotonic() < run.retry_at:
            return False
        path, content, task = run.folder.path, run.folder.run(), self._task
        if task.service == TENSORBOARD:
            run.service = TensorBoardRun(path)
            return True
        sweep = task.sweep
        if sweep is None and (name := (content.get("pack") or {}).get("sweep")):
            sweep = sweep_folder(path.parent.parent, name)
        labels = labels_of(content, read_plan(sweep) if sweep is not None and has_plan(sweep) else None)
        tracking = content["config"]["tracking"]
        try:
            run.service = WandbRun(path, config_of(content), labels, tracking, task.service, task.process)
        except (OSError, StoreError):
            raise  # of this machine
        except Exception as error:
            if _is_refusal(error) or not task.until_end or time.monotonic() > run.ended_at + GIVE_UP_S:
                raise
            run.retry_at = time.monotonic() + RETRY_S
            return False
        return True


def report(runs: Sequence[FollowedRun], service: str) -> list[str]:
    """Return the lines for the user about runs that were sent, or were not."""
    lines: list[str] = []
    name = "TensorBoard" if service == TENSORBOARD else "W&B"
    if problems := [run for run in runs if run.problem]:
        which = problems[0].folder.run_id if len(problems) == 1 else f"{len(problems)} runs"
        paths = [run.folder.path for run in problems]
        lines.append(f"{name} did not receive all of {which} ({problems[0].problem}); {sync_hint(paths, service)}")
    sent = [run.service.where for run in runs if run.service is not None and not run.problem]
    if len(sent) == 1:
        lines.append(f"{name}: {sent[0]}")
    elif sent:
        lines.append(f"{name}: {len(sent)} runs; of the first, {sent[0]}")
    return lines


def _is_refusal(error: Exception) -> bool:
    """Whether the server rejected the login or the request, so that another attempt is of no use."""
    return any(text in str(error) for text in ("401", "403", "API key", "permission denied"))


def _one_line(error: Exception) -> str:
    text = str(error) if isinstance(error, NormlabError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split()).rstrip(".")[:300]


def main(task: Task) -> int:
    """Follow the runs of a task, print what became of them, and return the exit code."""
    with contextlib.ExitStack() as locks:
        runs = [run for run in task.runs if _acquire(locks, lock_of(run, task.service), wait=task.until_end)]
        service = task.service
        if service != TENSORBOARD:
            mode = wandb_environment().mode
            if service == "auto" or (service == "online" and mode == NO_LOGIN):
                service = mode
        if service == NO_LOGIN:
            _print(NOTHING_SENT + sync_hint(runs))
            return 1
        if service not in ("online", "offline", TENSORBOARD):
            return 0  # WANDB_MODE=disabled
        follower = Follower(replace(task, runs=runs, service=service))
        follower.follow()
        for line in report(follower.runs, service):
            _print(line)
        return int(any(run.problem for run in follower.runs))


def _acquire(locks: contextlib.ExitStack, lock: Path, *, wait: bool) -> bool:
    """Return whether no other follower sends the run; `wait` for one that was started for an earlier process of it."""
    while True:
        try:
            locks.enter_context(file_lock(lock, f"tracking of run {lock.parent.name}"))
        except StoreError:
            if not wait:
                _print(f"run {lock.parent.name}: another process is sending it already")
                return False
            time.sleep(POLL_S)
        else:
            return True


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        notify(line)


if __name__ == "__main__":
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # W&B's reports about its own errors
    code = main(Task.from_json(sys.stdin.read()))
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    # After a failure, W&B's process may still wait for a server that is gone. It is in the group that this one leads.
    if code and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    sys.exit(code)
