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
from normlab.store.plans import Plan, run_of

if TYPE_CHECKING:
    from normlab.config.schema import TrackingConfig

TENSORBOARD = "tensorboard"
MODES = ("auto", "online", "offline", "off", "disabled")
"""The modes of W&B; the last two send nothing."""
STATE_FILE = "wandb.json"
WAIT_S = 10.0
"""Longest wait of a command for the followers that it has started."""
NOTHING_SENT = "no login at W&B, so nothing was sent; after `wandb login`, "
STARTING_S = 2.0
"""Seconds that a follower may take until it has locked its runs."""
_followers: list[tuple[Task, subprocess.Popen[str]]] = []
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
    """Whether the run had ended, and the server had every step of its record, when a follower last ended."""
    problem: str = ""
    """Why a follower gave up; empty if none did."""

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
        task = Task(runs=list(runs), service=service, process=os.getpid())
        try:
            _followers.append((task, start_follower(task)))
        except OSError as error:  # the system has no memory for another process; the run trains without it
            notify(f"the follower of {service} did not start ({error.strerror}); {sync_hint(runs, service)}")


def services_of(tracking: TrackingConfig) -> list[str]:
    """Return the services of a run, as in `Task.service`."""
    mode = mode_of(tracking.wandb)
    if mode not in MODES:
        notify(f"WANDB_MODE={mode}: W&B has no such mode, and receives nothing; set online, offline or disabled")
    return [*([mode] if mode in MODES[:3] else []), *tracking.also]


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
    return current_name((mode == "auto" and os.environ.get("WANDB_MODE")) or mode)


def current_name(mode: str) -> str:
    """Return the name of a mode of W&B, which has older names too."""
    return {"run": "online", "shared": "online", "dryrun": "offline"}.get(mode, mode)


def wait_for_followers() -> None:
    """Wait at most `WAIT_S` for the followers of this process, and print what they report about the runs."""
    if _not_sent:
        notify(NOTHING_SENT + sync_hint(_not_sent))
        _not_sent.clear()
    deadline = time.monotonic() + WAIT_S
    try:
        while _followers:
            task, follower = _followers[-1]
            lines = follower.communicate(timeout=max(0.0, deadline - time.monotonic()))[1]
            _followers.pop()
            with suppress(OSError, ValueError):
                sys.stderr.write(lines)
            if follower.returncode and not lines:
                notify(f"the follower of {task.service} was killed; {sync_hint(task.runs, task.service)}")
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        notify("the upload continues in the background; if it fails, `normlab sync RUN` sends the rest")


def report_uploads(sweep: Path, plan: Plan) -> None:
    """Wait at most `WAIT_S` for the followers of a sweep's runs, and print what W&B has of them."""
    tracked = [run for run in plan.runs if mode_of(run.config["tracking"]["wandb"]) in ("auto", "online")]
    runs = [folder.path for run in tracked if (folder := run_of(sweep, run)).exists()]
    start = time.monotonic()
    while True:
        states = {run: WandbState.read(run) for run in runs}
        sending = [run for run in runs if is_locked(lock_of(run, "online"))]
        left = [run for run in runs if not states[run].is_complete and run not in sending]
        is_starting = any(not states[run].problem for run in left) and may_have_login()
        if time.monotonic() > start + (WAIT_S if sending else STARTING_S if is_starting else 0):
            break
        time.sleep(0.1)
    urls = [state.url for state in states.values() if state.is_complete]
    if urls:
        notify(f"W&B: {urls[0]}" if len(urls) == 1 else f"W&B: {len(urls)} runs; of the first, {urls[0]}")
    if sending:
        notify(f"the upload of {len(sending)} runs continues in the background; if it fails, {sync_hint([sweep])}")
    if left and not may_have_login():
        notify(NOTHING_SENT + sync_hint([sweep]))
    elif left:
        problem = next((f" ({state.problem})" for run in left if (state := states[run]).problem), "")
        notify(f"W&B did not receive all of {len(left)} runs{problem}; {sync_hint([sweep])}")


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
