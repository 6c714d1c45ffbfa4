"""The process that follows the record of runs and sends it to W&B: `python -m normlab.tracking.follower`.

It reads the record and nothing else, so training neither waits for W&B nor notices its failure. It ends when all
runs have ended and W&B has every number, or when it gives up. A follower that is started later continues at the
step that W&B has: steps that a resumed run trains again are not sent again. Standard input holds the task.
"""

import contextlib
import json
import math
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from normlab.base.errors import NormlabError, StoreError, one_line
from normlab.store.format import RUNNING
from normlab.store.lock import try_lock
from normlab.store.plans import has_plan, read_plan, sweep_folder
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.tracking.background import FollowerTask
from normlab.tracking.payloads import StepReader, labels_of, summary_of
from normlab.tracking.uploads import Upload, is_sending, lock_of
from normlab.tracking.wandb import NO_LOGIN, WandbRun, restart_client, wandb_environment

NICENESS = 10
"""Of the follower and of W&B's process: on a core that the training fills, they get about a tenth."""
PAUSE_S = 1.0
"""Seconds between two readings of a record; W&B's client sends every 15 s."""
RETRY_S, LONGEST_RETRY_S = 15.0, 60.0
"""Seconds after a failure before the next attempt: after each further failure twice as many, up to these."""
GIVE_UP_S = 60.0
"""Seconds after the end of all runs during which the follower still tries to reach the server."""


@dataclass(eq=False, slots=True)
class FollowedRun:
    folder: RunFolder
    lock: int | None = None
    """The file descriptor of the run's lock, with which no other follower sends the run."""
    wandb: WandbRun | None = None
    steps: StepReader | None = None


class Follower:
    """Sends runs to W&B, online or offline, until they have ended."""

    def __init__(self, task: FollowerTask, mode: str) -> None:
        self._task, self._mode = task, mode
        self._left = [FollowedRun(RunFolder(path)) for path in task.runs]
        self._last_try_at = math.inf
        """Until when a failure leads to another attempt: `GIVE_UP_S` after no run was seen to train."""
        self._failures = 0
        self._problem = ""
        self.has_failed = False

    def follow(self) -> None:
        while self._left:
            if any(run.folder.is_active() for run in self._left):
                self._last_try_at = math.inf
            else:
                self._last_try_at = min(self._last_try_at, time.monotonic() + GIVE_UP_S)
            failures = self._failures
            for run in list(self._left):
                try:
                    if run in self._left and self._advance(run):
                        self._end(run)
                except Exception as error:
                    self._fail(run, describe(error))
            pause = PAUSE_S
            if self._failures > failures:
                pause = min(RETRY_S * 2**failures, LONGEST_RETRY_S)
            if self._left:
                time.sleep(pause)

    def _fail(self, run: FollowedRun, problem: str) -> None:
        """Start all runs again, or give up if they have ended some time ago."""
        if self._task.until_end and time.monotonic() <= self._last_try_at:
            self._failures += 1
            # They start again, at the step that the server has.
            for followed in self._left:
                followed.wandb = followed.steps = None
            restart_client()
            return
        # What two runs in turn have is a problem of the server: the others would wait for it too.
        given_up = list(self._left) if problem == self._problem else [run]
        self._problem = problem
        for followed in given_up:
            self._end(followed, problem)

    def _advance(self, run: FollowedRun) -> bool:
        """Send the new steps of a run, and return whether that is all there is."""
        path = run.folder.path
        if run.lock is None and not is_sending(path):
            run.lock = try_lock(lock_of(path))
        if run.lock is None:  # another follower sends it
            return not self._task.until_end
        if run.wandb is None:
            run.wandb = self._start(run.folder)
            run.wandb.upload.write(path)
        if run.steps is None:
            run.steps = StepReader(run.folder, run.wandb.next_step)
        # The rows are read last: if the run has ended before, nothing is added to them.
        record = RunRecord.load(run.folder)
        for step, payload in run.steps.read(record.state):
            run.wandb.log(step, payload)
        if record.state == RUNNING and self._task.until_end:
            return False
        run.wandb.finish(summary_of(record), record.state)
        replace(run.wandb.upload, problem="").write(path)
        return True

    def _start(self, folder: RunFolder) -> WandbRun:
        """Start a run at W&B with the labels of its sweep: that of the task, or else the one that trained it."""
        run, sweep = folder.run(), self._task.sweep
        if sweep is None:
            name = RunRecord.load(folder).run.pack.sweep
            if name is not None:
                sweep = sweep_folder(folder.path.parent.parent, name)
        plan = None
        if sweep is not None and has_plan(sweep):
            plan = read_plan(sweep)
        labels = labels_of(run, plan)
        # A run that trains goes on, so that sync must not end it at W&B.
        may_end = self._task.until_end or not folder.is_active()
        return WandbRun(folder.path, run, labels, self._mode, self._task.process, may_end=may_end)

    def _end(self, run: FollowedRun, problem: str = "") -> None:
        """Stop to follow a run, and store the problem if it was given up."""
        self._left.remove(run)
        if problem:
            self.has_failed = True
            write_problem(run.folder.path, problem)
        if run.lock is not None:
            os.close(run.lock)


def describe(error: Exception) -> str:
    """Return an error in a line for the user; one that is not ours with its type, because its text may be short."""
    message = str(error)
    if not isinstance(error, NormlabError):
        message = f"{type(error).__name__}: {error}"
    return one_line(message)[:300]


def write_problem(run: Path, problem: str) -> None:
    with contextlib.suppress(StoreError):
        replace(Upload.read(run), problem=problem).write(run)


def main(task: FollowerTask) -> int:
    """Follow the runs of a task, write to their folders what W&B has, and return the exit code."""
    mode = task.mode
    try:
        current, _ = wandb_environment()
        if mode == "auto" or (mode == "online" and current == NO_LOGIN):
            mode = current
        if mode in ("online", "offline"):
            follower = Follower(task, mode)
            follower.follow()
            return int(follower.has_failed)
        problem = "no login; `wandb login` makes one" if mode == NO_LOGIN else f"the mode of W&B is {mode}"
    except Exception as error:
        problem = describe(error)
    for run in task.runs:
        write_problem(run, problem)
    return 1


def _read_task() -> FollowerTask:
    """Return the task that `background.start_follower` has written as JSON, where paths are texts."""
    content: dict[str, Any] = json.load(sys.stdin)
    content["runs"] = [Path(run) for run in content["runs"]]
    if content["sweep"] is not None:
        content["sweep"] = Path(content["sweep"])
    return FollowerTask(**content)


if __name__ == "__main__":
    # The training, which may use all cores, runs first.
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # Linux may divide the cores among sessions, and has a niceness for each
        Path("/proc/self/autogroup").write_text(str(NICENESS))
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # W&B's reports about its own errors
    code = main(_read_task())
    if code:
        os._exit(code)  # W&B's client would wait for a server that is gone; its process ends with this one
