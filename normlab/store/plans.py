"""The files of a sweep: its plan, the outcomes of its packs, logs, and the packs submitted to Slurm.

`results/sweeps/NAME/` holds `plan.json`, `ends.jsonl` (one line per outcome of a pack) and the logs of the packs.
Its folder `slurm/` holds the submitted packs (`queue.json`) and one file per task with the outcome, because tasks on
several machines may end at once. The packs of a plan are frozen, but a pack that runs out of memory is
replaced by its halves. The runs are stored in `results/runs/`. Only the holder of the folder's lock writes.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from normlab.errors import StoreError, warn
from normlab.store.files import AppendFile, io_error, is_file_name, write_atomic
from normlab.store.format import LOCK_FILE, PLAN_FILE, QUEUE_FILE, RUNS_FOLDER, SWEEPS_FOLDER, to_json, with_checksum
from normlab.store.reading import HOW_TO_FIX, Count, read_record, read_rows
from normlab.store.runs import RunFolder

OUTCOMES_FILE = "ends.jsonl"

FINISHED = "finished"
"""The cause of an outcome if every run of the pack finished or diverged."""
INTERRUPTED = "interrupted"
"""The cause of an outcome if the process received a stop signal; its runs resume from their checkpoints."""
GPU_FAULT = "gpu fault"
"""The cause of an outcome if the GPU of the process failed; the runs resume on another GPU."""
RAISED, EXITED, KILLED, HUNG, MEMORY, UNREPORTED = "raised", "exited", "killed", "hung", "memory", "unreported"
FAILURES = {
    RAISED: "raised an exception",
    EXITED: "exited early",
    KILLED: "was killed",
    HUNG: "hung",
    MEMORY: "ran out of memory",
    UNREPORTED: "ended without reporting an outcome",
}
"""The causes that are failures, and the text of each."""


Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


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

    number: Count
    """Unique in the sweep, also among halved packs."""
    runs: Annotated[list[Count], msgspec.Meta(min_length=1)]
    """Indices into the plan's runs."""
    halved_from: Count | None = None
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
    """Notes on numerics: packs of several sizes, runs that were trained in other packs."""
    memory_bytes: Count | None = None
    """With sweep.pack=auto, the memory of the process of one pack, which limits the size of packs."""
    parallel_packs: Positive = 1
    """Packs that train at once, on each GPU, by a command without `sweep.jobs`."""
    threads: Positive | None = None
    """Threads of each process, because bits depend on them; None in Slurm (`sweep.slurm.cpus`)."""

    def runs_of(self, pack: Pack) -> list[PlannedRun]:
        """Return the runs of a pack."""
        return [self.runs[index] for index in pack.runs]

    def label(self, pack: Pack) -> str:
        """Return the overrides (or the id) of a pack's first run, and the number of other runs."""
        first = self.runs[pack.runs[0]]
        more = f" and {len(pack.runs) - 1} more" if len(pack.runs) > 1 else ""
        return (" ".join(first.overrides) or first.run_id) + more

    def pack_of(self, number: int) -> Pack:
        """Return a pack by its number.

        Raises:
            StoreError: No pack has this number.
        """
        for pack in self.packs:
            if pack.number == number:
                return pack
        raise StoreError(f"sweep {self.name} has no pack {number}; start the sweep again to list its packs")

    def halve(self, pack: Pack) -> Plan:
        """Return the plan with a pack replaced by its two halves, which get new numbers."""
        middle, first_number = len(pack.runs) // 2, max(pack.number for pack in self.packs) + 1
        parts = (pack.runs[:middle], pack.runs[middle:])
        halves = [Pack(number, runs, halved_from=pack.number) for number, runs in enumerate(parts, first_number)]
        position = self.packs.index(pack)
        note = (
            f"pack {pack.number} of {len(pack.runs)} runs ran out of memory and is halved: its runs train in packs of "
            f"{len(parts[0])} and {len(parts[1])}"
        )
        packs = [*self.packs[:position], *halves, *self.packs[position + 1 :]]
        return dataclasses.replace(self, packs=packs, notes=[*self.notes, note])


@dataclass(frozen=True, slots=True)
class PackOutcome:
    """The outcome of a pack."""

    pack: int
    cause: str
    """finished, interrupted, gpu fault, or one of `FAILURES`."""
    detail: str
    """What is known about the cause, as text."""
    code: int | None
    """Exit code, 0 if the process trains another pack; minus the number of the signal that ended the process."""
    seconds: float
    """How long the pack trained, with the start of the process if it is the first."""
    time: float
    """When it ended: unix time, seconds."""
    gpu: str = ""
    """UUIDs of the GPUs that the supervisor gave to the process; empty on a CPU and in Slurm."""


@dataclass(frozen=True, slots=True)
class SubmittedPack:
    """A pack that was submitted to Slurm."""

    cluster: str
    """`sweep.slurm.cluster`."""
    job: str
    """Slurm's name of the task: ARRAY_TASK."""


def sweep_folder(results_dir: str | os.PathLike[str], name: str) -> Path:
    """Return the folder of a sweep."""
    return Path(results_dir) / SWEEPS_FOLDER / name


def run_of(folder: Path, planned: PlannedRun) -> RunFolder:
    """Return the folder of a planned run, in the results folder that holds the sweep's folder."""
    return RunFolder(folder.parent.parent / RUNS_FOLDER / planned.run_id)


def lock_of(folder: Path) -> Path:
    """Return the lock file of a sweep's supervisor."""
    return folder / LOCK_FILE


def log_of(folder: Path, number: int, node: int = 0) -> Path:
    """Return the log of a pack, on one of its nodes."""
    return folder / "logs" / (f"pack_{number:03d}.node{node}.log" if node else f"pack_{number:03d}.log")


def has_plan(folder: Path) -> bool:
    """Whether a sweep's folder has a plan; a kill may leave a folder without one."""
    return os.path.isfile(folder / PLAN_FILE)


def write_plan(folder: Path, plan: Plan) -> None:
    """Write or replace a sweep's plan.

    Raises:
        StoreError: The system refused; the file is unchanged.
    """
    write_atomic(folder / PLAN_FILE, with_checksum(asdict(plan)))


def read_plan(folder: Path) -> Plan:
    """Return a sweep's plan.

    Raises:
        StoreError: The file is missing or damaged, or has another format.
    """
    path = folder / PLAN_FILE
    plan = read_record(path, Plan)
    if problem := _problem_of(plan):
        raise StoreError(f"{path}: is not a valid plan ({problem}); {HOW_TO_FIX[PLAN_FILE]}")
    return plan


def _problem_of(plan: Plan) -> str:
    """Return why a plan is not valid; empty if it is."""
    # A run id is the name of a folder, never a path that leads out of the runs' folder.
    if invalid := [run.run_id for run in plan.runs if not is_file_name(run.run_id)]:
        return f"{invalid[0]!r:.40} is not a run id"
    if not is_file_name(plan.name):
        return f"{plan.name!r:.40} is not the name of a sweep"
    if len({pack.number for pack in plan.packs}) < len(plan.packs):
        return "two packs have one number"
    members = [index for pack in plan.packs for index in pack.runs]
    if members and max(members) >= len(plan.runs):
        return f"a pack has a run outside of the {len(plan.runs)} runs"
    return "a run is in two packs, or twice in one" if len({*members}) < len(members) else ""


def append_outcome(folder: Path, outcome: PackOutcome) -> None:
    """Record the outcome of a pack.

    Raises:
        StoreError: The system refused.
    """
    file = AppendFile(folder / OUTCOMES_FILE, lines=True)
    try:
        file.append(to_json(asdict(outcome)))
    finally:
        file.close()


def archive_outcomes(folder: Path) -> None:
    """Rename the outcomes of a deleted plan, because the next plan reuses the numbers of packs.

    Raises:
        StoreError: The file cannot be renamed.
    """
    path = folder / OUTCOMES_FILE
    try:
        if path.exists():
            path.replace(folder / f"before_{time.time_ns()}_{OUTCOMES_FILE}")
    except OSError as error:
        raise io_error(path, "renamed", error) from error


def read_outcomes(folder: Path) -> list[PackOutcome]:
    """Return every recorded outcome, oldest first; warn about lines that hold none and leave them out.

    Raises:
        StoreError: The file exists and cannot be read.
    """
    path = folder / OUTCOMES_FILE
    outcomes = list(map(_outcome_of, read_rows(path).rows))
    if ignored := outcomes.count(None):
        warn(f"{path}: {ignored} of {len(outcomes)} lines hold no valid outcome of a pack; they are ignored")
    return [outcome for outcome in outcomes if outcome is not None]


def _outcome_of(record: Mapping[str, Any]) -> PackOutcome | None:
    """Return the outcome in a record; None if a field is missing or invalid."""
    fields = dataclasses.fields(PackOutcome)
    if not record.keys() >= {field.name for field in fields}:
        return None
    values = {field.name: record[field.name] for field in fields}
    kinds = {name: kind | int if kind is float else kind for name, kind in typing.get_type_hints(PackOutcome).items()}
    if not all(isinstance(value, kinds[name]) and not isinstance(value, bool) for name, value in values.items()):
        return None
    if values["cause"] not in (FINISHED, INTERRUPTED, GPU_FAULT, *FAILURES):
        return None
    return PackOutcome(**values)


def slurm_folder(folder: Path) -> Path:
    """Return the folder of a sweep's Slurm files."""
    return folder / "slurm"


def write_queue(folder: Path, queue: Mapping[int, SubmittedPack]) -> None:
    """Record the submitted packs, by their numbers; an empty queue has no file.

    Raises:
        StoreError: The system refused; the file is unchanged.
    """
    path = slurm_folder(folder) / QUEUE_FILE
    if queue:
        write_atomic(path, with_checksum({"packs": {str(number): asdict(pack) for number, pack in queue.items()}}))
    else:
        path.unlink(missing_ok=True)


def read_queue(folder: Path) -> dict[int, SubmittedPack]:
    """Return the submitted packs, by their numbers.

    Raises:
        StoreError: The file is damaged, or has another format.
    """
    path = slurm_folder(folder) / QUEUE_FILE
    if not path.exists():
        return {}
    try:
        queue = {int(number): SubmittedPack(**pack) for number, pack in read_record(path)["packs"].items()}
        for pack in queue.values():  # the job is part of the names of files, and of a command for the user
            if pack.cluster not in ("slurm", "local") or not re.fullmatch(r"\d+(_\d+)?", pack.job):
                raise ValueError(f"{pack.job!r:.40} of {pack.cluster!r:.40} is not a job")
        return queue
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{path}: is not a valid queue ({error}); {HOW_TO_FIX[QUEUE_FILE]}") from error


def write_task_outcome(folder: Path, outcome: PackOutcome) -> None:
    """Write the outcome of a pack to the file of its task.

    Raises:
        StoreError: The system refused.
    """
    write_atomic(_task_outcome_file(folder, outcome.pack), with_checksum(asdict(outcome)))


def read_task_outcome(folder: Path, number: int) -> PackOutcome | None:
    """Return the outcome that the task of a pack wrote, or None."""
    try:
        return _outcome_of(read_record(_task_outcome_file(folder, number)))
    except StoreError:
        return None


def delete_task_outcome(folder: Path, number: int) -> None:
    """Delete the outcome of a pack that starts again."""
    _task_outcome_file(folder, number).unlink(missing_ok=True)


def _task_outcome_file(folder: Path, number: int) -> Path:
    return slurm_folder(folder) / f"pack_{number:03d}.json"
