"""What a service has of the runs: written to their folders by the follower, read by commands, printed as lines."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from normlab.errors import StoreError
from normlab.parsing import from_json, read_at_most
from normlab.store.files import io_error, is_file_name, write_atomic
from normlab.store.lock import is_locked
from normlab.store.reading import LARGEST_RECORD
from normlab.store.runs import RunFolder
from normlab.tracking.settings import TENSORBOARD, may_have_login

NO_LOGIN = "no login; `wandb login` makes one"
DISABLED = "W&B is disabled"
NOT_SENT = "no process sends it, or none can write to its folder"


@dataclass(frozen=True, slots=True)
class Upload:
    """What a service has of a run, in the run's folder."""

    id: str = ""
    project: str = ""
    entity: str = ""
    where: str = ""
    """The address of the run, or a folder in that of the run; empty before a follower reached the service."""
    steps: int = 0
    """All steps before this one were at the service when a follower last started or finished."""
    problem: str = ""
    """Why the last follower gave up; empty if it did not."""

    @classmethod
    def read(cls, run: Path, service: str) -> Upload:
        """Return the content of the file in a run's folder; the default if there is none.

        Raises:
            StoreError: The file cannot be read, or a field has an invalid value.
        """
        path = _file(run, service, "json")
        try:
            content = from_json(read_at_most(path, LARGEST_RECORD))
            known = {each.name: content[each.name] for each in fields(cls)}
            if wrong := [name for name, value in known.items() if not _is_valid(name, value)]:
                raise ValueError(f"{wrong[0]} is {known[wrong[0]]!r:.40}")
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise io_error(path, "read", error) from error
        except (ValueError, KeyError) as error:
            reason = "not a JSON object" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else error
            raise StoreError(f"{path}: is damaged ({reason}); delete it, and the next upload writes it anew") from None
        return cls(**known)

    def write(self, run: Path, service: str) -> None:
        """Write the file in a run's folder.

        Raises:
            StoreError: The file cannot be written.
        """
        write_atomic(_file(run, service, "json"), json.dumps(asdict(self)).encode())


def _is_valid(name: str, value: object) -> bool:
    """Whether a field may have a value: an id that names no path, an address, or a folder in the run's folder."""
    if name == "steps":
        return type(value) is int
    if not isinstance(value, str):
        return False
    if name == "problem" or value == "":
        return True
    if name == "where":
        is_address = re.fullmatch(r"https?://[!-~]+", value) is not None
        return is_address or all(map(is_file_name, value.split("/")))
    return is_file_name(value)


def lock_of(run: Path, service: str) -> Path:
    """Return the file that a follower locks while it sends a run to a service."""
    return _file(run, service, "lock")


def is_sending(run: Path, service: str) -> bool:
    """Whether a follower sends a run to a service."""
    return is_locked(lock_of(run, service))


def _file(run: Path, service: str, kind: str) -> Path:
    return run / f"{TENSORBOARD if service == TENSORBOARD else 'wandb'}.{kind}"


def upload_lines(runs: Sequence[Path], service: str, names: Sequence[str]) -> list[str]:
    """Return lines for the user about what a service has of some runs.

    Args:
        runs: The folders of the runs.
        service: The service, as in `Task.service`.
        names: The arguments of `normlab sync` that select these runs.
    """
    title, hint = ("TensorBoard" if service == TENSORBOARD else "W&B"), sync_hint(names, service)
    has_login = service in (TENSORBOARD, "offline") or may_have_login()
    sent: list[str] = []
    problems: list[str] = []
    outdated: list[str] = []
    sending = training = 0
    for run in runs:
        folder = RunFolder(run)
        try:
            upload, steps = Upload.read(run, service), folder.read_status().step
        except StoreError as error:
            problems.append(str(error))
            continue
        if is_sending(run, service):
            sending += 1
        elif upload.problem == DISABLED:
            continue
        elif upload.where and not upload.problem and folder.is_active():
            training += 1
        elif not _has_data(run, upload) or upload.steps < steps:
            problems.append(upload.problem or (NOT_SENT if has_login else NO_LOGIN))
        elif upload.problem:
            outdated.append(upload.problem)
        else:
            sent.append(_shown(run, service, upload.where))
    lines: list[str] = []
    if len(sent) == 1:
        lines.append(f"{title}: {sent[0]}")
    elif sent and service == TENSORBOARD:
        folder = shlex.quote(os.path.relpath(os.path.commonpath([run.absolute() for run in runs])))
        lines.append(f"{title}: {len(sent)} runs, `tensorboard --logdir {folder}` shows them")
    elif sent:
        lines.append(f"{title}: {len(sent)} runs, the first: {sent[0]}")
    if sending:
        work = "writing the files" if service in (TENSORBOARD, "offline") else "the upload"
        lines.append(f"{title}: {work} of {_count(sending)} continues in the background; if it fails, {hint}")
    if training:
        lines.append(f"{title} has the steps so far of {_count(training)}; after the training, {hint}")
    if outdated:
        lines.append(
            f"{title} has the steps of {_count(len(outdated))}; the last upload was not complete ({outdated[0]})"
        )
    if problems:
        lines.append(f"{title} lacks data of {_count(len(problems))} ({problems[0]}); {hint}")
    return lines


def _has_data(run: Path, upload: Upload) -> bool:
    """Whether a service or an existing folder has steps of a run."""
    return "://" in upload.where or (upload.where != "" and (run / upload.where).exists())


def _shown(run: Path, service: str, where: str) -> str:
    """Return the address of a run, or the command for its folder."""
    folder = shlex.quote(os.path.relpath(run / where))
    if service == TENSORBOARD:
        return f"`tensorboard --logdir {folder}` shows it"
    return where if "://" in where else f"`wandb sync {folder}` uploads it"


def sync_hint(names: Sequence[str], service: str) -> str:
    """Return the text that names the command for sending runs."""
    arguments = [*(["--to", TENSORBOARD] if service == TENSORBOARD else []), *names]
    return f"`normlab sync {shlex.join(arguments)}` sends what is missing"


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return paths as arguments of a command in this folder."""
    return [os.path.relpath(path) for path in paths]


def _count(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"
