"""A sweep's folder: which runs it is, which of them train together, and how each attempt at them ended.

`results/sweeps/NAME/` holds `plan.json`, whose packs are frozen once it is written (but for a pack that is halved where
the memory ran out, which replaces it whole), `ends.jsonl`, one line for each end of a pack's process, and the
processes' logs. The runs themselves are where all runs are, `results/runs/`. Whoever writes holds the lock of the
folder.
"""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from normlab.errors import StoreError
from normlab.store.files import refusal, write_all, write_atomic
from normlab.store.reading import MENDING, read_record, read_rows
from normlab.store.runs import RunFolder
from normlab.store.schema import LOCK_FILE, PLAN_FILE, RUNS_FOLDER, SWEEPS_FOLDER, seal, to_json

_TRIED = "an older normlab chose the sizes of its packs by timing: the same command may choose others elsewhere"
"""The note of a plan with rows of timing trials."""

ENDS_FILE = "ends.jsonl"
LOGS_FOLDER = "logs"

FINISHED = "finished"
"""Every run of the pack has ended, finished or diverged."""
INTERRUPTED = "interrupted"
"""It was asked to stop; its runs go on from their checkpoints."""
RAISED, EXITED, KILLED, HUNG, MEMORY, LOST = "raised", "exited", "killed", "hung", "memory", "lost"
FAILURES = {
    RAISED: "raised an exception",
    EXITED: "exited by itself",
    KILLED: "was killed",
    HUNG: "hung",
    MEMORY: "ran out of memory",
    LOST: "is lost",
}
"""The causes that are failures, in words."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a sweep."""

    run_id: str
    words: list[str]
    """The words that tell it from the others: those that the sweep varies."""
    config: dict[str, Any]
    """Its whole config, as run.json has it."""


@dataclass(frozen=True, slots=True)
class Pack:
    """The runs that one process trains, as one stacked computation where they are several."""

    number: int
    """Its own for good: what is halved gets new ones."""
    jobs: list[int]
    """Its runs, as indices into the plan's jobs."""
    halved_from: int | None = None
    """The pack that ran out of memory, of which this is one half."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep is."""

    name: str
    pack: str
    """The word `sweep.pack` that it was grouped by."""
    jobs: list[Job]
    packs: list[Pack]
    """The runs that were still to be trained when the plan was made; of the others there is no pack."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What to know of the runs' numerics, a line each: packs of several sizes, runs that were trained differently."""
    memory_bytes: int | None = None
    """Where `pack` is auto: the memory of one pack's process, in bytes, by which its rule bounds the size of packs."""

    def members(self, pack: Pack) -> list[Job]:
        """A pack's jobs."""
        return [self.jobs[index] for index in pack.jobs]

    def pack_of(self, number: int) -> Pack:
        """The pack of a number.

        Raises:
            StoreError: There is none.
        """
        for pack in self.packs:
            if pack.number == number:
                return pack
        raise StoreError(f"sweep {self.name} has no pack {number}; start the sweep again, which names its packs")

    def halved(self, pack: Pack) -> Plan:
        """The plan with two halves of a pack where it was, numbered after all others."""
        middle, after = len(pack.jobs) // 2, max(one.number for one in self.packs) + 1
        parts = (pack.jobs[:middle], pack.jobs[middle:])
        halves = [Pack(after + half, jobs, halved_from=pack.number) for half, jobs in enumerate(parts)]
        where = self.packs.index(pack)
        note = (
            f"pack {pack.number} of {len(pack.jobs)} runs ran out of memory and is halved: its runs train in packs of "
            f"{len(parts[0])} and {len(parts[1])}"
        )
        packs = [*self.packs[:where], *halves, *self.packs[where + 1 :]]
        return dataclasses.replace(self, packs=packs, notes=[*self.notes, note])


@dataclass(frozen=True, slots=True)
class End:
    """How a pack's process ended."""

    pack: int
    cause: str
    """finished, interrupted, or one of `FAILURES`."""
    detail: str
    """What is known of why, in words."""
    code: int | None
    """Its exit code; minus the number of the signal that ended it."""
    seconds: float
    """How long it ran."""
    time: float
    """When it ended: unix time, seconds."""


def sweep_folder(results_dir: str | os.PathLike[str], name: str) -> Path:
    """Where a sweep of a name is kept."""
    return Path(results_dir) / SWEEPS_FOLDER / name


def run_of(folder: Path, job: Job) -> RunFolder:
    """The folder of a job's run, in the results folder that the sweep's own is in, wherever that was moved to."""
    return RunFolder(folder.parent.parent / RUNS_FOLDER / job.run_id)


def lock_of(folder: Path) -> Path:
    """The file by which a sweep has one supervisor."""
    return folder / LOCK_FILE


def log_of(folder: Path, number: int) -> Path:
    """What the process of a pack has printed."""
    return folder / LOGS_FOLDER / f"pack_{number:03d}.log"


def has_plan(folder: Path) -> bool:
    """Whether a sweep was begun in a folder; a kill may leave one without a plan."""
    return os.path.isfile(folder / PLAN_FILE)


def write_plan(folder: Path, plan: Plan) -> None:
    """Write a sweep's plan, or replace it.

    Raises:
        StoreError: The system refused; the plan is as it was.
    """
    write_atomic(folder / PLAN_FILE, seal(asdict(plan)))


def read_plan(folder: Path) -> Plan:
    """A sweep's plan.

    Raises:
        StoreError: It is missing or damaged, or was written by a newer normlab.
    """
    path = folder / PLAN_FILE
    record = read_record(path)
    try:
        jobs = [Job(**job) for job in record["jobs"]]
        if strays := [job.run_id for job in jobs if not job.run_id or Path(job.run_id).name != job.run_id]:
            raise ValueError(f"{strays[0]!r} is no run's id")  # a folder's name, never a way out of the runs
        packs = [Pack(**pack) for pack in record["packs"]]
        if any(index not in range(len(jobs)) for pack in packs for index in pack.jobs):
            raise ValueError(f"a pack has a run that is none of {len(jobs)}")
        notes = record.get("notes", [_TRIED] if record.get("tried") else [])
        return Plan(record["name"], record["pack"], jobs, packs, notes, record.get("memory_bytes"))
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: is no plan that this normlab knows ({error}); {MENDING[PLAN_FILE]}") from error


def append_end(folder: Path, end: End) -> None:
    """Note how a pack's process ended.

    Raises:
        StoreError: The system refused.
    """
    path = folder / ENDS_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            torn = size and os.pread(descriptor, 1, size - 1) != b"\n"  # by a kill: the next line begins afresh
            write_all(descriptor, (b"\n" if torn else b"") + to_json(asdict(end)))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise refusal(path, "written", error) from error


def set_ends_aside(folder: Path) -> None:
    """Keep the ends of a plan that is gone under another name: the packs of the next one are others.

    Raises:
        StoreError: The system refused.
    """
    path = folder / ENDS_FILE
    try:
        if path.exists():
            path.replace(folder / f"before_{time.time_ns()}_{ENDS_FILE}")
    except OSError as error:
        raise refusal(path, "renamed", error) from error


def read_ends(folder: Path) -> list[End]:
    """Every end of a pack's process, oldest first; lines that cannot be read are left out.

    Raises:
        StoreError: The file is there and cannot be opened.
    """
    names = [field.name for field in dataclasses.fields(End)]
    rows = read_rows(folder / ENDS_FILE).rows
    whole = [End(**{name: row[name] for name in names}) for row in rows if all(name in row for name in names)]
    known = (FINISHED, INTERRUPTED, *FAILURES)
    return [end for end in whole if isinstance(end.pack, int) and isinstance(end.cause, str) and end.cause in known]
