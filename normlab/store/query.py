"""Find runs: all runs of a folder, or the run that a path, id or name refers to."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normlab.errors import StoreError, did_you_mean
from normlab.store.files import io_error
from normlab.store.runs import RunFolder
from normlab.store.schema import DAMAGED, RUN_FILE, RUNS_FOLDER, STATUS_FILE


@dataclass(frozen=True, slots=True)
class Entry:
    """A run in a folder. An unreadable run.json or status.json is an empty dict, and `problem` says why."""

    folder: RunFolder
    run: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    state: str = DAMAGED
    problem: str = ""

    @property
    def name(self) -> str:
        """The run's name, or its id if it has none."""
        name = self.run.get("name")
        return name if isinstance(name, str) and name else self.folder.run_id


def find_runs(path: str | os.PathLike[str]) -> list[Entry]:
    """Return every run, readable or not, in a results folder, a `runs` folder or one run's folder, ordered by id.

    The list is empty where the folder does not exist.

    Raises:
        StoreError: The folder exists and cannot be read.
    """
    top = Path(path)
    if is_run(top):
        return [examine(RunFolder(top.absolute()))]
    # os.path returns False for a name that is too long; Path raises.
    if os.path.isdir(top / RUNS_FOLDER):
        top = top / RUNS_FOLDER
    if not os.path.isdir(top):
        return []
    try:
        children = sorted(top.iterdir())
    except OSError as error:
        raise io_error(top, "read", error) from error
    return [examine(RunFolder(child)) for child in children if is_run(child)]


def examine(folder: RunFolder) -> Entry:
    """Return a run with its record and its state; never raises for a damaged record."""
    run: dict[str, Any] = {}
    status: dict[str, Any] = {}
    state = DAMAGED
    problems: list[str] = []
    try:
        run = folder.run()
    except StoreError as error:
        problems.append(str(error))
    try:
        state, status = folder.state_and_status()
    except StoreError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(str(io_error(Path(error.filename or folder.path), "read", error)))
    return Entry(folder, run, status, DAMAGED if problems else state, ". ".join(problems))


def resolve_run(query: str, results_dir: str | os.PathLike[str]) -> RunFolder:
    """Return the run that a query refers to: its folder's path, its id, the beginning of its id, or its name.

    Raises:
        StoreError: No run matches, or several do; the message lists the candidates.
    """
    if query and os.path.isfile(Path(query) / RUN_FILE):
        return RunFolder(Path(query).absolute())
    entries = find_runs(results_dir)
    if not entries:
        raise StoreError(f"no run {query!r}, and {no_runs_message(results_dir)}")
    exact = [entry for entry in entries if entry.folder.run_id == query]
    matches = exact or [
        entry for entry in entries if entry.name == query or (query and entry.folder.run_id.startswith(query))
    ]
    if len(matches) == 1:
        return matches[0].folder
    if matches:
        raise StoreError(f"run {query!r} could be {_list(matches)}; give more of the id")
    names = {name for entry in entries for name in (entry.folder.run_id, entry.name)}
    raise StoreError(
        f"no run {query!r} in {os.fspath(results_dir)}{did_you_mean(query, names)}: "
        f"give the id, its beginning or the name of one of {_list(entries)}"
    )


def no_runs_message(path: str | os.PathLike[str]) -> str:
    """Return the message for a folder without runs."""
    return f"no runs in {os.fspath(path)}: make one with `normlab train`, or name the folder that has them"


def _list(entries: list[Entry], limit: int = 8) -> str:
    names = [
        entry.folder.run_id if entry.name == entry.folder.run_id else f"{entry.folder.run_id} ({entry.name})"
        for entry in entries
    ]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def is_run(folder: Path) -> bool:
    """Whether a folder has a run.json or a status.json, or may not be read.

    A kill before a run starts leaves a folder with neither.
    """
    try:
        with os.scandir(folder) as entries:
            return any(entry.name in (RUN_FILE, STATUS_FILE) for entry in entries)
    except PermissionError:
        return True
    except OSError:
        return False
