"""Find runs by folder, path, id or name, or all runs of a sweep, including runs that have not started."""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from normlab.errors import StoreError, did_you_mean, one_line
from normlab.store.files import io_error
from normlab.store.format import RUN_FILE, RUNS_FOLDER, STATUS_FILE
from normlab.store.plans import SEARCH, has_plan, read_plan, run_of, sweep_folder
from normlab.store.record import RunEntry, RunRecord, flatten
from normlab.store.runs import RunFolder

Folder = str | os.PathLike[str]
MOST_NAMES = 3
"""The most sweeps that the name of a selection lists."""
NOT_STARTED = "not started"
"""State of a run that a sweep has planned and that has no record yet."""


@dataclass(frozen=True, slots=True)
class Selection:
    records: Sequence[RunEntry]
    """Each run once, including those that have not started."""
    name: str
    """The name of the sweep if the runs are those of one, as `a + b` those of several; else empty."""
    home: Path
    """The folder for a page about the runs: of the sweep if there is one, else the results folder."""

    @property
    def started(self) -> list[RunEntry]:
        return [record for record in self.records if record.state != NOT_STARTED]


def select_runs(names: Folder | Sequence[Folder], results_dir: Folder) -> Selection:
    """Return the runs of all names together.

    Args:
        names: One, or several. Each is a results folder, its `runs` folder, a run (folder, id, prefix of the id, or
            name), or a sweep (folder or name). None: the results folder.
        results_dir: The folder in which names are looked up.

    Raises:
        StoreError: A name matches nothing, a sweep's plan cannot be read, no run has started, or a run has arms of two
            names.
    """
    names = [names] if isinstance(names, str | os.PathLike) else names
    with _without_garbage_collection():
        selections = [_select(os.fspath(name), results_dir) for name in names or [results_dir]]
    records: dict[Path, RunEntry] = {}
    for record in (record for selection in selections for record in selection.records):
        first = records.setdefault(path := record.folder.path.resolve(), record)
        if first.arm != record.arm and first.arm and record.arm:
            raise StoreError(
                f"run {record.run_id}: is in arm {first.arm} of one sweep and in arm {record.arm} of another, so that "
                "they are one arm; summarize one of the sweeps, or give the arms one name"
            )
        records[path] = first if first.arm else record
    sweeps = [selection.name for selection in selections]
    name = " + ".join(sweeps) if len(sweeps) <= MOST_NAMES else f"{len(sweeps)} sweeps"
    home = selections[0].home if len(selections) == 1 else Path(results_dir)
    result = Selection(list(records.values()), name if all(sweeps) else "", home)
    if not result.started:
        where = ", ".join(map(str, names)) or os.fspath(results_dir)
        waiting = count_not_started(result.records)
        raise StoreError(
            f"{where}: none of the sweep's {waiting} runs has started" if waiting else no_runs_message(where)
        )
    return result


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector: records have no reference cycles, and each collection searches all of them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def count_not_started(records: Sequence[RunEntry]) -> int:
    return sum(record.state == NOT_STARTED for record in records)


def find_runs(path: str | os.PathLike[str]) -> list[RunEntry]:
    """Return every run in a results folder, a `runs` folder or a run's folder, sorted by id.

    Unreadable runs are included. The list is empty if the folder does not exist.

    Raises:
        StoreError: The folder exists and cannot be read.
    """
    top = Path(path)
    if is_run(top):
        return [RunRecord.read(RunFolder(top.absolute()))]
    visible = (child for child in _children(_runs_folder(top)) if not child.name.startswith("."))
    return [RunRecord.read(RunFolder(child)) for child in visible if is_run(child)]


def resolve_run(query: str, results_dir: str | os.PathLike[str]) -> RunFolder:
    """Return the run with a path, an id, an unambiguous beginning of an id, or a name.

    Raises:
        StoreError: No run matches, or several do; the message lists the candidates.
    """
    if query and os.path.isfile(Path(query) / RUN_FILE):
        return RunFolder(Path(query).absolute())
    records = find_runs(results_dir)
    if not records:
        raise StoreError(f"no run {query!r}, and {no_runs_message(results_dir)}")
    exact = [record for record in records if record.run_id == query]
    matches = exact or [
        record for record in records if record.name == query or (query and record.run_id.startswith(query))
    ]
    if len(matches) == 1:
        return matches[0].folder
    if matches:
        raise StoreError(f"run {query!r} could be {_list(matches)}; give more of the id")
    names = {name for record in records for name in (record.run_id, record.name)}
    raise StoreError(
        f"no run {query!r} in {os.fspath(results_dir)}{did_you_mean(query, names)}: "
        f"give the id, its beginning or the name of one of {_list(records)}"
    )


def find_sweep(name: str, results_dir: Folder) -> Path | None:
    """Return the folder of the sweep with a path or a name; None if there is none."""
    folders = [Path(name), *([sweep_folder(results_dir, name)] if len(Path(name).parts) == 1 else [])]
    return next(filter(has_plan, folders), None)


def find_folders(names: Sequence[str], results_dir: Folder) -> Iterator[tuple[Path | None, list[RunFolder]]]:
    """Yield the folder of each sweep, and of its search, with those of its runs that exist; None for the name of a run.

    Raises:
        StoreError: Neither a sweep nor a run matches, or a sweep's plan cannot be read.
    """
    for name in names:
        if (sweep := find_sweep(name, results_dir)) is None:
            yield None, [resolve_run(name, results_dir)]
            continue
        sweep = sweep.absolute()
        for folder in filter(has_plan, (sweep, sweep.with_name(f"{sweep.name}{SEARCH}"))):
            runs = [run_of(folder, planned) for planned in read_plan(folder).runs]
            yield folder, [run for run in runs if is_run(run.path)]


def no_runs_message(path: str | os.PathLike[str]) -> str:
    return f"no runs in {os.fspath(path)}: train one with `normlab train`, or name a folder with runs"


def is_run(folder: Path) -> bool:
    """Whether a folder has a run.json or a status.json, or denies access.

    A run that is killed before it starts leaves a folder without both files.
    """
    try:
        with os.scandir(folder) as entries:
            return any(entry.name in (RUN_FILE, STATUS_FILE) for entry in entries)
    except PermissionError:
        return True
    except (OSError, ValueError):  # no path has a NUL or a lone surrogate
        return False


def _select(name: str, results_dir: str | os.PathLike[str]) -> Selection:
    folder = Path(name)
    sweep = sweep_folder(results_dir, name) if len(folder.parts) == 1 else folder
    if has_plan(folder):
        return _sweep(folder)
    if is_run(folder):
        return Selection(find_runs(folder), "", Path(results_dir))
    if records := find_runs(folder):
        return Selection(records, "", folder.parent if folder.name == RUNS_FOLDER else folder)
    if has_plan(sweep):
        return _sweep(sweep)
    if os.path.isdir(folder) or folder == Path(results_dir):
        raise StoreError(no_runs_message(name))
    by_id = Path(results_dir) / RUNS_FOLDER / name  # checked first, because a search by name reads every run
    try:
        run = RunFolder(by_id.absolute()) if folder.name == name and is_run(by_id) else resolve_run(name, results_dir)
    except StoreError as error:
        raise StoreError(f"{name}: neither a folder nor a sweep; {error}") from error
    return Selection([RunRecord.read(run)], "", Path(results_dir))


def _sweep(folder: Path) -> Selection:
    plan = read_plan(folder)
    name = one_line(plan.name)
    records: list[RunEntry] = []
    for planned in plan.runs:
        run, arm = run_of(folder.absolute(), planned), one_line(planned.arm)
        if is_run(run.path):
            # Another sweep may have trained the run; the notes of this plan report other pack sizes.
            record = RunRecord.read(run)
            if isinstance(record, RunRecord):
                pack = replace(record.run.pack, sweep=plan.name)
                record = replace(record, run=replace(record.run, pack=pack))
            records.append(replace(record, arm=arm))
        else:
            problem = f"planned by the sweep {name}, not started"
            records.append(RunEntry(run, NOT_STARTED, problem=problem, options=flatten(planned.config), arm=arm))
    return Selection(records, name, folder)


def _runs_folder(top: Path) -> Path:
    # os.path returns False for a name that is too long; Path raises.
    return top / RUNS_FOLDER if os.path.isdir(top / RUNS_FOLDER) else top


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir()) if os.path.isdir(folder) else []
    except OSError as error:
        raise io_error(folder, "read", error) from error


def _list(records: list[RunEntry], limit: int = 8) -> str:
    names = [
        record.run_id if record.name == record.run_id else f"{record.run_id} ({record.name})" for record in records
    ]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
