"""Start the process that sends runs to W&B (`follower.py`). The process that trains does not import wandb."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from normlab.base.errors import notify
from normlab.store.plans import Plan, run_of
from normlab.system.processes import start_module
from normlab.tracking.uploads import has_ended, mode_of, upload_lines

WAIT_S = 10.0
"""Longest time, in seconds, that a command waits for the followers of its runs."""
_started: list[tuple[FollowerTask, subprocess.Popen[str]]] = []
"""The followers that this process has started and not waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerTask:
    runs: Sequence[Path]
    mode: str
    """The mode of W&B: auto, online or offline."""
    process: int | None = None
    """Id of the training process for the system metrics; None: no system metrics."""
    sweep: Path | None = None
    """The folder of the sweep whose overrides label the runs; None: each run uses the sweep that trained it."""
    until_end: bool = True
    """Whether to follow the runs until they end, or to send what they have now."""


def follow_training(runs: Sequence[Path], wandb: str) -> None:
    """Start a follower for the runs that this process trains, unless `tracking.wandb` or W&B's mode forbids it."""
    mode = mode_of(wandb)
    if mode is None:
        return
    task = FollowerTask(runs=runs, mode=mode, process=os.getpid())
    try:
        _started.append((task, start_follower(task)))
    except OSError as error:  # the system has no memory for another process; the run trains without it
        notify(f"the process that sends to W&B did not start: {error.strerror}")


def start_follower(task: FollowerTask) -> subprocess.Popen[str]:
    """Start a follower, in a session of its own.

    Raises:
        OSError: The system has no memory for another process.
    """
    # A pipe: an argument must not be longer than 128 KiB. The outputs are not those of this process: a shell pipeline
    # ends only when every process has closed its output.
    nothing = subprocess.DEVNULL
    follower = start_module(
        "normlab.tracking.follower", stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, text=True
    )
    assert follower.stdin is not None
    with follower.stdin:
        json.dump(asdict(task), follower.stdin, default=str)
    return follower


def wait_for_followers() -> None:
    """Wait at most `WAIT_S` for the followers of this process, and print what W&B has of its runs."""
    deadline = time.monotonic() + WAIT_S
    for task, follower in _started:
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            follower.wait(timeout=max(0.0, deadline - time.monotonic()))
        names = [os.path.relpath(run) for run in task.runs]
        for line in upload_lines(task.runs, names, has_follower=follower.poll() is None):
            notify(line)
    _started.clear()


def report_uploads(sweep: Path, plan: Plan) -> None:
    """Wait at most `WAIT_S` for the followers of a sweep's runs, and print what W&B has of these runs."""
    runs: list[Path] = []
    for run in plan.runs:
        folder = run_of(sweep, run)
        if folder.exists():
            runs.append(folder.path)
    if not runs or mode_of(plan.runs[0].config["tracking"]["wandb"]) is None:
        return
    # The followers are processes of the workers, so that only their files tell when they end.
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and not all(map(has_ended, runs)):
        time.sleep(0.1)
    for line in upload_lines(runs, [os.path.relpath(sweep)]):
        notify(line)
