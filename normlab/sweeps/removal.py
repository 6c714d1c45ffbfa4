"""Delete runs and sweeps, and rename sweeps. No file outside of their real folders is changed.

A folder gets a hidden name before it is deleted, so that a kill leaves no half of a record. The same command finishes
after a kill: it deletes the hidden folders, and names that are gone are then no error.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from normlab.base.errors import ConfigError, StoreError
from normlab.config.sweep_options import SweepOptions
from normlab.store.files import check_links, delete_temporaries, io_error, is_file_name
from normlab.store.format import COMPLETED_STATES, LOCK_FILE, RUNS_FOLDER, SWEEPS_FOLDER
from normlab.store.hidden import delete_folder, finish_deletions
from normlab.store.lock import file_lock
from normlab.store.plans import SEARCH, Plan, has_plan, read_plan, read_used_runs, run_of
from normlab.store.query import Folder, NoSuchRun, find_folders, find_sweep
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.sweeps.files import read_queue, write_plan
from normlab.tracking.uploads import is_sending


@dataclass(frozen=True, slots=True)
class Removal:
    sweeps: Sequence[Path]
    runs: Sequence[RunFolder]
    kept: Mapping[str, str]
    """Why a run of a sweep stays as it is, by run id."""
    only_checkpoints: bool
    missing: Sequence[str] = ()
    """Names that match nothing, among others that do: a killed command may have deleted them."""

    def execute(self, change: Callable[[RunFolder], None] | None = None) -> None:
        """Delete the runs, or change each one under its lock, and then delete the sweeps.

        Raises:
            StoreError: A run or a sweep has become active, or another sweep uses a run since the removal was planned,
                or a file cannot be deleted.
        """
        with ExitStack() as locks:
            for sweep in self.sweeps:
                locks.enter_context(_locked(sweep))
            users = _users([run.path for run in self.runs], self.sweeps, self.only_checkpoints)
            for run in self.runs:
                if run.path in users:
                    raise StoreError(f"run {run.run_id}: sweep {users[run.path][0]} uses it since a moment; try again")
            for run in self.runs:
                with _locked(run.path):
                    if change is None:
                        delete_folder(run.path)
                    else:
                        change(run)
            # The sweeps last: after a kill, the same command finds by their plans the runs that are left.
            for sweep in self.sweeps:
                delete_folder(sweep)


def plan_removal(names: Sequence[str], results_dir: Folder, only_checkpoints: bool = False) -> Removal:
    """Return the sweeps and runs to delete, or the completed runs whose checkpoints are reduced.

    A run stays if a sweep that is not deleted uses it. Nothing is deleted but what a killed command has left.

    Raises:
        NoSuchRun: No name matches anything, and no killed command has left anything.
        StoreError: A named run is used by a sweep, a plan cannot be read, a run or a sweep is active, or a symbolic
            link leads out of its folder.
    """
    sweeps, runs = dict[Path, None](), dict[Path, RunFolder]()
    named: set[Path] = set()
    """Runs that are named themselves, not by their sweep."""
    is_finished = _finish_deletions(names, results_dir)
    found_folders: list[tuple[Path | None, list[RunFolder]]] = []
    errors: list[NoSuchRun] = []
    for name in names:
        try:
            found_folders += find_folders([name], results_dir)
        except NoSuchRun as error:
            errors.append(error)
    if errors and not (is_finished or found_folders):
        raise errors[0]
    for sweep, runs_of_sweep in found_folders:
        for run in runs_of_sweep:
            path = _real(run.path, RUNS_FOLDER)
            runs[path] = RunFolder(path)
            if sweep is None:
                named.add(path)
        if sweep is not None:
            sweeps[_real(sweep, SWEEPS_FOLDER)] = None
    # An active one is an error before anything is listed; `execute` holds the locks.
    for path in (*sweeps, *runs):
        with _locked(path):
            pass
    deleted_sweeps = [] if only_checkpoints else list(sweeps)
    users = _users(runs, deleted_sweeps, only_checkpoints)
    reasons_to_keep: dict[Path, str] = {}
    for path in runs:
        if path in users:
            reasons_to_keep[path] = f"used by sweep {', '.join(users[path])}"
    if only_checkpoints:
        for path, run in runs.items():
            if not _is_completed(run):
                reasons_to_keep[path] = "it is not completed, and resumes from them"
    else:
        for path in named & reasons_to_keep.keys():
            raise StoreError(
                f"run {path.name}: is {reasons_to_keep[path]}; delete that sweep too, with `normlab rm SWEEP RUN`"
            )
    removable_runs = [run for path, run in runs.items() if path not in reasons_to_keep]
    reasons = {path.name: reason for path, reason in reasons_to_keep.items()}
    return Removal(deleted_sweeps, removable_runs, reasons, only_checkpoints, [str(error) for error in errors])


def _finish_deletions(names: Sequence[str], results_dir: Folder) -> bool:
    """Delete what killed commands have left in the results folders of some names; whether they have left anything."""
    results = {Path(results_dir)}
    for name in names:
        # A name may be a path, results/sweeps/first; then its results folder is another.
        if len(Path(name).parts) > 2:
            results.add(Path(name).parent.parent)
    is_finished = False
    for folder in results:
        for kind in (RUNS_FOLDER, SWEEPS_FOLDER):
            if finish_deletions(folder / kind):
                is_finished = True
    return is_finished


def rename_sweep(name: str, new_name: str, results_dir: Folder) -> Path:
    """Give a sweep another name, and return its new folder. After a kill, the same call finishes.

    Raises:
        ConfigError: The new name is invalid or taken, or the sweep is that of a study, which finds it by its name.
        StoreError: There is no such sweep, it is active, a link leads out of it, or one of its packs is not completed.
    """
    # Before `with_name`, whose error for a wrong name does not say what to do.
    _check_name(new_name)
    sweep = find_sweep(name, results_dir)
    if sweep is None:
        raise StoreError(f"{name}: is not a sweep; name one (the name of a run is part of its record, and stays)")
    folder = _real(sweep.absolute(), SWEEPS_FOLDER)
    if folder.name.startswith("study-"):
        raise ConfigError(f"{folder.name}: is a sweep of a study, which finds it by this name; choose another sweep")
    renames = {folder: folder.with_name(new_name)}
    search = folder.with_name(f"{folder.name}{SEARCH}")
    if has_plan(search):
        # First: a command that is killed between the two finds the sweep by its old name, and finishes.
        renames = {search: search.with_name(f"{new_name}{SEARCH}")} | renames
    for target in renames.values():
        _check_name(target.name)
        if os.path.lexists(target):
            raise ConfigError(f"{target.name}: exists in {folder.parent}; choose another name")
    # Everything is checked, and locked, before anything changes: neither half would resume under its name.
    with ExitStack() as locks:
        plans: dict[Path, Plan] = {}
        for source, target in renames.items():
            locks.enter_context(_locked(source))
            plans[source] = read_plan(source, target.name)
            _check_packs(source, plans[source])
        for source, target in renames.items():
            # The plan before the folder: after a kill the old folder is found, and its plan has the new name.
            write_plan(source, replace(plans[source], name=target.name))
            try:
                source.rename(target)
            except OSError as error:
                raise io_error(source, "renamed", error) from error
    return renames[folder]


def _check_name(name: str) -> None:
    """Check that a sweep can have a name; the error begins with the name, since no `sweep.name` was typed."""
    try:
        SweepOptions(name=name).validate()
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("sweep.name=")) from error


def _check_packs(folder: Path, plan: Plan) -> None:
    """Check that no run of a sweep resumes in a pack, which keeps the name of its sweep; StoreError if one does."""
    for planned in plan.runs:
        run = run_of(folder, planned)
        if not run.exists() or _is_completed(run):
            continue
        if len(RunRecord.load(run, allow_lost_status=True).run.pack.runs) > 1:
            raise StoreError(
                f"run {run.run_id}: is not completed, and its pack resumes only in a sweep named {folder.name}; "
                "complete the sweep first"
            )


def _real(path: Path, kind: str) -> Path:
    """Return the folder of a run or a sweep in its results folder, with the links above that resolved.

    Raises:
        StoreError: It is not in a folder `runs` or `sweeps`, or that folder is a link: a stranger's may lead to any
            place, and the sweeps that use a run there are unknown.
    """
    if path.parent.name != kind or path.parent.is_symlink() or not is_file_name(path.name):
        raise StoreError(
            f"{path}: stays, since it is not in a folder {kind} of results, or that folder is a link; name it by its "
            "real folder"
        )
    return Path(os.path.realpath(path.parent.parent), kind, path.name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run or a sweep.

    Raises:
        StoreError: It is active, on this machine, in Slurm or in an upload; or a link leads out of its folder.
    """
    check_links(folder)
    subject = f"{folder.parent.name.removesuffix('s')} {folder.name}"
    with file_lock(folder / LOCK_FILE, subject, alternative=""):
        delete_temporaries(folder)
        if is_sending(folder):
            raise StoreError(f"{subject}: a process sends it to W&B; wait for it")
        if queue := read_queue(folder):
            raise StoreError(f"{subject}: Slurm has its job {min(queue.values())}; wait for it or cancel it")
        yield


def _users(runs: Collection[Path], without: Collection[Path], only_starts: bool = False) -> dict[Path, list[str]]:
    """Return the names of the sweeps that use each of some runs, by the run's folder; `without` are sweeps to ignore.

    A sweep uses the runs of its plan, and those from which runs of its plan start. With `only_starts` it uses the
    latter only, until all runs that start from them exist.
    """
    users: dict[Path, dict[str, None]] = {}
    folders: list[Path] = []
    for results in dict.fromkeys(path.parent.parent for path in runs):
        folders += sorted((results / SWEEPS_FOLDER).glob("[!.]*"))
    for folder in folders:
        if not has_plan(folder) or folder in without:
            continue
        folder_of_runs = folder.parent.parent / RUNS_FOLDER
        named = {path.name for path in runs if path.parent == folder_of_runs}
        for run_id, start in read_used_runs(folder):
            # Few runs are named, and a sweep may have ten thousand.
            used = named & {run_id, start}
            if only_starts:
                used = named & {start}
            if not used or (only_starts and RunFolder(folder_of_runs / run_id).exists()):
                continue
            for used_id in used:
                users.setdefault(folder_of_runs / used_id, {})[folder.name] = None
    return {path: list(names) for path, names in users.items()}


def _is_completed(run: RunFolder) -> bool:
    """Whether nothing is left to train of a run and of the runs that resume together with it."""
    try:
        if run.state() not in COMPLETED_STATES:
            return False
        for run_id in RunRecord.load(run).status.pack.runs:
            run_of_pack = RunFolder(run.path.with_name(run_id))
            if run_of_pack.exists() and run_of_pack.state() not in COMPLETED_STATES:
                return False
        return True
    except StoreError:
        # A damaged record.
        return False
