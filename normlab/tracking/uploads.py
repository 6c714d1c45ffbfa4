"""The services of a run, W&B's login as far as it is known without importing wandb, and what a service has of runs.

The follower writes what a service has into the run's folder; commands read it and print it as lines.
"""

from __future__ import annotations

import json
import netrc
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from normlab.parsing import from_json, read_at_most
from normlab.store.files import is_file_name, write_atomic
from normlab.store.lock import is_locked
from normlab.store.reading import LARGEST_RECORD

TENSORBOARD, WANDB = "tensorboard", "wandb"
"""The names of the files about an upload, and of the folders that TensorBoard and W&B offline write, in a run."""
NOT_SENT = "no process sends it, or none can write to its folder"


def services_of(wandb: str, also: Sequence[str]) -> list[str]:
    """Return the services of a run: auto, online or offline if W&B receives it, and tensorboard.

    Args:
        wandb: The option `tracking.wandb`.
        also: The option `tracking.also`.
    """
    mode = current_name(os.environ.get("WANDB_MODE") or wandb) if wandb == "auto" else wandb
    is_sent = mode not in ("off", "disabled") and (wandb != "auto" or mode == "offline" or may_have_login())
    return [*([mode] if is_sent else []), *also]


def current_name(mode: str) -> str:
    """Return the name of a mode of W&B, which has older names too."""
    return {"run": "online", "shared": "online", "dryrun": "offline"}.get(mode, mode)


def may_have_login() -> bool:
    """Whether there may be credentials for W&B's server. Only the follower, which imports wandb, knows its address."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:  # `wandb login` stores keys there
        hosts = netrc.netrc(os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    # `wandb login --host` writes the address of another server into the settings.
    folder = os.environ.get("WANDB_CONFIG_DIR") or os.path.expanduser("~/.config/wandb")
    if os.path.isfile(os.path.join(folder, "settings")):
        return bool(hosts)
    return urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc in hosts


@dataclass(frozen=True, slots=True)
class Upload:
    """What a service has of a run, in the run's folder."""

    id: str = ""
    project: str = ""
    entity: str = ""
    where: str = ""
    """The address of the run, or a folder in that of the run; empty before a follower reached the service."""
    problem: str = NOT_SENT
    """Why the service does not have everything; empty if it has what the run had when the last follower finished."""

    @classmethod
    def read(cls, run: Path, service: str) -> Upload:
        """Return the content of the file in a run's folder; the default if the file is missing or damaged.

        The next follower then asks the service, and writes the file anew.
        """
        try:
            upload = cls(**from_json(read_at_most(_file(run, service, "json"), LARGEST_RECORD)))
        except (OSError, ValueError, TypeError):
            return cls()
        has_names = all(name == "" or is_file_name(name) for name in (upload.id, upload.project, upload.entity))
        is_place = upload.where in ("", WANDB, TENSORBOARD) or re.fullmatch(r"https?://[!-~]+", str(upload.where))
        return upload if has_names and is_place and isinstance(upload.problem, str) else cls()

    def write(self, run: Path, service: str) -> None:
        """Write the file in a run's folder.

        Raises:
            StoreError: The file cannot be written.
        """
        write_atomic(_file(run, service, "json"), json.dumps(asdict(self)).encode())


def lock_of(run: Path, service: str) -> Path:
    """Return the file that a follower locks while it sends a run to a service."""
    return _file(run, service, "lock")


def is_sending(run: Path, service: str) -> bool:
    return is_locked(lock_of(run, service))


def has_ended(run: Path, service: str) -> bool:
    """Whether a follower has started to send a run to a service, and none sends it now."""
    return _file(run, service, "json").exists() and not is_sending(run, service)


def _file(run: Path, service: str, kind: str) -> Path:
    return run / f"{TENSORBOARD if service == TENSORBOARD else WANDB}.{kind}"


def upload_lines(runs: Sequence[Path], service: str, names: Sequence[str]) -> list[str]:
    """Return lines for the user about what a service has of some runs.

    Args:
        runs: The folders of the runs.
        service: The service, as in `Task.service`.
        names: The arguments of `normlab sync` that select these runs.
    """
    title, option = ("TensorBoard", ["--to", TENSORBOARD]) if service == TENSORBOARD else ("W&B", [])
    hint = f"`normlab sync {shlex.join([*option, *names])}` sends what is missing"
    sent: list[str] = []
    problems: list[str] = []
    sending = 0
    for run in runs:
        upload = Upload.read(run, service)
        if is_sending(run, service):
            sending += 1
        elif upload.problem:
            problems.append(upload.problem)
        else:
            sent.append(_shown(run, upload.where))
    lines: list[str] = []
    if sent:
        lines.append(f"{title}: {sent[0] if len(sent) == 1 else f'{_count(len(sent))}, the first: {sent[0]}'}")
    if sending:
        lines.append(f"{title}: sending {_count(sending)} continues in the background; if it fails, {hint}")
    if problems:
        lines.append(f"{title} lacks data of {_count(len(problems))} ({problems[0]}); {hint}")
    return lines


def _shown(run: Path, where: str) -> str:
    """Return the address of a run, or the command for the files in its folder."""
    folder = shlex.quote(os.path.relpath(run))
    commands = {TENSORBOARD: f"tensorboard --logdir {folder}", WANDB: f"wandb sync {folder}/wandb/offline-run-*"}
    return f"`{commands[where]}`" if where in commands else where


def _count(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"
