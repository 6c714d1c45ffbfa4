"""Start the process that sends runs to W&B (`follower.py`). The process that trains imports no wandb."""

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

from normlab.errors import notify
from normlab.store.files import write_atomic
from normlab.store.lock import is_locked

LOCK_FILE = "tracking.lock"
"""In a run's folder: held by the follower that sends the run."""
STATE_FILE = "wandb.json"
WAIT_S = 10.0
"""Longest wait of a command for the followers that it has started."""
NO_LOGIN = "no login at W&B, so nothing was sent; after `wandb login`, "
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


def start_follower(
    runs: Sequence[Path], mode: str, *, process: int | None = None, sweep: Path | None = None, until_end: bool = True
) -> subprocess.Popen[str] | None:
    """Start a follower of some runs, in a session of its own; None if it would have nothing to do.

    Args:
        runs: The folders of the runs.
        mode: `tracking.wandb`.
        process: The process that trains them, whose use of resources is logged; None logs none.
        sweep: The folder of the sweep from which they get their labels; None for the sweep that trained them.
        until_end: Whether to follow the runs until they end, or to send what they have now.
    """
    mode = mode_of(mode)
    if mode in ("off", "disabled"):
        return None
    if mode == "auto" and not may_have_login():
        _not_sent.extend(runs)
        return None
    task = {
        "runs": [str(path.absolute()) for path in runs],
        "mode": mode,
        "process": process,
        "sweep": None if sweep is None else str(sweep.absolute()),
        "until_end": until_end,
    }
    follower = subprocess.Popen(
        [sys.executable, "-P", "-m", "normlab.tracking.follower", json.dumps(task)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # A pipe, because a shell waits for everyone who holds its terminal or its pipe.
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C and a closed terminal do not end it
    )
    _followers.append(follower)
    return follower


def mode_of(mode: str) -> str:
    """Return the mode of W&B: `tracking.wandb`, or for auto WANDB_MODE if it is set."""
    return os.environ.get("WANDB_MODE", mode) if mode == "auto" else mode


def wait_for_followers() -> None:
    """Wait at most `WAIT_S` for the followers of this process, and print what they report about the runs."""
    if _not_sent:
        notify(NO_LOGIN + sync_hint(_not_sent))
        _not_sent.clear()
    deadline = time.monotonic() + WAIT_S
    try:
        while _followers:
            lines = _followers[-1].communicate(timeout=max(0.0, deadline - time.monotonic()))[1]
            _followers.pop()
            with suppress(OSError, ValueError):
                sys.stderr.write(lines)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        notify("W&B still receives data, from a process in the background; `normlab sync` sends what it could not")


def not_complete(runs: Sequence[Path]) -> list[Path]:
    """Return the runs that W&B does not have completely, and that no follower sends."""
    return [run for run in runs if not (WandbState.read(run).is_complete or is_locked(run / LOCK_FILE))]


def sync_hint(paths: Sequence[Path]) -> str:
    """Return the text that names the command for sending runs."""
    names = " ".join(shlex.quote(os.path.relpath(path)) for path in paths[:3])
    return f"`normlab sync {names}{' ...' if len(paths) > 3 else ''}` sends what is missing"


def may_have_login() -> bool:
    """Whether there may be credentials for W&B. Only the follower imports wandb, which knows."""
    keys = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    return any(os.environ.get(key) for key in keys) or os.path.isfile(netrc_path())


def netrc_path() -> str:
    """Return the path of the file in which `wandb login` stores keys."""
    return os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")
