"""Which runs are compared: what words mean, and every folder and every plan that should have been a run and is none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from normlab.errors import StoreError, one_line
from normlab.store.files import io_error
from normlab.store.plans import Job, has_plan, read_plan, run_of, sweep_folder
from normlab.store.query import Entry, examine, find_runs, is_run, no_runs_message, resolve_run
from normlab.store.runs import RunFolder
from normlab.store.schema import RUNS_FOLDER

EMPTY = "empty"
"""What a folder among the runs is called that says neither what it is nor how it stands."""
NOT_STARTED = "not started"
"""What a run is called that a sweep has planned, and of which there is no folder yet."""
ABSENT = (EMPTY, NOT_STARTED)
"""The states of what is no run yet: in no cell, and in no number."""


@dataclass(frozen=True, slots=True)
class Found:
    """The runs that some words mean."""

    entries: Sequence[Entry]
    """Each once, in the order in which it was found; those that are no run yet among them, with a state of `ABSENT`."""
    name: str
    """The sweep's, where they are those of one; else empty."""
    home: Path
    """The folder that a page of them belongs in."""


def find(words: Sequence[str], results_dir: str | os.PathLike[str]) -> Found:
    """The runs of several words together.

    Args:
        words: Each a results folder, its runs, a run (its folder, its id, the beginning of it, or its name), or a
            sweep (its folder or its name). None: the results folder.
        results_dir: Where names are looked up.

    Raises:
        StoreError: A word means nothing, a sweep's plan cannot be read, or there is no run at all.
    """
    found = [_find(word, results_dir) for word in words or [os.fspath(results_dir)]]
    entries: dict[Path, Entry] = {}
    for entry in (entry for one in found for entry in one.entries):
        entries.setdefault(entry.folder.path.resolve(), entry)
    if all(entry.state in ABSENT for entry in entries.values()):
        raise StoreError(_none(words, results_dir, list(entries.values())))
    alone = found[0] if len(found) == 1 else None
    return Found(
        list(entries.values()),
        alone.name if alone else "",
        alone.home if alone else Path(results_dir),
    )


def find_started(
    word: str | os.PathLike[str], results_dir: str | os.PathLike[str] = "results"
) -> tuple[list[Entry], int]:
    """Return the runs that a word means, as `find`, and how many more a sweep has planned that have not started.

    Raises:
        StoreError: As `find`.
    """
    entries = find([os.fspath(word)], results_dir).entries
    started = [entry for entry in entries if entry.state not in ABSENT]
    return started, sum(entry.state == NOT_STARTED for entry in entries)


def not_started(states: Sequence[str]) -> list[str]:
    """How many runs were planned and have not begun, in a line; none where all have."""
    waiting = states.count(NOT_STARTED)
    return [f"{waiting} of {len(states)} runs {'has' if waiting == 1 else 'have'} not started"] if waiting else []


def _find(word: str, results_dir: str | os.PathLike[str]) -> Found:
    """What one word means."""
    folder = Path(word)
    named = sweep_folder(results_dir, word) if len(folder.parts) == 1 else folder
    if has_plan(folder):
        return _sweep(folder)
    if is_run(folder):
        return Found(find_runs(folder), "", Path(results_dir))
    if os.path.isdir(folder) and (entries := _below(folder)):
        return Found(entries, "", folder.parent if folder.name == RUNS_FOLDER else folder)
    if has_plan(named):
        return _sweep(named)
    if os.path.isdir(folder) or folder == Path(results_dir):
        raise StoreError(no_runs_message(word))
    exact = Path(results_dir) / RUNS_FOLDER / word  # looked for first: a name is found by reading every run
    try:
        run = RunFolder(exact.absolute()) if folder.name == word and is_run(exact) else resolve_run(word, results_dir)
    except StoreError as error:
        raise StoreError(f"{word}: neither a folder nor a sweep; {error}") from error
    return Found([examine(run)], "", Path(results_dir))


def _below(folder: Path) -> list[Entry]:
    """Every run of a results folder or of its runs, and the folders beside them that hold none."""
    runs = folder / RUNS_FOLDER if os.path.isdir(folder / RUNS_FOLDER) else folder
    found = find_runs(folder)
    if runs.name != RUNS_FOLDER:
        return found  # any folder may have others beside the runs
    try:
        children = sorted(child for child in runs.iterdir() if os.path.isdir(child) and not is_run(child))
    except OSError as error:
        raise io_error(runs, "read", error) from error
    return found + [_empty(RunFolder(child)) for child in children]


def _sweep(folder: Path) -> Found:
    """Every run of a sweep, begun or not."""
    plan = read_plan(folder)
    name = one_line(plan.name)
    return Found([_planned(folder, job, name) for job in plan.jobs], name, folder)


def _planned(folder: Path, job: Job, sweep: str) -> Entry:
    run = run_of(folder.absolute(), job)
    if is_run(run.path):
        return examine(run)
    if os.path.isdir(run.path):
        return _empty(run, job)
    waits = f"planned by the sweep {sweep}, and has not started"
    return Entry(run, {"config": job.config}, {}, NOT_STARTED, waits)


def _empty(folder: RunFolder, job: Job | None = None) -> Entry:
    told = "the folder holds no run: what is left where one was killed before it had begun; the same words begin it"
    return Entry(folder, {"config": job.config} if job else {}, {}, EMPTY, told)


def _none(words: Sequence[str], results_dir: str | os.PathLike[str], entries: Sequence[Entry]) -> str:
    """What to say where nothing was found that is a run."""
    where = ", ".join(words) or os.fspath(results_dir)
    waiting = sum(entry.state == NOT_STARTED for entry in entries)
    return f"{where}: none of the sweep's {waiting} runs has started" if waiting else no_runs_message(where)
