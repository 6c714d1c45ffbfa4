"""Find runs by folder, path, id or name, or all runs of a sweep, including runs that have not started."""

import gc
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from normlab.base.errors import StoreError, counted, did_you_mean, one_line, shorten
from normlab.store.files import io_error, is_file_name
from normlab.store.format import RUN_FILE, RUNS_FOLDER, STATUS_FILE, SWEEPS_FOLDER
from normlab.store.plans import SEARCH, has_plan, read_plan, run_of, sweep_folder
from normlab.store.record import ArmConflict, RunEntry, RunRecord, flatten
from normlab.store.runs import RunFolder

Folder = str | os.PathLike[str]
MOST_NAMES = 3
"""The most sweeps that the name of a selection lists, and the most runs or sweeps that a message lists."""
NOT_STARTED = "not started"
"""State of a run that a sweep has planned and that has no record yet."""


class NoSuchRun(StoreError):
    """Neither a run nor a sweep has a name."""


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

    A run that has different arms in two sweeps has an `arm_conflict`: tables that group by arm reject it.

    Args:
        names: One, or several. Each is a results folder, its `runs` folder, a run (folder, id, prefix of the id, or
            name), or a sweep (folder or name). None: the results folder. The name of a sweep comes before a folder of
            that name in the working folder, which `./NAME` names.
        results_dir: The folder in which names are looked up.

    Raises:
        StoreError: A name matches nothing, a sweep's plan cannot be read, or no run has started.
    """
    if isinstance(names, str | os.PathLike):
        names = [names]
    with _without_garbage_collection():
        selections = [_select(os.fspath(name), results_dir) for name in names]
        if not names:
            selections = [_select_in(_path(os.fspath(results_dir)), results_dir)]
    command = _command(["summarize", *(os.fspath(name) for name in names)], results_dir)
    # A name for the page and the tables, which a single run or a results folder among the names has not.
    sweeps = [selection.name for selection in selections]
    name = ""
    if all(sweeps):
        name = " + ".join(sweeps) if len(sweeps) <= MOST_NAMES else f"{len(sweeps)} sweeps"
    home = selections[0].home if len(selections) == 1 else Path(results_dir)
    result = Selection(_merge(selections, command), name, home)
    if not result.started:
        names_text = ", ".join(map(str, names)) or os.fspath(results_dir)
        num_not_started = count_not_started(result.records)
        if num_not_started:
            raise StoreError(f"{names_text}: none of the sweep's {counted(num_not_started, 'run')} has started")
        raise StoreError(no_runs_message(names_text))
    return result


def _command(arguments: Sequence[str], results_dir: Folder) -> str:
    """Return a command of normlab that reads a results folder."""
    options = [] if os.fspath(results_dir) == "results" else ["--results-dir", os.fspath(results_dir)]
    return shlex.join(["normlab", *arguments, *options])


def _merge(selections: Sequence[Selection], command: str) -> list[RunEntry]:
    """Return each run of several selections once, with its arm, or with a conflict if it has arms of two names."""
    merged: dict[object, RunEntry] = {}
    sweep_of: dict[object, str] = {}
    """The sweep of which a run has its arm."""
    for selection in selections:
        for record in selection.records:
            # Two names may be paths to one folder, by a link or a relative path.
            path = _identity(record.folder.path)
            earlier_record = merged.get(path, record)
            if earlier_record.arm_conflict is not None:
                continue
            if earlier_record.arm and record.arm and earlier_record.arm != record.arm:
                text = (
                    f"run {record.run_id} is in arm {earlier_record.arm} of the sweep {sweep_of[path]} and in arm "
                    f"{record.arm} of the sweep {selection.name}"
                )
                merged[path] = replace(earlier_record, arm="", arm_conflict=ArmConflict(text, command))
            elif path not in merged or not earlier_record.arm:
                merged[path], sweep_of[path] = record, selection.name
    return list(merged.values())


def _identity(folder: Path) -> object:
    """Return what two paths to one folder have in common: its device and inode, or the path if there is none yet."""
    try:
        status = os.stat(folder)
    except OSError:
        return folder.resolve()
    return status.st_dev, status.st_ino


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
    top = _path(os.fspath(path))
    if is_run(top):
        return [RunRecord.read(RunFolder(top.absolute()))]
    return [RunRecord.read(folder) for folder in _run_folders(_runs_folder(top))]


def _run_folders(runs: Path) -> list[RunFolder]:
    """Return the runs in a `runs` folder, sorted by id, without reading them."""
    return [RunFolder(child) for child in _children(runs) if is_run(child)]


def resolve_run(query: str, results_dir: Folder, *, or_sweep: bool = False) -> RunFolder:
    """Return the run with a path, an id, an unambiguous beginning of an id, or a name.

    A path or an id needs no record of another run. A beginning or a name needs the run.json of each run.

    Args:
        query: The path, id, beginning or name.
        results_dir: The folder in which ids and names are looked up.
        or_sweep: Whether the user may name a sweep, too; the message then lists the sweeps.

    Raises:
        NoSuchRun: No run matches; the message lists the candidates.
        StoreError: Several do.
    """
    # A path or an id first: neither needs the records of the other runs, which may be thousands.
    if query and os.path.isfile(Path(query) / RUN_FILE):
        return RunFolder(_path(query).absolute())
    runs = _runs_folder(Path(results_dir))
    if is_file_name(query) and is_run(runs / query):
        return RunFolder(runs / query)
    names = {folder: _name_of(folder) for folder in _run_folders(runs)}
    matches = [folder for folder, name in names.items() if name == query or (query and folder.run_id.startswith(query))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        # Runs may share a name, so that no longer name tells them apart.
        advice = "give the id" if query in names.values() else "give more of the id"
        raise StoreError(f"run {query!r} could be {shorten(_titles(matches, names))}; {advice}")
    sweeps: list[str] = []
    if or_sweep:
        sweeps = [folder.name for folder in sweep_folders(results_dir)]
    kind = "run or sweep" if sweeps else "run"
    if not names:
        raise NoSuchRun(f"no {kind} {query!r}, and {no_runs_message(results_dir)}")
    hint = did_you_mean(query, {*sweeps, *names.values(), *(folder.run_id for folder in names)}, most=MOST_NAMES)
    choices: list[str] = []
    if sweeps:
        choices.append(f"the name of a sweep ({_choice(sweeps, _command(['list', 'sweeps'], results_dir))})")
    list_runs = shlex.join(["normlab", "summarize", os.fspath(results_dir)])
    choices.append(f"the id, its beginning or the name of a run ({_choice(_titles(names, names), list_runs)})")
    raise NoSuchRun(f"no {kind} {query!r} in {os.fspath(results_dir)}{hint}: give {', or '.join(choices)}")


def _choice(names: Sequence[str], command: str) -> str:
    """Return a few names; of many, which no line can hold, their number and the command that prints them."""
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    return f"one of {len(names):,}, which `{command}` prints"


@dataclass(frozen=True, slots=True)
class _Named:
    """The part of run.json with the name, which parses faster than all of it."""

    run_id: str
    name: str


def _name_of(folder: RunFolder) -> str:
    """Return the name of a run; its id if its record is damaged."""
    try:
        return folder.run(_Named).name
    except StoreError:
        return folder.run_id


def sweep_folders(results_dir: Folder) -> list[Path]:
    """Return the folders of the sweeps of a results folder, sorted by name.

    Raises:
        StoreError: The folder cannot be read.
    """
    return [folder for folder in _children(Path(results_dir) / SWEEPS_FOLDER) if has_plan(folder)]


def find_sweep(name: str, results_dir: Folder) -> Path | None:
    """Return the folder of the sweep with a name or a path; None if there is none."""
    # The name first: a folder of the same name may be someone else's results, which `normlab open` has unpacked.
    if is_file_name(name):
        in_results = sweep_folder(results_dir, name)
        if has_plan(in_results):
            return in_results
    path = _path(name)
    return path if has_plan(path) else None


def _path(name: str) -> Path:
    """Return the path of a run or a sweep with its own name at the end, below its results folder.

    The user may name it by a symbolic link, or by a path with `..`. A link in a results folder is part of a record.
    """
    path = Path(name)
    if path.is_symlink() and path.parent.name not in (RUNS_FOLDER, SWEEPS_FOLDER):
        return Path(os.path.realpath(path))
    # The name of the folder is that of the sweep, which `..` hides.
    if ".." in path.parts:
        return Path(os.path.abspath(path))
    return path


def find_folders(names: Sequence[str], results_dir: Folder) -> Iterator[tuple[Path | None, list[RunFolder]]]:
    """Yield the folder of each sweep with those of its runs that exist; None for the name of a run.

    The search of a sweep comes before it: a command that is killed between the two finds the search by the sweep.

    Raises:
        NoSuchRun: Neither a sweep nor a run matches.
        StoreError: A sweep's plan cannot be read.
    """
    for name in names:
        sweep = find_sweep(name, results_dir)
        if sweep is None:
            yield None, [resolve_run(name, results_dir, or_sweep=True)]
            continue
        sweep = sweep.absolute()
        for folder in filter(has_plan, (sweep.with_name(f"{sweep.name}{SEARCH}"), sweep)):
            runs = [run_of(folder, planned) for planned in read_plan(folder).runs]
            yield folder, [run for run in runs if is_run(run.path)]


def no_runs_message(path: str | os.PathLike[str]) -> str:
    return f"no runs in {os.fspath(path)}: train one with `normlab train`, or name a folder with runs"


def is_run(folder: Path) -> bool:
    """Whether a folder has a run.json or a status.json, or denies access.

    A run that is killed before it starts leaves a folder without both files.
    """
    for name in (RUN_FILE, STATUS_FILE):
        try:
            os.lstat(os.path.join(folder, name))  # not a list of the folder, which takes ten times as long
            return True
        except PermissionError:
            return True
        except (OSError, ValueError):  # no path has a NUL or a lone surrogate
            continue
    return False


def _select(name: str, results_dir: str | os.PathLike[str]) -> Selection:
    sweep = find_sweep(name, results_dir)
    if sweep is not None:
        return _sweep(sweep)
    folder = _path(name)
    if is_run(folder) or os.path.isdir(folder) or folder == Path(results_dir):
        return _select_in(folder, results_dir)
    run = resolve_run(name, results_dir, or_sweep=True)
    return Selection([RunRecord.read(run)], "", Path(results_dir))


def _select_in(folder: Path, results_dir: Folder) -> Selection:
    """Return the runs of a folder: of a sweep, of a results folder, or one run."""
    if has_plan(folder):
        return _sweep(folder)
    records = find_runs(folder)
    if not records:
        raise StoreError(no_runs_message(folder))
    home = folder
    if is_run(folder):
        home = Path(results_dir)
    elif folder.name == RUNS_FOLDER:
        home = folder.parent
    return Selection(records, "", home)


def _sweep(folder: Path) -> Selection:
    plan = read_plan(folder)
    name = one_line(plan.name)
    absolute_folder = folder.absolute()
    records: list[RunEntry] = []
    for planned in plan.runs:
        run, arm = run_of(absolute_folder, planned), one_line(planned.arm)
        if not is_run(run.path):
            problem = f"planned by the sweep {name}, not started"
            options = flatten(planned.config)
            records.append(RunEntry(run, NOT_STARTED, problem=problem, options=options, arm=arm, design=plan.design))
            continue
        record = RunRecord.read(run)
        if isinstance(record, RunRecord):
            # Another sweep may have trained the run; the notes of this plan report other pack sizes.
            pack = replace(record.run.pack, sweep=plan.name)
            run_in_sweep = replace(record.run, pack=pack)
            records.append(replace(record, run=run_in_sweep, arm=arm, design=plan.design))
        else:
            records.append(replace(record, arm=arm, design=plan.design))
    return Selection(records, name, folder)


def _runs_folder(top: Path) -> Path:
    # os.path returns False for a name that is too long; Path raises.
    if os.path.isdir(top / RUNS_FOLDER):
        return top / RUNS_FOLDER
    return top


def _children(folder: Path) -> list[Path]:
    """Return the entries of a folder that are not hidden, sorted; none if it does not exist."""
    if not os.path.isdir(folder):
        return []
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise io_error(folder, "read", error) from error
    return [child for child in children if not child.name.startswith(".")]


def _titles(folders: Iterable[RunFolder], names: Mapping[RunFolder, str]) -> list[str]:
    """Return the ids of some runs, each with its name if it has one."""
    texts: list[str] = []
    for folder in folders:
        name = names[folder]
        texts.append(folder.run_id if name == folder.run_id else f"{folder.run_id} ({name})")
    return texts
