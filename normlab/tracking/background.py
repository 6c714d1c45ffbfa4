"""Start processes that send runs to W&B and TensorBoard (`follower.py`). The process that trains imports neither."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from normlab.errors import notify
from normlab.store.files import write_atomic
from normlab.store.lock import is_locked

if TYPE_CHECKING:
    from normlab.config.schema import TrackingConfig

TENSORBOARD = "tensorboard"
STATE_FILE = "wandb.json"
WAIT_S = 10.0
"""Longest wait of a command for the followers that it has started."""
NOTHING_SENT = "no login at W&B, so nothing was sent; after `wandb login`, "
_followers: list[subprocess.Popen[str]] = []
_not_sent: list[Path] = []
"""Runs that need a login."""


@dataclass(frozen=True, slots=True)
class WandbState:
    """What is known of a run at W&B, in the run's folder."""

    id: str = ""
    project: str = ""
    entity: str = ""
    url: str = ""
    is_complete: bool = False
    """Whether the server had the whole record when a follower last ended."""

    @classmethod
    def read(cls, folder: Path) -> WandbState:
        """Return the state in a run's folder; the default if there is none."""
        try:
            return cls(**json.loads((folder / STATE_FILE).read_bytes()))
        except (OSError, ValueError, TypeError):
            return cls()

    def write(self, folder: Path) -> None:
        """Write the state."""
        write_atomic(folder / STATE_FILE, json.dumps(asdict(self)).encode())


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

    def to_json(self) -> str:
        """Return the task as text, with absolute paths."""
        paths = {"runs": [str(run.absolute()) for run in self.runs], "sweep": self.sweep and str(self.sweep.absolute())}
        return json.dumps(asdict(self) | paths)

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Return the task that `to_json` wrote."""
        fields = json.loads(text)
        sweep = fields["sweep"]
        return cls(**fields | {"runs": [Path(run) for run in fields["runs"]], "sweep": Path(sweep) if sweep else None})


def follow_training(runs: Sequence[Path], tracking: TrackingConfig) -> None:
    """Start a follower for each service to which the runs that this process trains are sent."""
    for service in services_of(tracking):
        if service == "auto" and not may_have_login():
            _not_sent.extend(runs)
            continue
        try:
            _followers.append(start_follower(Task(runs=list(runs), service=service, process=os.getpid())))
        except OSError as error:  # no process or memory is left; the run needs neither
            notify(f"the follower of {service} did not start ({error.strerror}); {sync_hint(runs, service)}")


def services_of(tracking: TrackingConfig) -> list[str]:
    """Return the services of a run, as in `Task.service`."""
    mode = mode_of(tracking.wandb)
    return [*([] if mode in ("off", "disabled") else [mode]), *tracking.also]


def start_follower(task: Task) -> subprocess.Popen[str]:
    """Start a follower, in a session of its own."""
    follower = subprocess.Popen(
        [sys.executable, "-P", "-m", "normlab.tracking.follower"],
        stdin=subprocess.PIPE,  # an argument must not be longer than 128 KiB
        stdout=subprocess.DEVNULL,
        # A pipe, because a shell pipeline ends only when every process has closed its output.
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C and a closed terminal do not end it
    )
    assert follower.stdin is not None
    with follower.stdin:
        follower.stdin.write(task.to_json())
    follower.stdin = None  # `communicate` would write to it
    return follower


def mode_of(mode: str) -> str:
    """Return the mode of W&B: `tracking.wandb`, or for auto WANDB_MODE if it is set."""
    chosen = os.environ.get("WANDB_MODE") if mode == "auto" else None
    return {"run": "online", "shared": "online", "dryrun": "offline"}.get(chosen or mode, chosen or mode)


def wait_for_followers() -> None:
    """Wait at most `WAIT_S` for the followers of this process, and print what they report about the runs."""
    if _not_sent:
        notify(NOTHING_SENT + sync_hint(_not_sent))
        _not_sent.clear()
    deadline = time.monotonic() + WAIT_S
    try:
        while _followers:
            lines = _followers[-1].communicate(timeout=max(0.0, deadline - time.monotonic()))[1]
            _followers.pop()
            with suppress(OSError, ValueError):
                sys.stderr.write(lines)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        notify("the upload continues in the background; if it fails, `normlab sync RUN` sends the rest")


def not_complete(runs: Sequence[Path]) -> list[Path]:
    """Return the runs that W&B does not have completely, and that no follower sends."""
    return [run for run in runs if not (WandbState.read(run).is_complete or is_locked(lock_of(run, "online")))]


def lock_of(run: Path, service: str) -> Path:
    """Return the file that a follower locks while it sends a run to a service."""
    return run / ("tensorboard.lock" if service == TENSORBOARD else "wandb.lock")


def sync_hint(paths: Sequence[Path], service: str = "online") -> str:
    """Return the text that names the command for sending runs."""
    names = " ".join(shlex.quote(os.path.relpath(path)) for path in paths[:3])
    to = f"--to {TENSORBOARD} " if service == TENSORBOARD else ""
    return f"`normlab sync {to}{names}{' ...' if len(paths) > 3 else ''}` sends what is missing"


def may_have_login() -> bool:
    """Whether there may be credentials for W&B. Only the follower imports wandb, which knows."""
    keys = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    return any(os.environ.get(key) for key in keys) or os.path.isfile(netrc_path())


def netrc_path() -> str:
    """Return the path of the file in which `wandb login` stores keys."""
    return os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")
