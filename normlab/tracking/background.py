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

from normlab.errors import StoreError, notify, warn
from normlab.store.files import check_links
from normlab.store.lock import try_lock
from normlab.store.plans import Plan, run_of
from normlab.tracking.settings import TENSORBOARD, may_have_login, services_of
from normlab.tracking.uploads import Upload, is_sending, lock_of, names_of, upload_lines

if TYPE_CHECKING:
    from normlab.config.schema import TrackingConfig

WAIT_S = 10.0
"""Longest time, in seconds, that a command waits for the followers of its runs."""
_tasks: list[tuple[Task, subprocess.Popen[str] | None]] = []
"""What the followers of this process do; without a follower where there is no login."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a follower does."""

    runs: list[Path]
    """The folders of the runs."""
    service: str
    """tensorboard, or the mode of W&B: auto, online or offline."""
    process: int | None = None
    """Id of the training process for the system metrics; None: no system metrics."""
    sweep: Path | None = None
    """The folder of the sweep whose overrides label the runs; None: each run uses the sweep that trained it."""
    until_end: bool = True
    """Whether to follow the runs until they end, or to send what they have now."""

    def to_json(self, locks: Sequence[int | None]) -> str:
        """Return the task as text, with absolute paths, and the file descriptors of the locks of the runs."""
        paths = {"runs": [str(run.absolute()) for run in self.runs], "sweep": self.sweep and str(self.sweep.absolute())}
        return json.dumps(asdict(self) | paths | {"locks": locks})

    @classmethod
    def from_json(cls, text: str) -> tuple[Task, list[int | None]]:
        """Return the task and the descriptors that `to_json` wrote."""
        fields = json.loads(text)
        sweep, locks = fields["sweep"], fields.pop("locks")
        paths = {"runs": [Path(run) for run in fields["runs"]], "sweep": Path(sweep) if sweep else None}
        return cls(**fields | paths), locks


def follow_training(runs: Sequence[Path], tracking: TrackingConfig) -> None:
    """Start a follower for each service to which the runs that this process trains are sent."""
    for service in services_of(tracking.wandb, tracking.also):
        task = Task(runs=list(runs), service=service, process=os.getpid())
        follower = None
        if service in ("offline", TENSORBOARD) or may_have_login():
            try:
                follower = start_follower(task)
            except OSError as error:  # the system has no memory for another process; the run trains without it
                notify(f"the process that sends to {service} did not start: {error.strerror}")
            except StoreError as error:  # what the service has of the run is damaged; training does not need it
                warn(error)
        _tasks.append((task, follower))


def start_follower(task: Task) -> subprocess.Popen[str]:
    """Start a follower, in a session of its own.

    If it follows runs to their end, it holds their locks from the first moment, so that no other process has to guess
    whether it is starting or was killed.

    Raises:
        OSError: The system has no memory for another process.
        StoreError: A link leads out of the folder of a run, or what a service has of the run cannot be read.
    """
    for run in task.runs:
        check_links(run)
        Upload.read(run, task.service)
    locks: list[int | None] = [None] * len(task.runs)
    try:
        for index, run in enumerate(task.runs if task.until_end else ()):
            with suppress(OSError):  # the follower tries again, and reports it
                locks[index] = try_lock(lock_of(run, task.service))
        follower = subprocess.Popen(
            [sys.executable, "-P", "-m", "normlab.tracking.follower"],
            stdin=subprocess.PIPE,  # an argument must not be longer than 128 KiB
            # Not those of this process: a shell pipeline ends only when every process has closed its output.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C and a closed terminal do not end it
            pass_fds=[lock for lock in locks if lock is not None],
        )
    finally:
        for lock in locks:
            if lock is not None:
                os.close(lock)
    assert follower.stdin is not None
    with follower.stdin:
        follower.stdin.write(task.to_json(locks))
    return follower


def wait_for_followers() -> None:
    """Wait at most `WAIT_S` for the followers of this process, and print what the services have of its runs."""
    deadline = time.monotonic() + WAIT_S
    running: list[tuple[Task, subprocess.Popen[str] | None]] = []
    for task, follower in _tasks:
        try:
            if follower is not None:
                follower.wait(timeout=max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            running.append((task, follower))
        for line in upload_lines(task.runs, task.service, names_of(task.runs)):
            notify(line)
    _tasks[:] = running


def report_uploads(sweep: Path, plan: Plan) -> None:
    """Wait at most `WAIT_S` for the followers of a sweep's runs, and print what the services have of them."""
    by_options: dict[tuple[str, ...], list[Path]] = {}
    for run in plan.runs:
        if (folder := run_of(sweep, run)).exists():
            tracking = run.config["tracking"]
            by_options.setdefault((tracking["wandb"], *tracking["also"]), []).append(folder.path)
    runs: dict[str, list[Path]] = {}
    for (mode, *also), paths in by_options.items():
        for service in services_of(mode, also):
            runs.setdefault(service, []).extend(paths)
    start = time.monotonic()
    with suppress(KeyboardInterrupt):
        while time.monotonic() < start + WAIT_S and any(is_sending(run, key) for key in runs for run in runs[key]):
            time.sleep(0.1)
    for service, paths in runs.items():
        for line in upload_lines(paths, service, names_of([sweep])):
            notify(line)
