"""Read what was added to a run's record since the last reading, so that following a long run costs little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normlab.errors import StoreError
from normlab.stats.profiles import Profiles
from normlab.store.arrays import Part, row_type
from normlab.store.files import io_error
from normlab.store.reading import parse_rows
from normlab.store.runs import RunFolder

_COMPARED = 256
"""Bytes before a position in a file that are compared with those at the last reading."""


class AddedRows:
    """Reads the rows of a run's metrics as they are written.

    A row that is not complete yet is read when it is. Damaged rows are left out and counted.

    Args:
        path: The metrics.
    """

    def __init__(self, path: Path) -> None:
        self._metrics = _AddedBytes(path)
        self.damaged = 0
        """Number of damaged rows."""

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the added rows, and whether they replace all earlier ones, as after a resume that cut the file.

        Raises:
            StoreError: The file cannot be read.
        """
        content = self._metrics.read()
        is_from_start = self._metrics.position == 0
        complete = content[: content.rfind(b"\n") + 1]
        self._metrics.advance(complete)
        read = parse_rows(complete)
        rows = [row for row in read.rows if type(row.get("step")) is int and isinstance(row.get("kind"), str)]
        self.damaged = (0 if is_from_start else self.damaged) + read.damaged + len(read.rows) - len(rows)
        return rows, is_from_start


class AddedRecord:
    """Reads the rows of a run's metrics and statistics as they are written.

    When a resumed run has cut a file, all of its rows are read again. Damaged rows are left out and counted.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._metrics = AddedRows(folder.metrics_path)
        self._rows: list[dict[str, Any]] = []
        """Rows that were read and not returned, because of an error in the statistics."""
        self._names: list[str] = []
        self._parts: dict[Path, tuple[Part, _AddedBytes]] = {}
        self._damaged = 0

    @property
    def damaged(self) -> int:
        """Number of damaged rows."""
        return self._metrics.damaged + self._damaged

    def read(self) -> tuple[list[dict[str, Any]], list[Profiles]]:
        """Return the rows and the statistics that were added. The statistics of a step are written before its rows.

        Raises:
            StoreError: A file, or the description of a file of statistics, cannot be read.
        """
        self._rows += self._metrics.read()[0]
        statistics = self._read_statistics()
        rows, self._rows = self._rows, []
        return rows, statistics

    def _read_statistics(self) -> list[Profiles]:
        names = self._folder.statistics.file_names()
        if names != self._names:
            problems: list[str] = []
            for _, part in self._folder.statistics.parts(problems):
                self._parts.setdefault(part.file.path, (part, _AddedBytes(part.file.path)))
            if problems:
                raise StoreError(problems[0])
            self._names = names
        profiles: list[Profiles] = []
        for part, added in self._parts.values():
            content = added.read()
            complete = content[: len(content) - len(content) % row_type(part.layout.width).itemsize]
            added.advance(complete)
            if complete:
                intact, damaged = part.parse(complete)
                profiles.append(intact)
                self._damaged += damaged
        return profiles


class _AddedBytes:
    """The bytes of a file after a position; the whole file, if those just before the position are not as they were."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.position = 0
        self._before = b""

    def read(self) -> bytes:
        """Return them. After a change of the bytes before it, the position is 0."""
        try:
            with self._path.open("rb") as file:
                file.seek(self.position - len(self._before))
                content = file.read()
                if content.startswith(self._before):
                    return content[len(self._before) :]
                self.position, self._before = 0, b""
                file.seek(0)
                return file.read()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise io_error(self._path, "read", error) from error

    def advance(self, content: bytes) -> None:
        """Move the position behind `content`, which is what `read` returned, or its beginning."""
        self.position += len(content)
        self._before = (self._before + content)[-_COMPARED:]
