"""Finding runs: all of a folder's, or the one that a word means."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normlab.errors import StoreError, did_you_mean
from normlab.store.files import refusal
from normlab.store.runs import RunFolder
from normlab.store.schema import DAMAGED, RUN_FILE, RUNS_FOLDER, STATUS_FILE


@dataclass(frozen=True, slots=True)
class Entry:
    """A run as it was found. What could not be read is an empty dict, and `problem` says why."""

    folder: RunFolder
    run: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    state: str = DAMAGED
    problem: str = ""

    @property
    def name(self) -> str:
        """What tables call it: its name, or its id where it has none."""
        name = self.run.get("name")
        return name if isinstance(name, str) and name else self.folder.run_id


def find_runs(path: str | os.PathLike[str]) -> list[Entry]:
    """Every run below a results folder, a `runs` folder, or in one run's folder, ordered by id.

    Runs that cannot be read are among them. The list is empty where there is no such folder.

    Raises:
        StoreError: The folder is there and cannot be read.
    """
    top = Path(path)
    if is_run(top):
        return [examine(RunFolder(top.absolute()))]
    # os.path, unlike Path, says no to a name that is too long for a file's.
    if os.path.isdir(top / RUNS_FOLDER):
        top = top / RUNS_FOLDER
    if not os.path.isdir(top):
        return []
    try:
        children = sorted(top.iterdir())
    except OSError as error:
        raise refusal(top, "read", error) from error
    return [examine(RunFolder(child)) for child in children if is_run(child)]


def examine(folder: RunFolder) -> Entry:
    """A run as it stands; never raises for what is wrong with it."""
    run: dict[str, Any] = {}
    status: dict[str, Any] = {}
    state = DAMAGED
    problems: list[str] = []
    try:
        run = folder.run()
    except StoreError as error:
        problems.append(str(error))
    try:
        state, status = folder.observe()
    except StoreError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(str(refusal(Path(error.filename or folder.path), "read", error)))
    return Entry(folder, run, status, DAMAGED if problems else state, ". ".join(problems))


def resolve_run(word: str, results_dir: str | os.PathLike[str]) -> RunFolder:
    """The run that a word means: its folder's path, its id, the beginning of its id, or its name.

    Raises:
        StoreError: No run or several answer to the word; the candidates are listed.
    """
    if word and os.path.isfile(Path(word) / RUN_FILE):
        return RunFolder(Path(word).absolute())
    entries = find_runs(results_dir)
    if not entries:
        raise StoreError(f"no run {word!r}, and {no_runs(results_dir)}")
    exact = [entry for entry in entries if entry.folder.run_id == word]
    matches = exact or [
        entry for entry in entries if entry.name == word or (word and entry.folder.run_id.startswith(word))
    ]
    if len(matches) == 1:
        return matches[0].folder
    if matches:
        raise StoreError(f"run {word!r} could be {_listed(matches)}; give more of the id")
    names = {name for entry in entries for name in (entry.folder.run_id, entry.name)}
    raise StoreError(
        f"no run {word!r} in {os.fspath(results_dir)}{did_you_mean(word, names)}: "
        f"give the id, its beginning or the name of one of {_listed(entries)}"
    )


def no_runs(path: str | os.PathLike[str]) -> str:
    """What to say of a folder without runs."""
    return f"no runs in {os.fspath(path)}: make one with `normlab train`, or name the folder that has them"


def _listed(entries: list[Entry], at_most: int = 8) -> str:
    words = [
        entry.folder.run_id if entry.name == entry.folder.run_id else f"{entry.folder.run_id} ({entry.name})"
        for entry in entries
    ]
    more = f" and {len(words) - at_most} more" if len(words) > at_most else ""
    return ", ".join(words[:at_most]) + more


def is_run(folder: Path) -> bool:
    """Whether a folder says what it is or how it stands; one that may not be looked into is held for a run.

    A folder with neither is what a kill leaves that came before the run had begun.
    """
    try:
        with os.scandir(folder) as entries:
            return any(entry.name in (RUN_FILE, STATUS_FILE) for entry in entries)
    except PermissionError:
        return True
    except OSError:
        return False
