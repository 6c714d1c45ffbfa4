"""The mode of W&B and its login, as far as they are known without importing wandb, and what W&B has of runs.

The follower writes what W&B has into the run's folder; commands read it and print it as lines.
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

from normlab.base.errors import StoreError, counted
from normlab.base.parsing import from_json, read_at_most
from normlab.store.files import io_error, write_atomic
from normlab.store.format import METRICS_FILE, STATUS_FILE
from normlab.store.lock import is_locked
from normlab.store.reading import LARGEST_RECORD

WANDB = "wandb"
"""The name of the files about an upload, and of the folder that W&B writes, in a run."""
NOT_SENT = "no process sends it, or none can write to its folder"


def mode_of(wandb: str) -> str | None:
    """Return the mode for a value of `tracking.wandb`: auto, online or offline; None if the run is not sent."""
    if wandb != "auto":
        return wandb if wandb != "off" else None
    # W&B's own variable decides only if the run has no mode; without a login, only an offline run writes anything.
    mode = current_name(os.environ.get("WANDB_MODE") or "auto")
    if mode in ("off", "disabled"):
        return None
    return mode if mode == "offline" or may_have_login() else None


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
    """What W&B has of a run, in the run's folder."""

    where: str = ""
    """The address of the run, or a folder in that of the run; empty before a follower reached W&B."""
    problem: str = NOT_SENT
    """Why W&B does not have everything; empty if it has what the run had when the last follower finished."""

    @classmethod
    def load(cls, run: Path) -> Upload:
        """Return the content of the file in a run's folder; the default if it is missing or of another run.

        Raises:
            StoreError: The file is damaged, or cannot be read.
        """
        path = _file(run, "json")
        try:
            content = from_json(read_at_most(path, LARGEST_RECORD))
            run_id = content.pop("run_id")
            upload = cls(**content)
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise io_error(path, "read", error) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _damaged(path, f"{type(error).__name__}: {error}") from error
        # The folder is a copy of another run's, or was renamed.
        if run_id != run.name:
            return cls()
        # The text is printed as an address, and may be someone else's.
        is_place = upload.where in ("", WANDB) or re.fullmatch(r"https?://[!-~]+", str(upload.where))
        if not (is_place and isinstance(upload.problem, str)):
            raise _damaged(path, "it holds no place of a run at W&B")
        return upload

    @classmethod
    def read(cls, run: Path) -> Upload:
        """Return the content of the file in a run's folder, or the default if it is damaged too.

        The next follower then asks W&B, and writes the file anew.
        """
        try:
            return cls.load(run)
        except StoreError:
            return cls()

    def write(self, run: Path) -> None:
        """Write the file in a run's folder.

        Raises:
            StoreError: The file cannot be written.
        """
        write_atomic(_file(run, "json"), json.dumps({"run_id": run.name, **asdict(self)}).encode())


def lock_of(run: Path) -> Path:
    """Return the file that a follower locks while it sends a run."""
    return _file(run, "lock")


def is_sending(run: Path) -> bool:
    return is_locked(lock_of(run))


def has_ended(run: Path) -> bool:
    """Whether a follower has started to send a run, and none sends it now."""
    return _file(run, "json").exists() and not is_sending(run)


def is_sent(run: Path) -> bool:
    """Whether W&B has everything of a run, as far as the files in its folder show.

    A file of the record that is newer than the last upload has numbers that W&B lacks: the run was resumed since.
    """
    upload = Upload.read(run)
    if upload.problem or upload.where in ("", WANDB):
        return False
    sent_at = _file(run, "json").stat().st_mtime_ns
    record = [run / name for name in (STATUS_FILE, METRICS_FILE)]
    return all(path.stat().st_mtime_ns <= sent_at for path in record if path.exists())


def _file(run: Path, kind: str) -> Path:
    return run / f"{WANDB}.{kind}"


def _damaged(path: Path, reason: str) -> StoreError:
    return StoreError(f"{path}: is damaged ({reason}); `normlab sync` asks W&B what it has, and writes the file anew")


def upload_lines(runs: Sequence[Path], names: Sequence[str], *, has_follower: bool = False) -> list[str]:
    """Return lines for the user about what W&B has of some runs, which `normlab sync NAMES` selects.

    Args:
        has_follower: Whether a process is known to send the runs. It may not have come to all of them yet: on a busy
            machine its start takes longer than a short training.
    """
    hint = f"`normlab sync {shlex.join(names)}` sends what is missing"
    sent: list[str] = []
    problems: list[str] = []
    sending = 0
    for run in runs:
        upload = Upload.read(run)
        if is_sending(run) or (has_follower and upload.problem == NOT_SENT):
            sending += 1
        elif upload.problem:
            problems.append(upload.problem)
        else:
            sent.append(_shown(run, upload.where))
    lines: list[str] = []
    if len(sent) == 1:
        lines.append(f"W&B: {sent[0]}")
    elif sent:
        lines.append(f"W&B: {len(sent)} runs, the first: {sent[0]}")
    if sending:
        lines.append(f"W&B: sending {counted(sending, 'run')} continues in the background; if it fails, {hint}")
    if problems:
        lines.append(f"W&B lacks data of {counted(len(problems), 'run')} ({problems[0]}); {hint}")
    return lines


def _shown(run: Path, where: str) -> str:
    """Return the address of a run, or the command for the files in its folder."""
    if where != WANDB:
        return where
    return f"`wandb sync {shlex.quote(os.path.relpath(run))}/wandb/offline-run-*`"
