"""The process that follows the record of runs and sends it to W&B: `python -m normlab.tracking.follower JSON`.

It reads the record and nothing else, so training neither waits for a service nor notices its failure. It ends when the
runs have ended and the service has everything. A follower that is started later continues at the step that the service
has.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normlab.errors import StoreError, notify
from normlab.store.format import FAILED, RUNNING
from normlab.store.lock import file_lock
from normlab.store.plans import has_plan, read_plan, sweep_folder
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.tracking.payloads import config_of, labels_of, payloads, summary_of
from normlab.tracking.background import LOCK_FILE, NO_LOGIN, sync_hint
from normlab.tracking.wandb import WandbRun, wandb_environment

POLL_S = 1.0
"""Shortest time between two readings of a record."""
READING_SHARE = 0.05
"""Largest share of its time that the follower reads, because a reading of a long record takes long."""
RETRY_S = 15.0
"""Seconds between two attempts to reach the server."""
GIVE_UP_S = 60.0
"""Seconds after the end of a run after which no more attempts are made."""


@dataclass(slots=True)
class FollowedRun:
    """A run that is being sent."""

    folder: RunFolder
    service: WandbRun | None = None
    retry_at: float = 0.0
    """When to try to reach the server again."""
    problem: str = ""
    """Why the service does not have everything; empty if it has."""
    is_done: bool = False
    ended_at: float = field(default=float("inf"))


class Follower:
    """Sends runs to W&B until they have ended.

    Args:
        folders: The folders of the runs.
        sweep: The folder of the sweep from which they get their labels; None for the sweep that trained them.
        mode: online or offline.
        process: The process whose use of resources is logged; None logs none.
        until_end: Whether to wait for the end of the runs, or to send what they have now.
    """

    def __init__(
        self, folders: Sequence[Path], sweep: Path | None, mode: str, process: int | None, *, until_end: bool
    ) -> None:
        self.runs = [FollowedRun(RunFolder(folder)) for folder in folders]
        self._sweep, self._mode, self._process, self._until_end = sweep, mode, process, until_end

    def follow(self) -> None:
        """Send all runs."""
        while not all(run.is_done for run in self.runs):
            start = time.monotonic()
            for run in self.runs:
                if not run.is_done:
                    self._advance(run)
            seconds = time.monotonic() - start
            if not all(run.is_done for run in self.runs):
                time.sleep(max(POLL_S, seconds / READING_SHARE))

    def _advance(self, run: FollowedRun) -> None:
        """Send the new steps of a run, and finish a run that has ended."""
        try:
            record = RunRecord.read(run.folder)  # before the rows, which are complete if it has ended
            # A run writes its last status twice while it holds its lock.
            is_ended = record.state != RUNNING and not run.folder.is_active()
            run.ended_at = min(run.ended_at, time.monotonic()) if is_ended else float("inf")
            if run.service is None and not self._start(run):
                return
            assert run.service is not None
            content = run.folder.run()
            for step, payload in payloads(run.folder, content, run.service.next_step, is_ended=is_ended):
                run.service.log(step, payload)
            if is_ended or not self._until_end:
                run.is_done = True
                run.service.finish(summary_of(record), is_failed=record.state == FAILED)
        except Exception as error:
            run.is_done, run.problem = True, _one_line(error)

    def _start(self, run: FollowedRun) -> bool:
        """Start the run at the service, and return whether it has started."""
        if time.monotonic() < run.retry_at:
            return False
        content, sweep = run.folder.run(), self._sweep
        if sweep is None and (name := (content.get("pack") or {}).get("sweep")):
            sweep = sweep_folder(run.folder.path.parent.parent, name)
        plan = read_plan(sweep) if sweep is not None and has_plan(sweep) else None
        try:
            run.service = WandbRun(
                run.folder.path, config_of(content), labels_of(content, plan), content["config"]["tracking"],
                self._mode, self._process,
            )  # fmt: skip
        except (OSError, StoreError):
            raise  # of this machine
        except Exception as error:
            if _is_refusal(error) or not self._until_end or time.monotonic() > run.ended_at + GIVE_UP_S:
                raise
            run.retry_at = time.monotonic() + RETRY_S
            return False
        return True


def report(runs: Sequence[FollowedRun]) -> list[str]:
    """Return the lines for the user about runs that were sent, or were not."""
    lines: list[str] = []
    if problems := [run for run in runs if run.problem]:
        which = problems[0].folder.run_id if len(problems) == 1 else f"{len(problems)} runs"
        lines.append(f"W&B did not receive all of {which} ({problems[0].problem}); {sync_hint(_paths(problems))}")
    sent = [run.service.where for run in runs if run.service is not None and not run.problem]
    if len(sent) == 1:
        lines.append(f"W&B: {sent[0]}")
    elif sent:
        lines.append(f"W&B: {len(sent)} runs, the first at {sent[0]}")
    return lines


def _paths(runs: Sequence[FollowedRun]) -> list[Path]:
    return [run.folder.path for run in runs]


def _is_refusal(error: Exception) -> bool:
    """Whether the server rejected the login or the request, so that another attempt is of no use."""
    return any(text in str(error) for text in ("401", "403", "API key", "permission denied"))


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")[:300]


def main(task: dict[str, Any]) -> int:
    """Follow the runs of a task, print what became of them, and return the exit code.

    Args:
        task: The arguments of `background.start_follower`.
    """
    folders = [Path(each) for each in task["runs"]]
    mode = task["mode"]
    with contextlib.ExitStack() as locks:
        folders = [folder for folder in folders if _acquire(locks, folder, wait=task["until_end"])]
        environment = wandb_environment()
        if mode == "auto":
            mode = environment.mode
        if mode == "online" and environment.mode == "no login":
            mode = "no login"
        if mode == "no login":
            _print(NO_LOGIN + sync_hint(folders))
            return 1
        if mode not in ("online", "offline"):
            return 0  # WANDB_MODE=disabled
        sweep = Path(task["sweep"]) if task["sweep"] else None
        follower = Follower(folders, sweep, mode, task["process"], until_end=task["until_end"])
        follower.follow()
        for line in report(follower.runs):
            _print(line)
        return int(any(run.problem for run in follower.runs))


def _acquire(locks: contextlib.ExitStack, folder: Path, *, wait: bool) -> bool:
    """Return whether no other follower sends the run; `wait` for one that was started for an earlier process of it."""
    while True:
        try:
            locks.enter_context(file_lock(folder / LOCK_FILE, f"tracking of run {folder.name}"))
        except StoreError:
            if not wait:
                _print(f"run {folder.name}: another process sends it to W&B already")
                return False
            time.sleep(POLL_S)
        else:
            return True


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        notify(line)


if __name__ == "__main__":
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # W&B's reports about its own errors
    code = main(json.loads(sys.argv[1]))
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    # After a failure, W&B's process may still wait for a server that is gone. It is in the group that this one leads.
    if code and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    sys.exit(code)
