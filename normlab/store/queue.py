"""Packs of a sweep that Slurm has, and the outcomes that their tasks report.

Both are in the sweep's `slurm/`, beside submitit's files. `queue.json` is written by the holder of the sweep's lock;
each task writes a file of its own, since many may end at once on as many machines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from normlab.errors import StoreError
from normlab.store.files import write_atomic
from normlab.store.plans import PackOutcome
from normlab.store.reading import HOW_TO_FIX, read_record
from normlab.store.schema import QUEUE_FILE, seal


@dataclass(frozen=True, slots=True)
class SubmittedPack:
    """A pack that was submitted to Slurm."""

    cluster: str
    """`sweep.slurm.cluster`."""
    job: str
    """Slurm's name of the task: ARRAY_TASK."""


def slurm_folder(folder: Path) -> Path:
    """Return the folder of a sweep's Slurm files."""
    return folder / "slurm"


def has_queue(folder: Path) -> bool:
    """Whether a sweep has submitted packs whose outcome is not yet recorded."""
    return os.path.isfile(slurm_folder(folder) / QUEUE_FILE)


def write_queue(folder: Path, queue: Mapping[int, SubmittedPack]) -> None:
    """Record the submitted packs, by their numbers; an empty queue has no file.

    Raises:
        StoreError: The system refused; the file is unchanged.
    """
    path = slurm_folder(folder) / QUEUE_FILE
    if queue:
        write_atomic(path, seal({"packs": {str(number): asdict(pack) for number, pack in queue.items()}}))
    else:
        path.unlink(missing_ok=True)


def read_queue(folder: Path) -> dict[int, SubmittedPack]:
    """Return the submitted packs, by their numbers.

    Raises:
        StoreError: The file is damaged, or was written by a newer normlab.
    """
    if not has_queue(folder):
        return {}
    path = slurm_folder(folder) / QUEUE_FILE
    try:
        return {int(number): SubmittedPack(**pack) for number, pack in read_record(path)["packs"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{path}: is not a valid queue ({error}); {HOW_TO_FIX[QUEUE_FILE]}") from error


def write_outcome(folder: Path, outcome: PackOutcome) -> None:
    """Write the outcome of a pack to the file of its task.

    Raises:
        StoreError: The system refused.
    """
    write_atomic(_outcome_file(folder, outcome.pack), seal(asdict(outcome)))


def read_outcome(folder: Path, number: int) -> PackOutcome | None:
    """Return the outcome that the task of a pack wrote, or None."""
    try:
        return PackOutcome.from_record(read_record(_outcome_file(folder, number)))
    except (StoreError, KeyError):
        return None


def delete_outcome(folder: Path, number: int) -> None:
    """Delete the outcome of a pack that starts again."""
    _outcome_file(folder, number).unlink(missing_ok=True)


def _outcome_file(folder: Path, number: int) -> Path:
    return slurm_folder(folder) / f"pack_{number:03d}.json"
