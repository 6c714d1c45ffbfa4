"""One run's folder: what the run is, how it stands, and its numbers.

`run.json` is written once. `status.json` is replaced whole. `metrics.jsonl` is only appended to, one line a
row, and cut back to a checkpoint's length when a run is resumed; so are the statistics (`arrays.py`). Whoever
writes holds `lock()`:

    folder = RunFolder(path)
    with folder.lock():
        if not folder.exists():
            RunFolder.create(path, run)
        folder.append(rows)
        folder.write_status({"state": "running", ...})

Reading needs no lock and disturbs no writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normlab.errors import StoreError
from normlab.store.files import refusal, sweep_temporaries, write_all, write_atomic
from normlab.store.lock import hold, is_held
from normlab.store.reading import MENDING, Rows, read_bytes, read_record, read_rows
from normlab.store.schema import (
    ENDED,
    KILLED,
    LOCK_FILE,
    METRICS_FILE,
    RUN_FILE,
    RUNNING,
    STATES,
    STATUS_FILE,
    decode,
    seal,
    to_json,
)

if TYPE_CHECKING:
    from normlab.store.arrays import Arrays


def pack_members(record: Mapping[str, Any]) -> list[str]:
    """Return the ids of the runs in the pack that a run.json or a status.json names; none where it names no pack."""
    return (record.get("pack") or {}).get("runs") or []


class RunFolder:
    """A run's folder, to be read by anyone and written by one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        self._lock: int | None = None
        self._arrays: Arrays | None = None

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def metrics_path(self) -> Path:
        """Where the rows are."""
        return self.path / METRICS_FILE

    @property
    def arrays(self) -> Arrays:
        """The statistics."""
        if self._arrays is None:
            from normlab.store.arrays import Arrays

            self._arrays = Arrays(self.path)
        return self._arrays

    def exists(self) -> bool:
        """Whether the run was created."""
        return (self.path / RUN_FILE).exists()

    # What the run is, and how it stands.

    @classmethod
    def create(cls, path: str | os.PathLike[str], run: Mapping[str, Any]) -> RunFolder:
        """Make the folder, write run.json, and return the folder.

        Raises:
            StoreError: There is a run already, or the system refused.
        """
        folder = cls(path)
        if folder.exists():
            raise StoreError(f"{folder.path}: holds a run already; resume it, or use run.fresh=true")
        folder._make()
        write_atomic(folder.path / RUN_FILE, seal(run))
        return folder

    def run(self) -> dict[str, Any]:
        """The content of run.json.

        Raises:
            StoreError: It is missing or damaged, or was written by a newer normlab.
        """
        return read_record(self.path / RUN_FILE)

    def trained_with(self) -> list[str]:
        """Return the ids of the runs that it last trained with in one computation, its own among them.

        Raises:
            StoreError: run.json or status.json is damaged, or was written by a newer normlab.
        """
        return pack_members(self.status()) or pack_members(self.run()) or [self.run_id]

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace status.json; `version` and `updated` (unix time, seconds) are added."""
        if status.get("state") not in STATES:
            raise ValueError(f"state {status.get('state')!r} is none of {', '.join(STATES)}")
        write_atomic(self.path / STATUS_FILE, seal({**status, "updated": time.time()}))

    def status(self) -> dict[str, Any]:
        """The content of status.json; of a run too young to have one, the state alone.

        Raises:
            StoreError: It is damaged, or was written by a newer normlab.
        """
        path = self.path / STATUS_FILE
        if not path.exists():
            return {"state": RUNNING}
        status = decode(read_record(path))
        if not isinstance(status.get("state"), str):
            raise StoreError(f"{path}: is damaged (it names no state); {MENDING[STATUS_FILE]}")
        return status

    def observe(self) -> tuple[str, dict[str, Any]]:
        """The state as it is, and the status that it was seen with.

        The state is the status's own, except that a run which says running and whose lock nobody holds
        was killed.
        """
        status = self.status()
        if status["state"] == RUNNING and not self.is_active():
            # The writer may have written its last status and let go between the two looks.
            status = self.status()
            if status["state"] == RUNNING:
                return KILLED, status
        return status["state"], status

    def is_active(self) -> bool:
        """Whether a process has the folder to itself now, whatever its status says."""
        return is_held(self.path / LOCK_FILE)

    def state(self) -> str:
        """One of `STATES`, or killed."""
        return self.observe()[0]

    # Writing.

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one writer for the length of a `with` block; the folder is made if there is none.

        Leftovers of killed writers are swept on the way in, and the metrics closed on the way out.

        Raises:
            StoreError: Another process is the writer, or this one is already.
        """
        self._make()
        with hold(self.path / LOCK_FILE, f"run {self.run_id}") as self._lock:
            sweep_temporaries(self.path)
            try:
                yield
            finally:
                self.close()
                self._lock = None

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows at the end, in one system call: a kill tears the last one at most.

        Raises:
            StoreError: The system refused; none of the rows is in the record, and it can go on. Or the lock was taken
            away from under its holder.
        """
        content = b"".join(map(to_json, rows))
        if not content:
            return
        if self._lock is not None and os.fstat(self._lock).st_nlink == 0:
            raise StoreError(
                f"{self.path / LOCK_FILE}: was deleted, so another process may be writing to this run; "
                "the same command goes on from the last checkpoint"
            )
        try:
            descriptor = self._open()
            start = os.fstat(descriptor).st_size
            try:
                write_all(descriptor, content)
            except BaseException:
                # Half a row would run into the next one.
                os.ftruncate(descriptor, start)
                raise
        except OSError as error:
            raise refusal(self.metrics_path, "written", error) from error

    def sync(self) -> None:
        """Return once rows and statistics are on the disk, so that a power cut does not lose them."""
        if self._arrays is not None:
            self._arrays.sync()
        if self._descriptor is not None:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise refusal(self.metrics_path, "written", error) from error

    def size(self) -> int:
        """Length of the metrics, in bytes: what a checkpoint notes and `cut` is given."""
        try:
            return self.metrics_path.stat().st_size
        except FileNotFoundError:
            return 0

    def cut(self, size: int) -> None:
        """Drop what was appended after the metrics were `size` bytes long.

        Raises:
            StoreError: They are shorter than that, or no row ends there: rows that the checkpoint counts on are gone.
        """
        found = self.size()
        if found < size:
            raise StoreError(
                f"{self.metrics_path}: has {found} bytes where the checkpoint says {size}, rows were lost; "
                "put the file back, or run.fresh=true starts another run beside this one"
            )
        self.close()
        if found == 0:
            return
        try:
            with self.metrics_path.open("r+b") as file:
                file.seek(max(0, size - 1))
                if size and file.read(1) != b"\n":
                    raise StoreError(
                        f"{self.metrics_path}: has no end of a row at byte {size}, where the checkpoint says that it "
                        "ends; put the file back, or run.fresh=true starts another run beside this one"
                    )
                file.truncate(size)
                os.fsync(file.fileno())
        except OSError as error:
            raise refusal(self.metrics_path, "cut", error) from error

    def close(self) -> None:
        """Close the metrics and the statistics; the next `append` opens them again."""
        if self._arrays is not None:
            self._arrays.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise refusal(self.path, "made", error) from error

    def _open(self) -> int:
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self.metrics_path, flags, 0o666)
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                # A kill tore the last line; what follows must not become part of it.
                write_all(self._descriptor, b"\n")
        return self._descriptor

    # Reading.

    def rows(self, kind: str | None = None, *, without: str | None = None) -> Rows:
        """The rows of one kind, or all; lines that cannot be read are skipped and counted.

        Args:
            kind: The kind that is wanted.
            without: A kind that is passed over unread, damaged or not: of a long run most rows are `train`.

        Raises:
            StoreError: The file is there and cannot be opened.
        """
        return read_rows(self.metrics_path, kind, without=without)

    def metrics_digest(self) -> dict[str, Any]:
        """Return the number of rows and the SHA-256 of the metrics: `rows`, `sha256`, for a run's last status.

        Raises:
            StoreError: The file is there and cannot be read.
        """
        content = read_bytes(self.metrics_path)
        rows = content.count(b"\n") + (content[-1:] not in (b"", b"\n"))
        return {"rows": rows, "sha256": hashlib.sha256(content).hexdigest()}

    def metrics_problem(self) -> str:
        """Return how the metrics differ from those with which the run ended, in a line.

        It is empty where they are the same, where the run has not ended, and where its status holds no digest: a
        run that ended before there were digests has none.
        """
        try:
            status = self.status()  # before the metrics: a run that ends in between has not ended here
            written = status.get("metrics")
            if status["state"] not in ENDED or not isinstance(written, dict):
                return ""
            found = self.metrics_digest()
        except StoreError as error:
            return str(error)
        if found == written:
            return ""
        if found["rows"] == written.get("rows"):
            return f"the metrics of run {self.run_id} are not those that were written; put back a copy"
        return (
            f"the metrics of run {self.run_id} have {found['rows']} rows where {written.get('rows')} were written; "
            "put back a copy"
        )
