"""The plan of a sweep, `results/sweeps/NAME/plan.json`: its runs, which are stored in `results/runs/`, and their packs.

`normlab.sweeps` makes plans and writes them (`normlab/sweeps/files.py`).
"""

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from normlab.base.errors import StoreError, counted
from normlab.config.arms import NO_DESIGN, PREFIX, SweepDesign
from normlab.store.files import is_file_name
from normlab.store.format import PLAN_FILE, RUNS_FOLDER, SWEEPS_FOLDER
from normlab.store.reading import HOW_TO_FIX, Count, read_record
from normlab.store.runs import RunFolder

SEARCH = "-search"
"""The end of the name of a search, after the name of the sweep that it is for."""

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


@dataclass(frozen=True, slots=True)
class PlannedRun:
    run_id: str
    overrides: list[str]
    """Its arm, as `arm=NAME`, if the sweep has arms; then the overrides that the sweep varies."""
    config: dict[str, Any]
    """The complete config, as in run.json."""

    @property
    def arm(self) -> str:
        """The name of its arm; empty without one."""
        if self.overrides and self.overrides[0].startswith(PREFIX):
            return self.overrides[0].removeprefix(PREFIX)
        return ""


@dataclass(frozen=True, slots=True)
class Pack:
    """The runs that one process trains, as one stacked computation if there are several."""

    number: Count
    """Unique in the sweep, also among halved packs."""
    runs: Annotated[list[Count], msgspec.Meta(min_length=1)]
    """Indices into the plan's runs."""
    halved_from: Count | None = None
    """The number of the pack that ran out of memory, if this pack is one half of it."""


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    pack: str
    """The value of `sweep.pack` when the plan was made."""
    runs: list[PlannedRun]
    packs: list[Pack]
    """The packs of the runs that were incomplete when the plan was made."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Notes on packs that were halved and runs that train alone, and the criterion of a study."""
    memory_bytes: Count | None = None
    """With sweep.pack=auto, the memory of the process of one pack, which limits the size of packs."""
    parallel_packs: Positive = 1
    """Packs that train at once, on each GPU, by a command without `sweep.jobs`."""
    threads: Positive | None = None
    """Threads of each process, because bits depend on them; None in Slurm (`sweep.slurm.cpus`)."""
    design: SweepDesign = NO_DESIGN

    def runs_of(self, pack: Pack) -> list[PlannedRun]:
        return [self.runs[index] for index in pack.runs]

    def pack_of(self, number: int) -> Pack:
        return next(pack for pack in self.packs if pack.number == number)


def study_note(study: str, criterion: str) -> str:
    """Return the note in the plan of a sweep that belongs to a study, with the hash of the study's criterion."""
    return f"study {study}, criterion {criterion}"


def study_of(notes: Sequence[str]) -> tuple[str, str] | None:
    """Return the study and the hash of the criterion from the notes of a plan; None if it belongs to no study."""
    for note in notes:
        match = re.fullmatch(r"study (\w+), criterion ([0-9a-f]{12})", note)
        if match:
            return match[1], match[2]
    return None


def sweep_folder(results_dir: str | os.PathLike[str], name: str) -> Path:
    return Path(results_dir) / SWEEPS_FOLDER / name


def run_of(folder: Path, planned: PlannedRun) -> RunFolder:
    """Return the folder of a planned run, in the results folder that holds the sweep's folder."""
    return RunFolder(folder.parent.parent / RUNS_FOLDER / planned.run_id)


def has_plan(folder: Path) -> bool:
    """Whether a sweep's folder has a plan; a kill may leave a folder without one."""
    return os.path.isfile(folder / PLAN_FILE)


def read_plan(folder: Path, new_name: str = "") -> Plan:
    """Return a sweep's plan.

    Args:
        folder: The folder of the sweep, whose name is that of the sweep.
        new_name: The new name during a rename; the plan has it already if a rename was killed.

    Raises:
        StoreError: The file is missing or damaged, has another format, or is of another sweep.
    """
    path = folder / PLAN_FILE
    plan = read_record(path, Plan)
    problem = _problem_of(plan)
    if problem:
        raise StoreError(f"{path}: is not a valid plan ({problem}); {HOW_TO_FIX[PLAN_FILE]}")
    # A plan in the folder of another sweep would have its packs' ends and its checks, too.
    name = folder.absolute().name
    if plan.name not in (name, new_name):
        raise StoreError(
            f"{path}: is of sweep {plan.name}, not of {name}; if `normlab rename {name} {plan.name}` was killed, run "
            f"it again; if the plans of two sweeps are exchanged, exchange them back; if {folder} is a copy of the "
            "other sweep, delete it (no run is in it)"
        )
    return plan


# The part of a plan with the runs that it uses. It parses several times as fast as all of it.


@dataclass(frozen=True, slots=True)
class _TrainWithStart:
    start_from: Any = None


@dataclass(frozen=True, slots=True)
class _ConfigWithStart:
    train: _TrainWithStart = _TrainWithStart()


@dataclass(frozen=True, slots=True)
class _RunWithStart:
    run_id: str
    config: _ConfigWithStart = _ConfigWithStart()


@dataclass(frozen=True, slots=True)
class _RunsWithStart:
    runs: list[_RunWithStart]


def read_used_runs(folder: Path) -> list[tuple[str, str]]:
    """Return the id of each run of a sweep, and that of the run from which it starts; empty if it starts from none.

    Raises:
        StoreError: As `read_plan`; of the plan, only these ids are checked.
    """
    plan = read_record(folder / PLAN_FILE, _RunsWithStart)
    return [(run.run_id, str(run.config.train.start_from).rpartition("@")[0]) for run in plan.runs]


def _problem_of(plan: Plan) -> str:
    """Return why a plan is not valid; empty if it is."""
    # A run id is the name of a folder, never a path that leads out of the runs' folder.
    for run in plan.runs:
        if not is_file_name(run.run_id):
            return f"{run.run_id!r:.40} is not a run id"
    if not is_file_name(plan.name):
        return f"{plan.name!r:.40} is not the name of a sweep"
    if len({pack.number for pack in plan.packs}) < len(plan.packs):
        return "two packs have one number"
    members = [index for pack in plan.packs for index in pack.runs]
    if members and max(members) >= len(plan.runs):
        return f"a pack has a run outside of the {counted(len(plan.runs), 'run')}"
    # Two packs would write to one run.
    if len(set(members)) < len(members):
        return "a run is in two packs, or twice in one"
    return ""
