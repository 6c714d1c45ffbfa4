"""Start processes that send runs to W&B and TensorBoard (`follower.py`). The process that trains imports neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from normlab.errors import notify
from normlab.store.plans import Plan, run_of
from normlab.tracking.uploads import has_ended, services_of, upload_lines

if TYPE_CHECKING:
    from normlab.config.schema import TrackingConfig

WAIT_S = 10.0
"""Longest time, in seconds, that a command waits for the followers of its runs."""
_started: list[tuple[Task, subprocess.Popen[str]]] = []
"""The followers that this process has started and not waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    runs: Sequence[Path]
    service: str
    """tensorboard, or the mode of W&B: auto, online or offline."""
    process: int | None = None
    """Id of the training process for the system metrics; None: no system metrics."""
    sweep: Path | None = None
    """The folder of the sweep whose overrides label the runs; None: each run uses the sweep that trained it."""
    until_end: bool = True
    """Whether to follow the runs until they end, or to send what they have now."""


def follow_training(runs: Sequence[Path], tracking: TrackingConfig) -> None:
    """Start a follower for each service to which the runs that this process trains are sent."""
    for service in services_of(tracking.wandb, tracking.also):
        task = Task(runs=runs, service=service, process=os.getpid())
        try:
            _started.append((task, start_follower(task)))
        except OSError as error:  # the system has no memory for another process; the run trains without it
            notify(f"the process that sends to {service} did not start: {error.strerror}")


def start_follower(task: Task) -> subprocess.Popen[str]:
    """Start a follower, in a session of its own.

    Raises:
        OSError: The system has no memory for another process.
    """
    follower = subprocess.Popen(
        [sys.executable, "-P", "-m", "normlab.tracking.follower"],
        stdin=subprocess.PIPE,  # an argument must not be longer than 128 KiB
        # Not those of this process: a shell pipeline ends only when every process has closed its output.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C and a closed terminal do not end it
    )
    assert follower.stdin is not None
    with follower.stdin:
        json.dump(asdict(task), follower.stdin, default=str)
    return follower


def wait_for_followers() -> None:
    """Wait at most `WAIT_S` for the followers of this process, and print what the services have of its runs."""
    deadline = time.monotonic() + WAIT_S
    for task, follower in _started:
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            follower.wait(timeout=max(0.0, deadline - time.monotonic()))
        for line in upload_lines(task.runs, task.service, list(map(os.path.relpath, task.runs))):
            notify(line)
    _started.clear()


def report_uploads(sweep: Path, plan: Plan) -> None:
    """Wait at most `WAIT_S` for the followers of a sweep's runs, and print what the services have of these runs."""
    runs = [folder.path for run in plan.runs if (folder := run_of(sweep, run)).exists()]
    tracking = plan.runs[0].config["tracking"]
    deadline = time.monotonic() + WAIT_S
    for service in services_of(tracking["wandb"], tracking["also"]) if runs else ():
        while time.monotonic() < deadline and not all(has_ended(run, service) for run in runs):
            time.sleep(0.1)
        for line in upload_lines(runs, service, [os.path.relpath(sweep)]):
            notify(line)
