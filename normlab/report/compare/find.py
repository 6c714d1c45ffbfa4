"""Find the runs that `compare` and `summarize` read: by folder, run or sweep, with planned runs that do not exist."""

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
"""The state of a folder among the runs that has neither settings nor a status."""
NOT_STARTED = "not started"
"""The state of a run that a sweep has planned and that has no folder yet."""
NO_RUN_STATES = (EMPTY, NOT_STARTED)
"""The states of entries that are not runs yet; they are in no cell and in no number."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The runs that were selected by name."""

    entries: Sequence[Entry]
    """Each run once, in the order found, with entries whose state is in `NO_RUN_STATES`."""
    name: str
    """The name of the sweep if the runs are those of one sweep, else empty."""
    home: Path
    """The folder for a page about the runs."""


def find(names: Sequence[str], results_dir: str | os.PathLike[str]) -> Selection:
    """Return the runs of all names together.

    Args:
        names: Each is a results folder, its `runs` folder, a run (folder, id, prefix of the id, or name), or a sweep
            (folder or name). Empty: the results folder.
        results_dir: The folder in which names are looked up.

    Raises:
        StoreError: A name matches nothing, a sweep's plan cannot be read, or there is no run.
    """
    selections = [_find(name, results_dir) for name in names or [os.fspath(results_dir)]]
    entries: dict[Path, Entry] = {}
    for entry in (entry for selection in selections for entry in selection.entries):
        entries.setdefault(entry.folder.path.resolve(), entry)
    if all(entry.state in NO_RUN_STATES for entry in entries.values()):
        where = ", ".join(names) or os.fspath(results_dir)
        waiting = sum(entry.state == NOT_STARTED for entry in entries.values())
        raise StoreError(
            f"{where}: none of the sweep's {waiting} runs has started" if waiting else no_runs_message(where)
        )
    single = selections[0] if len(selections) == 1 else None
    return Selection(
        list(entries.values()),
        single.name if single else "",
        single.home if single else Path(results_dir),
    )


def find_started(
    name: str | os.PathLike[str], results_dir: str | os.PathLike[str] = "results"
) -> tuple[list[Entry], int]:
    """Return the runs of a name, as `find`, and the number of planned runs that have not started.

    Raises:
        StoreError: As `find`.
    """
    entries = find([os.fspath(name)], results_dir).entries
    started = [entry for entry in entries if entry.state not in NO_RUN_STATES]
    return started, sum(entry.state == NOT_STARTED for entry in entries)


def not_started(states: Sequence[str]) -> list[str]:
    """Return a line with the number of runs that have not started; no line if all have."""
    waiting = states.count(NOT_STARTED)
    return [f"{waiting} of {len(states)} runs {'has' if waiting == 1 else 'have'} not started"] if waiting else []


def _find(name: str, results_dir: str | os.PathLike[str]) -> Selection:
    folder = Path(name)
    sweep = sweep_folder(results_dir, name) if len(folder.parts) == 1 else folder
    if has_plan(folder):
        return _sweep(folder)
    if is_run(folder):
        return Selection(find_runs(folder), "", Path(results_dir))
    if os.path.isdir(folder) and (entries := _runs_below(folder)):
        return Selection(entries, "", folder.parent if folder.name == RUNS_FOLDER else folder)
    if has_plan(sweep):
        return _sweep(sweep)
    if os.path.isdir(folder) or folder == Path(results_dir):
        raise StoreError(no_runs_message(name))
    by_id = Path(results_dir) / RUNS_FOLDER / name  # tried first: a look-up by name reads every run
    try:
        run = RunFolder(by_id.absolute()) if folder.name == name and is_run(by_id) else resolve_run(name, results_dir)
    except StoreError as error:
        raise StoreError(f"{name}: neither a folder nor a sweep; {error}") from error
    return Selection([examine(run)], "", Path(results_dir))


def _runs_below(folder: Path) -> list[Entry]:
    """Return the runs of a results folder or a `runs` folder, and the folders among them that hold no run."""
    runs = folder / RUNS_FOLDER if os.path.isdir(folder / RUNS_FOLDER) else folder
    entries = find_runs(folder)
    if runs.name != RUNS_FOLDER:
        return entries  # any other folder can have unrelated folders beside the runs
    try:
        children = sorted(child for child in runs.iterdir() if os.path.isdir(child) and not is_run(child))
    except OSError as error:
        raise io_error(runs, "read", error) from error
    return entries + [_empty(RunFolder(child)) for child in children]


def _sweep(folder: Path) -> Selection:
    """Return every run of a sweep, started or not."""
    plan = read_plan(folder)
    name = one_line(plan.name)
    return Selection([_planned(folder, job, name) for job in plan.jobs], name, folder)


def _planned(folder: Path, job: Job, sweep: str) -> Entry:
    run = run_of(folder.absolute(), job)
    if is_run(run.path):
        return examine(run)
    if os.path.isdir(run.path):
        return _empty(run, job)
    return Entry(run, {"config": job.config}, {}, NOT_STARTED, f"planned by the sweep {sweep}, not started")


def _empty(folder: RunFolder, job: Job | None = None) -> Entry:
    problem = "the folder holds no run: the run was killed before it started; run the same command again"
    return Entry(folder, {"config": job.config} if job else {}, {}, EMPTY, problem)
