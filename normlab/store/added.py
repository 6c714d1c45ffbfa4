"""Read what was added to a run's record since the last reading, so that following a long run costs little."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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
        self._names: list[str] = []
        self._parts: dict[Path, tuple[Part, _AddedBytes]] = {}
        self._damaged: dict[Path, int] = {}
        self.problem = ""
        """Why the statistics of some readings were left out: their description could not be read. It may be since."""

    @property
    def damaged(self) -> int:
        """Number of damaged rows."""
        return self._metrics.damaged + sum(self._damaged.values())

    def read(self) -> tuple[list[dict[str, Any]], list[Profiles]]:
        """Return the rows and the statistics that were added. The statistics of a step are written before its rows.

        Raises:
            StoreError: A file cannot be read.
        """
        rows, _ = self._metrics.read()
        return rows, self._read_statistics()

    def _read_statistics(self) -> list[Profiles]:
        names = self._folder.statistics.file_names()
        if names != self._names:
            problems: list[str] = []
            for _, part in self._folder.statistics.parts(problems):
                self._parts.setdefault(part.file.path, (part, _AddedBytes(part.file.path)))
            if problems:
                self.problem = problems[0]
            else:
                self._names = names
        profiles: list[Profiles] = []
        for path, (part, added) in self._parts.items():
            content = added.read()
            if added.position == 0:
                self._damaged[path] = 0
            complete = content[: len(content) - len(content) % row_type(part.layout.width).itemsize]
            added.advance(complete)
            if complete:
                intact, damaged = part.parse(complete)
                profiles.append(intact)
                self._damaged[path] += damaged
        return profiles


class _AddedBytes:
    """Reads the bytes after a position in a file; the whole file, if the bytes just before it have changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.position = 0
        self._before = b""

    def read(self) -> bytes:
        """Return the bytes after the position; the position becomes 0 if the bytes before it have changed."""
        try:
            # Without O_NONBLOCK, opening a pipe waits until another process writes to it.
            with open(self._path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
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
