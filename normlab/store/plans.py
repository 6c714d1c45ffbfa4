"""The plan of a sweep, `results/sweeps/NAME/plan.json`: its runs, which are stored in `results/runs/`, and their packs.

`normlab.sweeps` makes plans and writes them (`normlab/sweeps/files.py`).
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.errors import StoreError
from normlab.store.files import is_file_name
from normlab.store.format import PLAN_FILE, RUNS_FOLDER, SWEEPS_FOLDER
from normlab.store.reading import HOW_TO_FIX, read_record
from normlab.store.runs import RunFolder


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a sweep."""

    run_id: str
    overrides: list[str]
    """The overrides that the sweep varies."""
    config: dict[str, Any]
    """The complete config, as in run.json."""


@dataclass(frozen=True, slots=True)
class Pack:
    """The runs that one process trains, as one stacked computation if there are several."""

    number: int
    """Unique in the sweep, also among halved packs."""
    runs: list[int]
    """Indices into the plan's runs."""
    halved_from: int | None = None
    """The number of the pack that ran out of memory, if this pack is one half of it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of a sweep and their packs."""

    name: str
    pack: str
    """The value of `sweep.pack` when the plan was made."""
    runs: list[PlannedRun]
    packs: list[Pack]
    """The packs of the runs that were incomplete when the plan was made."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Notes on packs that were halved and runs that train alone, and the criterion of a study."""
    memory_bytes: int | None = None
    """With sweep.pack=auto, the memory of the process of one pack, which limits the size of packs."""
    parallel_packs: int = 1
    """Packs that train at once, on each GPU, by a command without `sweep.jobs`."""
    threads: int | None = None
    """Threads of each process, because bits depend on them; None in Slurm (`sweep.slurm.cpus`)."""

    def runs_of(self, pack: Pack) -> list[PlannedRun]:
        """Return the runs of a pack."""
        return [self.runs[index] for index in pack.runs]

    def pack_of(self, number: int) -> Pack:
        """Return a pack by its number."""
        return next(pack for pack in self.packs if pack.number == number)


def sweep_folder(results_dir: str | os.PathLike[str], name: str) -> Path:
    """Return the folder of a sweep."""
    return Path(results_dir) / SWEEPS_FOLDER / name


def run_of(folder: Path, planned: PlannedRun) -> RunFolder:
    """Return the folder of a planned run, in the results folder that holds the sweep's folder."""
    return RunFolder(folder.parent.parent / RUNS_FOLDER / planned.run_id)


def has_plan(folder: Path) -> bool:
    """Whether a sweep's folder has a plan; a kill may leave a folder without one."""
    return os.path.isfile(folder / PLAN_FILE)


def read_plan(folder: Path) -> Plan:
    """Return a sweep's plan.

    Raises:
        StoreError: The file is missing or damaged, or has another format.
    """
    path = folder / PLAN_FILE
    record = read_record(path)
    try:
        runs = [PlannedRun(**run) for run in record["runs"]]
        # A run id is the name of a folder, never a path that leads out of the runs' folder.
        if invalid := [run.run_id for run in runs if not is_file_name(run.run_id)]:
            raise ValueError(f"{invalid[0]!r:.40} is not a run id")
        if not is_file_name(record["name"]):
            raise ValueError(f"{record['name']!r:.40} is not the name of a sweep")
        if not all(_are_texts(run.overrides) for run in runs):
            raise ValueError("an override is not a text")
        if not all(isinstance(run.config, dict) for run in runs):
            raise ValueError("a config is not an object")
        packs = [Pack(**pack) for pack in record["packs"]]
        halved = [pack.halved_from for pack in packs if pack.halved_from is not None]
        if not all(map(_is_count, [*halved, *(pack.number for pack in packs)])) or len(
            {pack.number for pack in packs}
        ) < len(packs):
            raise ValueError("a pack has an invalid number")
        if not all(isinstance(pack.runs, list) and pack.runs for pack in packs):
            raise ValueError("a pack has no list of runs")
        if not all(_is_count(index) and index < len(runs) for pack in packs for index in pack.runs):
            raise ValueError(f"a pack has a run outside of the {len(runs)} runs")
        members = [index for pack in packs for index in pack.runs]
        if len({*members}) < len(members):
            raise ValueError("a run is in two packs, or twice in one")
        values = {field.name: record[field.name] for field in dataclasses.fields(Plan)}
        plan = Plan(**{**values, "runs": runs, "packs": packs})
        is_valid = {
            "pack": isinstance(plan.pack, str),
            "notes": _are_texts(plan.notes),
            "memory_bytes": plan.memory_bytes is None or _is_count(plan.memory_bytes),
            "parallel_packs": _is_count(plan.parallel_packs) and plan.parallel_packs > 0,
            "threads": plan.threads is None or (_is_count(plan.threads) and plan.threads > 0),
        }
        if wrong := [name for name, valid in is_valid.items() if not valid]:
            raise ValueError(f"{wrong[0]} is {record[wrong[0]]!r:.40}")
        return plan
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: is not a valid plan ({error}); {HOW_TO_FIX[PLAN_FILE]}") from error


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63
