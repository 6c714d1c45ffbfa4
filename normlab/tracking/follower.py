"""The process that follows the record of runs and sends it to a service: `python -m normlab.tracking.follower`.

It reads the record and nothing else, so training neither waits for a service nor notices its failure. It ends when all
runs have ended and the service has every number, or when it gives up. A follower that is started later continues at the
step that the service has: steps that a resumed run trains again are not sent again. Standard input holds the task.
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

from normlab.errors import NormlabError, StoreError
from normlab.store.format import RUNNING
from normlab.store.lock import is_locked, try_lock
from normlab.store.plans import has_plan, read_plan, sweep_folder
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.tracking import uploads
from normlab.tracking.background import Task
from normlab.tracking.payloads import StepReader, checks_of, config_of, labels_of, summary_of
from normlab.tracking.settings import TENSORBOARD
from normlab.tracking.tensorboard import TensorBoardRun
from normlab.tracking.uploads import Upload, lock_of
from normlab.tracking.wandb import NO_LOGIN, WandbRun, restart_client, wandb_environment

POLL_S = 1.0
"""Seconds between two checks whether a run has started or ended."""
NICENESS = 10
"""Of the follower and of W&B's process: on a core that the training fills, they get about a tenth."""
PAUSE_S = 5.0
"""Seconds between two readings of a record; W&B's client sends every 15 s."""
RETRY_S = 15.0
"""Seconds between two attempts to reach the server."""
GIVE_UP_S = 60.0
"""Seconds after the end of a run during which the follower still tries to reach the server."""
_REFUSAL = re.compile(r"(?<![\w:.])40[13](?![\w.])|API key|permission denied", re.IGNORECASE)
"""HTTP status or text of a rejected login; not a port or a part of an id."""
_OF_ONE_RUN = re.compile(r"(?<![\w:.])4(?!0[138]|29)\d\d(?![\w.])")
"""HTTP status of an error that other runs need not have, such as a deleted run."""
_LOCAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
"""Errors of this machine's disks."""


@dataclass(slots=True)
class FollowedRun:
    """A run that is being sent."""

    folder: RunFolder
    service: WandbRun | TensorBoardRun | None = None
    steps: StepReader | None = None
    """The numbers for the service."""
    retry_at: float = 0.0
    """When to try to reach the server again."""
    problem: str = ""
    """Why the service does not have everything; empty if it has."""
    is_done: bool = False
    ended_at: float = float("inf")
    """When the follower noticed the end of the run."""
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """The temporary files of its service."""
    lock: int | None = None
    """The file descriptor of the run's lock, with which no other follower sends the run."""

    def acquire(self, path: Path) -> bool:
        """Acquire the run's lock unless another follower holds it, and return whether it is held.

        Raises:
            OSError: The lock file cannot be written.
        """
        if self.lock is None and not is_locked(path):
            self.lock = try_lock(path)
        return self.lock is not None

    def detach(self) -> None:
        """Forget the service, which has ended, and delete its temporary files."""
        self.resources.close()
        self.service = self.steps = None

    def close(self) -> None:
        """Delete the temporary files of the service, and release the lock."""
        self.resources.close()
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


class Follower:
    """Sends runs to a service until they have ended.

    Args:
        task: The runs, the service, and what else the process was started with.
        locks: The file descriptor of the lock of each run, if it is held.
    """

    def __init__(self, task: Task, locks: Sequence[int | None] = ()) -> None:
        self.runs = [FollowedRun(RunFolder(folder)) for folder in task.runs]
        for run, lock in zip(self.runs, locks, strict=False):
            run.lock = lock
        self._task = task
        self._service = task.service
        self._unreachable = ""
        """Why the service could not be reached after the end of a run; the other runs then fail with it at once."""

    def follow(self, service: str) -> None:
        """Send all runs to the service."""
        self._service = service
        while not all(run.is_done for run in self.runs):
            for run in self.runs:
                if not run.is_done:
                    self._advance(run)
            self._pause()

    def _pause(self) -> None:
        """Wait for `PAUSE_S`, or until a run starts or ends."""
        left = [run.folder for run in self.runs if not run.is_done]
        were_active = [folder.is_active() for folder in left]
        for _ in range(round(PAUSE_S / POLL_S) if left else 0):
            time.sleep(POLL_S)
            if [folder.is_active() for folder in left] != were_active:
                break

    def close(self) -> None:
        """Release all locks, and delete all temporary files."""
        for run in self.runs:
            run.close()

    def _advance(self, run: FollowedRun) -> None:
        """Send the new steps of a run, and finish a run that has ended."""
        try:
            if self._unreachable:
                raise NormlabError(self._unreachable)
            if run.service is None and not self._start(run):
                return
            assert run.service is not None
            if run.steps is None:
                run.steps = StepReader(run.folder, run.service.next_step)
            # The rows are read last: if the run has ended before, nothing is added to them.
            is_active = run.folder.is_active()
            record = None if is_active else RunRecord.load(run.folder)
            state = record.state if record else RUNNING
            run.steps.read()
            if run.folder.is_active() != is_active:
                return  # it has ended or was resumed meanwhile: read it again
            for step, payload in run.steps.take(state):
                run.service.log(step, payload)
            # A process that resumed the run after a kill has a follower of its own, which waits for the lock.
            is_resumed = self._task.process is not None and run.folder.owner() not in (None, self._task.process)
            if state != RUNNING or not self._task.until_end or is_resumed:
                self._finish(run, run.service, record or RunRecord.load(run.folder), state)
        except Exception as error:
            if not self._restart_after(error, run):
                self._give_up(run, error)
        if run.is_done:
            run.close()

    def _finish(self, run: FollowedRun, service: WandbRun | TensorBoardRun, record: RunRecord, state: str) -> None:
        """Send the summary of a run, and store what the service has."""
        checks: dict[str, int] = {}
        problems = [run.steps.problem] if run.steps else []
        try:
            checks = checks_of(run.folder)
        except StoreError as error:
            problems.append(_one_line(error))
        run.problem = "; ".join(filter(None, problems))
        service.finish(summary_of(record) | checks, state)
        run.is_done = True
        replace(service.upload, steps=service.next_step, problem=run.problem).write(run.folder.path, self._service)

    def _restart_after(self, error: Exception, run: FollowedRun) -> bool:
        """Restart W&B's process if it was killed or did not reach the server, and return whether it was restarted."""
        now = time.monotonic()
        run.ended_at = float("inf") if run.folder.is_active() else min(run.ended_at, now)
        is_late = not self._task.until_end or now > run.ended_at + GIVE_UP_S
        open_runs = [each for each in self.runs if each.service is not None and not each.is_done]
        # A restart would end the other runs, unless the process of all of them was killed.
        may_restart = not open_runs if run.service is None else isinstance(error, ConnectionError)
        if (
            self._service == TENSORBOARD
            or is_late
            or not may_restart
            or _is_local(error)
            or _REFUSAL.search(str(error))
        ):
            return False
        for each in open_runs:  # they start again at the step that the server has
            each.detach()
        restart_client()
        run.retry_at = now + RETRY_S
        return True

    def _give_up(self, run: FollowedRun, error: Exception) -> None:
        """Store why a run is not sent any more."""
        run.is_done, run.problem = True, _one_line(error)
        may_recover = self._task.until_end and run.folder.is_active()
        if not (_is_local(error) or _OF_ONE_RUN.search(str(error)) or may_recover):
            self._unreachable = run.problem
        _write_problem(run.folder.path, self._service, run.problem)

    def _start(self, run: FollowedRun) -> bool:
        """Start the run at the service, and return whether it has started."""
        path, task = run.folder.path, self._task
        if not run.acquire(lock_of(path, self._service)):
            run.is_done = not task.until_end
            return False
        if time.monotonic() < run.retry_at:
            return False
        name = RunRecord.load(run.folder).run.pack.sweep
        content = run.folder.run()
        if self._service == TENSORBOARD:
            run.service = TensorBoardRun(path)
            run.service.upload.write(path, self._service)
            return True
        sweep = task.sweep
        if sweep is None and name is not None:
            sweep = sweep_folder(path.parent.parent, name)
        labels = labels_of(content, read_plan(sweep) if sweep is not None and has_plan(sweep) else None)
        tracking = content["config"]["tracking"]
        run.service = WandbRun(
            path, config_of(content), labels, tracking, self._service, task.process,
            may_end=task.until_end or not run.folder.is_active(),
        )  # fmt: skip
        run.resources.callback(run.service.close)
        run.service.upload.write(path, self._service)
        return True


def _is_local(error: Exception) -> bool:
    return isinstance(error, NormlabError) or getattr(error, "errno", None) in _LOCAL_ERRORS


def _write_problem(run: Path, service: str, problem: str) -> None:
    with contextlib.suppress(StoreError):
        replace(Upload.read(run, service), problem=problem).write(run, service)


def _one_line(error: Exception) -> str:
    text = str(error) if isinstance(error, NormlabError) else f"{type(error).__name__}: {error}"
    line = " ".join(text.split()).rstrip(".")[:300]
    if _is_local(error) or not _REFUSAL.search(line):
        return line
    has_variable = bool(os.environ.get("WANDB_API_KEY"))
    what_to_do = "set another WANDB_API_KEY" if has_variable else "`wandb login --relogin` stores another key"
    return f"the login was rejected; {what_to_do}: {line}"


def _lower_priority() -> None:
    """Let the training, which may use all cores, run first."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # Linux may divide the cores among sessions, and has a niceness for each
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def main(task: Task, locks: Sequence[int | None]) -> int:
    """Follow the runs of a task, write to their folders what the service has, and return the exit code."""
    with contextlib.closing(Follower(task, locks)) as follower:
        if not (os.environ.get("WANDB_SWEEP_ID") and task.process and len(task.runs) == 1):
            os.environ.pop("WANDB_RUN_ID", None)  # the id of one run, which the agent of a W&B sweep sets
        service = task.service
        if service != TENSORBOARD:
            mode = wandb_environment().mode
            if service == "auto" or (service == "online" and mode == NO_LOGIN):
                service = mode
        if service not in ("online", "offline", TENSORBOARD):
            for run in task.runs:
                _write_problem(run, service, uploads.NO_LOGIN if service == NO_LOGIN else uploads.DISABLED)
            return int(service == NO_LOGIN)
        follower.follow(service)
        return int(any(run.problem for run in follower.runs))


if __name__ == "__main__":
    _lower_priority()
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # W&B's reports about its own errors
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    code, (task, locks) = 2, Task.from_json(sys.stdin.read())
    for lock in locks:
        if lock is not None:
            os.set_inheritable(lock, False)  # W&B's process may outlive this one
    try:
        code = main(task, locks)
    except Exception as error:
        for run in task.runs:
            _write_problem(run, task.service, _one_line(error))
    except SystemExit:
        pass
    if code:
        os._exit(code)  # W&B's client would wait for a server that is gone; its process ends with this one
