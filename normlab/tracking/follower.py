"""The process that follows the record of runs and sends it to a service: `python -m normlab.tracking.follower`.

It reads the record and nothing else, so training neither waits for a service nor notices its failure. It ends when all
runs have ended and the service has every number, or when it gives up. A follower that is started later continues at the
step that the service has. Standard input holds the task.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from normlab.errors import NormlabError, StoreError, notify
from normlab.store.format import RUNNING
from normlab.store.lock import file_lock, is_locked
from normlab.store.plans import has_plan, read_plan, sweep_folder
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.tracking.background import NOTHING_SENT, TENSORBOARD, Task, WandbState, lock_of, sync_hint
from normlab.tracking.payloads import config_of, labels_of, payloads, summary_of
from normlab.tracking.tensorboard import TensorBoardRun
from normlab.tracking.wandb import NO_LOGIN, WandbRun, wandb_environment

POLL_S = 1.0
"""Shortest time between two readings of a record."""
READING_SHARE = 0.02
"""Largest share of the follower's time that is spent on reading records; long records take long to read."""
RETRY_S = 15.0
"""Seconds between two attempts to reach the server."""
GIVE_UP_S = 60.0
"""Seconds after the end of a run during which the follower still tries to reach the server."""
_REFUSAL = re.compile(r"(?<![\w:.])40[13](?![\w:.])|API key|permission denied", re.IGNORECASE)
"""HTTP status or text of a rejected login; not a port or a part of an id."""
_LOCAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
"""Errors of this machine's disks."""


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
    is_training: bool = False
    """Whether it had not ended when it was sent."""
    ended_at: float = float("inf")
    """When the follower noticed the end of the run."""
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """The run's lock and the temporary files of its service."""
    is_locked: bool = False
    """Whether this follower holds the lock, so that no other one sends the run."""

    def acquire(self, lock: Path) -> bool:
        """Acquire the run's lock unless another follower holds it, and return whether it is held.

        Raises:
            StoreError: The lock file cannot be written.
        """
        try:
            if not self.is_locked and not is_locked(lock):
                self.resources.enter_context(file_lock(lock, f"tracking of run {self.folder.run_id}"))
                self.is_locked = True
        except StoreError:
            if not is_locked(lock):
                raise
        return self.is_locked


class Follower:
    """Sends runs to a service until they have ended.

    Args:
        task: The runs, the service, and what else the process was started with.
    """

    def __init__(self, task: Task) -> None:
        self.runs = [FollowedRun(RunFolder(folder)) for folder in task.runs]
        self._task = task
        self._service = task.service
        self._reading_s = 0.0
        """Time of the last reading of all records."""
        self._unreachable = ""
        """Why the service could not be reached after the end of a run; it is not tried again for the other runs."""

    def acquire(self) -> None:
        """Acquire the locks of the runs that no other follower sends, before anything that takes long."""
        for run in self.runs:
            with contextlib.suppress(StoreError):  # `_start` tries again, and reports it
                run.acquire(lock_of(run.folder.path, self._service))

    def follow(self, service: str) -> None:
        """Send all runs to the service."""
        self._service = service
        while not all(run.is_done for run in self.runs):
            self._reading_s = 0.0
            for run in self.runs:
                if not run.is_done:
                    self._advance(run)
            if not all(run.is_done for run in self.runs):
                time.sleep(max(POLL_S, self._reading_s / READING_SHARE))

    def close(self) -> None:
        """Release all locks, and delete all temporary files."""
        for run in self.runs:
            run.resources.close()

    def _advance(self, run: FollowedRun) -> None:
        """Send the new steps of a run, and finish a run that has ended."""
        try:
            if self._unreachable:
                raise NormlabError(self._unreachable)
            if run.service is None and not self._start(run):
                return
            assert run.service is not None
            # The rows are read last: if the run has ended before, nothing is added to them.
            is_active, start = run.folder.is_active(), time.monotonic()
            record = RunRecord.read(run.folder)
            state = RUNNING if is_active else record.state
            steps = payloads(run.folder, run.folder.run(), run.service.next_step, state)
            if run.folder.is_active() != is_active:
                return  # it has ended or was resumed meanwhile: read it again
            self._reading_s += time.monotonic() - start
            for step, payload in steps:
                run.service.log(step, payload)
            # A process that resumed the run after a kill has a follower of its own, which waits for the lock.
            is_resumed = self._task.process is not None and run.folder.owner() not in (None, self._task.process)
            if state != RUNNING or not self._task.until_end or is_resumed:
                run.service.finish(summary_of(record), state)
                run.is_done, run.is_training = True, state == RUNNING
        except Exception as error:
            self._give_up(run, error)
        if run.is_done:
            run.resources.close()

    def _give_up(self, run: FollowedRun, error: Exception) -> None:
        """Store why a run is not sent any more."""
        run.is_done, run.problem = True, _one_line(error)
        may_recover = self._task.until_end and run.folder.is_active()
        if not (isinstance(error, NormlabError) or _is_local(error) or may_recover):
            self._unreachable = run.problem
        if self._service == "online":
            with contextlib.suppress(StoreError):
                path = run.folder.path
                replace(WandbState.read(path), is_complete=False, problem=run.problem).write(path)

    def _start(self, run: FollowedRun) -> bool:
        """Start the run at the service, and return whether it has started."""
        path, task = run.folder.path, self._task
        if not run.acquire(lock_of(path, self._service)):
            if not task.until_end:
                _print(f"run {run.folder.run_id}: another process is sending it already")
                run.is_done = True
            return False
        if time.monotonic() < run.retry_at:
            return False
        content = run.folder.run()
        if self._service == TENSORBOARD:
            run.service = TensorBoardRun(path)
            return True
        sweep = task.sweep
        if sweep is None and (name := (content.get("pack") or {}).get("sweep")):
            sweep = sweep_folder(path.parent.parent, name)
        labels = labels_of(content, read_plan(sweep) if sweep is not None and has_plan(sweep) else None)
        tracking = content["config"]["tracking"]
        try:
            run.service = WandbRun(
                path, config_of(content), labels, tracking, self._service, task.process,
                may_end=task.until_end or not run.folder.is_active(),
            )  # fmt: skip
            run.resources.callback(run.service.close)
        except Exception as error:
            now = time.monotonic()
            run.ended_at = float("inf") if run.folder.is_active() else min(run.ended_at, now)
            if _is_local(error) or _REFUSAL.search(str(error)) or not task.until_end or now > run.ended_at + GIVE_UP_S:
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
    if training := [run.folder.path for run in runs if run.is_training]:
        which = training[0].name if len(training) == 1 else f"{len(training)} runs"
        lines.append(f"{name} has the steps so far of {which}; after the end, {sync_hint(training, service)}")
    return lines


def _is_local(error: Exception) -> bool:
    return isinstance(error, StoreError) or getattr(error, "errno", None) in _LOCAL_ERRORS


def _one_line(error: Exception) -> str:
    text = str(error) if isinstance(error, NormlabError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split()).rstrip(".")[:300]


def main(task: Task) -> int:
    """Follow the runs of a task, print what became of them, and return the exit code."""
    with contextlib.closing(Follower(task)) as follower:
        if task.until_end:
            follower.acquire()
        if not (os.environ.get("WANDB_SWEEP_ID") and task.process and len(task.runs) == 1):
            os.environ.pop("WANDB_RUN_ID", None)  # the id of one run, which the agent of a W&B sweep sets
        service = task.service
        if service != TENSORBOARD:
            mode = wandb_environment().mode
            if service == "auto" or (service == "online" and mode == NO_LOGIN):
                service = mode
        if service == NO_LOGIN:
            _print(NOTHING_SENT + sync_hint(task.runs))
            return 1
        if service not in ("online", "offline", TENSORBOARD):
            return 0  # WANDB_MODE=disabled
        follower.follow(service)
        for line in report(follower.runs, service):
            _print(line)
        return int(any(run.problem for run in follower.runs))


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        notify(line)


if __name__ == "__main__":
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # W&B's reports about its own errors
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    code, task = 2, Task.from_json(sys.stdin.read())
    try:
        code = main(task)
    except Exception as error:
        _print(f"{_one_line(error)}; {sync_hint(task.runs, task.service)}")
    except SystemExit:
        pass
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    # After a failure, W&B's process may still wait for a server that is gone. It is in the group that this one leads.
    if code and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    sys.exit(code)
