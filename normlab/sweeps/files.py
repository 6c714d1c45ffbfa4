"""The files of a sweep: its plan, the outcomes of its packs, logs, and the packs submitted to Slurm.

`results/sweeps/NAME/` holds `plan.json`, `ends.jsonl` (one line per outcome of a pack) and the logs of the packs.
Its folder `slurm/` holds the submitted packs (`queue.json`) and one file per task with the outcome, because tasks on
several machines may end at once. Only the holder of the folder's lock writes the other files.
"""

import os
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from normlab.base.errors import StoreError, counted, warn
from normlab.store.files import AppendFile, open_to_change, write_atomic
from normlab.store.format import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    OUTCOMES_FILE,
    PLAN_FILE,
    QUEUE_FILE,
    to_json,
    with_checksum,
)
from normlab.store.plans import Plan, has_plan
from normlab.store.reading import read_record, read_rows
from normlab.sweeps.measured_packs import Amount, PackMeasurement

MEMORY = "out of memory"
Cause = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join((FINISHED, INTERRUPTED, FAILED, MEMORY))})$")]
"""The cause of an outcome, and what the supervisor does about it:

finished       every run of the pack has finished or diverged
interrupted    a signal has stopped the pack, or a disk error; the same command resumes it
failed         any other end; `--retry-failed` resumes it
out of memory  two halves replace the pack in the plan; a single run has failed
"""


@dataclass(frozen=True, slots=True)
class PackOutcome:
    pack: int
    cause: Cause
    detail: str = ""
    gpu: str = ""
    """UUIDs of the GPUs that the supervisor gave to the process; empty on a CPU and in Slurm."""
    measured: PackMeasurement | None = None
    """What the pack has cost, if it is finished and its process trained all of it."""
    forecast_seconds: Amount | None = None
    """The forecast of `measured.seconds` by the equal packs on record at the start of the command; None without any."""
    time: float = field(default_factory=time.time)
    """When it ended: unix time, seconds."""

    @property
    def is_failure(self) -> bool:
        """Whether the pack is not trained again without `--retry-failed`, unless it is halved."""
        return self.cause in (FAILED, MEMORY)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker process tells the supervisor at the end of a pack."""

    cause: str
    detail: str
    can_continue: bool
    """Whether the process can train another pack."""
    measured: PackMeasurement | None = None


SlurmJob = Annotated[str, msgspec.Meta(pattern=r"^\d+(_\d+)?\Z")]
"""Slurm's name of a task, ARRAY_TASK or JOB. It is part of the names of files, and of a command for the user."""


@dataclass(frozen=True, slots=True)
class Queue:
    """The tasks of the packs that were submitted to Slurm, by the numbers of the packs."""

    packs: dict[int, SlurmJob]


def log_of(folder: Path, number: int) -> Path:
    return folder / "logs" / f"pack_{number:03d}.log"


def open_log(path: Path) -> BinaryIO:
    """Open a log to append to it; errors as for `open_to_change`."""
    return os.fdopen(open_to_change(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "ab")


def slurm_folder(folder: Path) -> Path:
    return folder / "slurm"


def queue_file(folder: Path) -> Path:
    return slurm_folder(folder) / QUEUE_FILE


def write_plan(folder: Path, plan: Plan) -> None:
    """Write or replace a sweep's plan.

    Raises:
        StoreError: The system refused; the file is unchanged.
    """
    write_atomic(folder / PLAN_FILE, with_checksum(asdict(plan)))


def append_outcome(folder: Path, outcome: PackOutcome) -> None:
    """Record the outcome of a pack.

    Raises:
        StoreError: The system refused.
    """
    with closing(AppendFile(folder / OUTCOMES_FILE, lines=True)) as file:
        file.append(to_json(asdict(outcome)))


def read_outcomes(folder: Path, *, warns: bool = True) -> list[PackOutcome]:
    """Return every recorded outcome, oldest first; leave out lines that hold none, and warn about them if `warns`.

    Raises:
        StoreError: The file exists and cannot be read.
    """
    path, outcomes = folder / OUTCOMES_FILE, list[PackOutcome]()
    rows = read_rows(path).rows
    for row in rows:
        with suppress(msgspec.ValidationError):
            outcomes.append(_outcome_of(row))
    ignored = len(rows) - len(outcomes)
    if ignored and warns:
        warn(f"{path}: {ignored} of {counted(len(rows), 'line')} ignored: no valid outcome of a pack")
    return outcomes


def failed_packs(folder: Path) -> dict[int, PackOutcome]:
    """Return the latest outcome of each pack that has failed, by its number; none where there is no plan."""
    # The outcomes of a deleted plan are of other packs.
    if not has_plan(folder):
        return {}
    latest = {outcome.pack: outcome for outcome in read_outcomes(folder, warns=False)}
    return {number: outcome for number, outcome in latest.items() if outcome.is_failure}


def _outcome_of(row: dict[str, Any]) -> PackOutcome:
    """Return the outcome in a row.

    Raises:
        msgspec.ValidationError: The row holds none.
    """
    try:
        return msgspec.convert(row, PackOutcome)
    except msgspec.ValidationError:
        # What a pack has cost is no reason to forget that it failed.
        without_cost = {**row, "measured": None, "forecast_seconds": None}
        return msgspec.convert(without_cost, PackOutcome)


def write_queue(folder: Path, queue: Mapping[int, str]) -> None:
    """Record the tasks of the submitted packs, by the numbers of the packs; an empty queue has no file.

    Raises:
        StoreError: The system refused; the file is unchanged.
    """
    path = queue_file(folder)
    if queue:
        write_atomic(path, with_checksum({"packs": {str(number): job for number, job in queue.items()}}))
    else:
        path.unlink(missing_ok=True)


def read_queue(folder: Path) -> dict[int, str]:
    """Return the tasks of the submitted packs, by the numbers of the packs.

    Raises:
        StoreError: The file is damaged, or has another format.
    """
    path = queue_file(folder)
    if not path.exists():
        return {}
    return read_record(path, Queue).packs


def task_outcome_file(folder: Path, number: int) -> Path:
    """Return the file in which the Slurm task of a pack writes its outcome."""
    return slurm_folder(folder) / f"pack_{number:03d}.json"


def write_task_outcome(folder: Path, outcome: PackOutcome) -> None:
    """Write the outcome of a pack to the file of its task.

    Raises:
        StoreError: The system refused.
    """
    write_atomic(task_outcome_file(folder, outcome.pack), with_checksum(asdict(outcome)))


def read_task_outcome(folder: Path, number: int) -> PackOutcome | None:
    """Return the outcome that the task of a pack wrote, or None."""
    # A task that was killed may have left no file, and its state in Slurm says more than a damaged one.
    with suppress(StoreError):
        return read_record(task_outcome_file(folder, number), PackOutcome)
    return None
