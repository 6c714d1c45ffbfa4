"""One run's folder: what the run is, its status, and its numbers.

`run.json` is written once. `status.json` is replaced. `metrics.jsonl` is appended to, one line per row after the first,
which has the run's id, and cut back to a checkpoint's length when a run is resumed; so are the statistics
(`arrays.py`). The writer holds `lock()`. Reading needs no lock and disturbs no writer. Methods that read or write
a file raise StoreError where the system refuses.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from normlab.base.errors import StoreError, counted
from normlab.store.files import AppendFile, check_links, delete_temporaries, make_folder, write_atomic
from normlab.store.format import (
    COMPLETED_STATES,
    KILLED,
    LOCK_FILE,
    METRICS_FILE,
    RUN_FILE,
    RUNNING,
    STATISTICS_FOLDER,
    STATUS_FILE,
    decode,
    encode,
    to_json,
    with_checksum,
)
from normlab.store.lock import file_lock, is_locked
from normlab.store.reading import (
    Rows,
    check_run_id,
    damaged,
    first_line,
    parse_rows,
    read_bytes,
    read_last_row,
    read_record,
    split_first_line,
)
from normlab.store.status import RowsDigest, Status

if TYPE_CHECKING:
    from normlab.store.arrays import StatisticsFiles


class OfRun(Protocol):
    """A part of run.json with the id of its run."""

    @property
    def run_id(self) -> str: ...


T = TypeVar("T", bound=OfRun | dict[str, Any])


class RunFolder:
    """A run's folder, with many readers and one writer."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metrics_path = self.path / METRICS_FILE
        self._metrics = AppendFile(self.metrics_path, lines=True)
        self._lock: int | None = None
        self._statistics: StatisticsFiles | None = None

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def statistics(self) -> StatisticsFiles:
        if self._statistics is None:
            from normlab.store.arrays import StatisticsFiles  # numpy is slow to import

            self._statistics = StatisticsFiles(self.path)
        return self._statistics

    def exists(self) -> bool:
        return (self.path / RUN_FILE).exists()

    @classmethod
    def create(cls, path: str | os.PathLike[str], run: Mapping[str, Any]) -> RunFolder:
        """Make the folder, write run.json, and return the folder; StoreError if it holds a run already."""
        folder = cls(path)
        if folder.exists():
            raise StoreError(f"{folder.path}: holds a run already; resume it, or use run.fresh=true")
        make_folder(folder.path)
        write_atomic(folder.path / RUN_FILE, with_checksum(run))
        return folder

    def run(self, kind: type[T] = dict[str, Any]) -> T:
        """Return the content of run.json, as a dict or an object of a type with a `run_id`.

        Raises:
            StoreError: As `read_record`, or it is of another run.
        """
        path = self.path / RUN_FILE
        run = read_record(path, kind)
        run_id = run.get("run_id") if isinstance(run, dict) else run.run_id
        check_run_id(path, run_id, self.path)
        return run

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace status.json; `version`, `run_id` and `updated` (unix time, seconds) are added.

        Raises:
            StoreError: The write or `check_place` failed; the file is unchanged.
        """
        self.check_place()
        path = self.path / STATUS_FILE
        # If a power cut brings back an older status, the run resumes from its checkpoints. The first status is synced:
        # a run with rows, but without a status and without a checkpoint, cannot resume.
        sync_name = status["state"] != RUNNING or not path.exists()
        write_atomic(
            path, with_checksum({**status, "run_id": self.run_id, "updated": time.time()}), sync_name=sync_name
        )

    def read_status(self) -> Status:
        """Return the content of status.json; a run that has none yet is running.

        Raises:
            StoreError: As `read_record`, or it is of another run.
        """
        path = self.path / STATUS_FILE
        if not path.exists():
            return Status(RUNNING)
        status = read_record(path, Status)
        check_run_id(path, status.run_id, self.path)
        missing = status.missing
        if missing:
            raise damaged(path, f"a run that is {status.state} has no {missing}")
        return status

    def has_lost_status(self) -> bool:
        """Whether the run has taken steps and has no status.json, which is written before the first step."""
        if (self.path / STATUS_FILE).exists():
            return False
        last_row = read_last_row(self.metrics_path)
        return last_row is not None and last_row["step"] > 0

    def status(self) -> dict[str, Any]:
        """Return `read_status` as nested plain values; every NaN is `math.nan`, so that two statuses compare equal."""
        return decode(encode(asdict(self.read_status())))

    def state_and_status(self) -> tuple[str, Status]:
        """Return the status and its state, or killed: the status is running while no process holds the run's lock."""
        status = self.read_status()
        if status.state == RUNNING and not self.is_active():
            # The writer may have written its last status and released the lock since the status was read.
            status = self.read_status()
            if status.state == RUNNING:
                return KILLED, status
        return status.state, status

    def is_active(self) -> bool:
        """Whether a process holds the run's lock."""
        return is_locked(self.path / LOCK_FILE)

    def state(self) -> str:
        """Return one of `STATES`, or killed."""
        return self.state_and_status()[0]

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run's lock for the length of a `with` block; the folder is made if needed.

        Temporary files of killed writers are deleted at the start, and the metrics closed at the end.

        Raises:
            StoreError: Another process holds the lock, or this one already does; or a link leads out of the folder.
        """
        check_links(self.path)
        make_folder(self.path)
        with file_lock(self.path / LOCK_FILE, f"run {self.run_id}") as self._lock:
            # Behind the lock: before it, they may be another writer's that is alive.
            for folder in (self.path, self.path / STATISTICS_FOLDER):
                delete_temporaries(folder)
            try:
                yield
            finally:
                self.close()
                self._lock = None

    def check_place(self) -> None:
        """Check that the locked folder is still at its path; elsewhere, another process may write to the same run.

        Raises:
            StoreError: The folder was moved, or its lock file deleted.
        """
        if self._lock is None:
            return
        # The lock is on the file that was opened, wherever it is now; a file at the path may be another one.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._lock), os.stat(self.path / LOCK_FILE)):
                return
        raise StoreError(
            f"{self.path}: was moved, or its lock file deleted, so another process may be writing to this run; put the "
            "folder back, and the same command resumes from the last checkpoint"
        )

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows in one system call: a kill tears the last one at most.

        Raises:
            StoreError: The system refused or `check_place` failed, and the record holds none of the rows.
        """
        content = b"".join(map(to_json, rows))
        if not content:
            return
        self.check_place()
        # In the same system call as the first row: a kill leaves no row without the id of its run.
        if self.size() == 0:
            content = first_line(self.run_id) + content
        self._metrics.append(content)

    def sync(self) -> None:
        """Wait until rows and statistics are on the disk, so that a power cut does not lose them."""
        # Statistics first: readers take a step's row as the sign that its statistics are there.
        if self._statistics is not None:
            self._statistics.sync()
        self._metrics.sync()

    def size(self) -> int:
        """Return the length of the metrics in bytes, which a checkpoint records for `truncate`."""
        try:
            return self.metrics_path.stat().st_size
        except FileNotFoundError:
            return 0

    def truncate(self, size: int) -> None:
        """Drop the rows that were appended after the metrics were `size` bytes long.

        Raises:
            StoreError: The metrics are shorter, or no row ends at `size`: rows before the checkpoint are missing.
        """
        content = read_bytes(self.metrics_path)
        self.close()
        if len(content) < size or content[:size][-1:] not in (b"", b"\n"):
            raise StoreError(
                f"{self.metrics_path}: has {counted(len(content), 'byte')} where the checkpoint says that a row ends "
                f"at byte {size}; put the file back, or run.fresh=true starts another run beside this one"
            )
        if content:
            self._metrics.truncate(size)

    def close(self) -> None:
        """Close the metrics and the statistics; the next `append` opens them again."""
        if self._statistics is not None:
            self._statistics.close()
        self._metrics.close()

    def rows(self, *kinds: str) -> Rows:
        """Return the rows of some kinds, or all; lines that are no row are left out and counted.

        Raises:
            StoreError: The metrics are of another run; or the run is completed, and they are not those that were
                written. (A run that diverged has no digest while its pack trains.)
        """
        status = self.read_status()  # before the metrics, in case that the run completes in between
        content = read_bytes(self.metrics_path)
        run_id, lines = split_first_line(content)
        if run_id is not None:
            check_run_id(self.metrics_path, run_id, self.path)
        written_digest = status.metrics
        if status.state in COMPLETED_STATES and written_digest is not None and digest(content) != written_digest:
            raise StoreError(self._change("metrics", digest(content), written_digest))
        return parse_rows(lines, *kinds)

    def digests(self) -> tuple[RowsDigest, dict[str, RowsDigest]]:
        """Return the digests of the metrics, and of each file of the statistics, for a run's last status."""
        return digest(read_bytes(self.metrics_path)), self.statistics.digests()

    def metrics_problem(self) -> str:
        """Return why the metrics of a run cannot be read, in a line; empty if they can."""
        try:
            self.rows("pace")
        except StoreError as error:
            return str(error)
        return ""

    def statistics_problem(self, tiers: Collection[str] | None = None) -> str:
        """Return how the statistics of a completed run differ from those that were written; empty if they do not.

        The intact rows can be read, since each has a checksum. `tiers` are the files to compare, by default all.
        """
        try:
            status = self.read_status()  # before the statistics, as for the metrics
            if status.state not in COMPLETED_STATES or status.statistics is None:
                return ""
            current = self.statistics.digests() if tiers is None else self.statistics.digests(tiers)
        except StoreError as error:
            return str(error)
        for name, written_digest in status.statistics.items():
            tier, _, _ = name.partition(".")
            if tiers is None or tier in tiers:
                change = self._change(f"statistics ({name})", current.get(name), written_digest)
                if change:
                    return change
        return ""

    def _change(self, name: str, current_digest: RowsDigest | None, written_digest: RowsDigest) -> str:
        """Return how a file differs from what was written, by their digests; empty if it does not."""
        if current_digest == written_digest:
            return ""
        if current_digest is not None and current_digest.rows == written_digest.rows:
            return f"the {name} of run {self.run_id} are not those that were written; restore a copy"
        current_rows = 0 if current_digest is None else current_digest.rows
        rows = f"{counted(current_rows, 'row')} where {written_digest.rows} were written"
        return f"the {name} of run {self.run_id} have {rows}; restore a copy"


def digest(content: bytes) -> RowsDigest:
    """Return the number of lines and the SHA-256 of the metrics."""
    lines = content.count(b"\n")
    if content and not content.endswith(b"\n"):  # a torn last line counts as well
        lines += 1
    return RowsDigest(lines, hashlib.sha256(content).hexdigest())
