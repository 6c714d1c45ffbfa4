"""What Slurm has of a sweep: which packs it was handed, and what their tasks say of their ends.

All of it is in the sweep's `slurm/`, beside what submitit keeps there. `queue.json` is written by whoever holds the
sweep's lock; each task has a file of its own, since many may end at once on as many machines.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from normlab.errors import StoreError
from normlab.store.files import write_atomic
from normlab.store.plans import End
from normlab.store.reading import MENDING, read_record
from normlab.store.schema import QUEUE_FILE, seal

SLURM_FOLDER = "slurm"


@dataclass(frozen=True, slots=True)
class Handed:
    """A pack in the hands of Slurm."""

    cluster: str
    """`sweep.slurm.cluster`."""
    job: str
    """What it is called there: ARRAY_TASK."""


def handed_to(folder: Path) -> Path:
    """Where a sweep keeps what Slurm has of it."""
    return folder / SLURM_FOLDER


def has_queue(folder: Path) -> bool:
    """Whether a sweep has handed something to Slurm of whose end is not yet known."""
    return os.path.isfile(handed_to(folder) / QUEUE_FILE)


def write_queue(folder: Path, queue: Mapping[int, Handed]) -> None:
    """Note which packs Slurm has, by their numbers; nothing stays of an empty one.

    Raises:
        StoreError: The system refused; the note is as it was.
    """
    path = handed_to(folder) / QUEUE_FILE
    if queue:
        write_atomic(path, seal({"packs": {str(number): asdict(handed) for number, handed in queue.items()}}))
    else:
        path.unlink(missing_ok=True)


def read_queue(folder: Path) -> dict[int, Handed]:
    """Which packs Slurm has, by their numbers.

    Raises:
        StoreError: The note is damaged, or was written by a newer normlab.
    """
    if not has_queue(folder):
        return {}
    path = handed_to(folder) / QUEUE_FILE
    try:
        return {int(number): Handed(**handed) for number, handed in read_record(path)["packs"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{path}: is no queue that this normlab knows ({error}); {MENDING[QUEUE_FILE]}") from error


def write_end(folder: Path, end: End) -> None:
    """Say how a pack's process ended where its task can: it has a file of its own, since tasks write at once.

    Raises:
        StoreError: The system refused.
    """
    write_atomic(_end_file(folder, end.pack), seal(asdict(end)))


def read_end(folder: Path, number: int) -> End | None:
    """What the task of a pack said of its end, if it came to that."""
    try:
        record = read_record(_end_file(folder, number))
        return End(**{field.name: record[field.name] for field in dataclasses.fields(End)})
    except (StoreError, KeyError):
        return None


def forget_end(folder: Path, number: int) -> None:
    """A pack goes on: what its last task said counts no more."""
    _end_file(folder, number).unlink(missing_ok=True)


def _end_file(folder: Path, number: int) -> Path:
    return handed_to(folder) / f"pack_{number:03d}.json"
