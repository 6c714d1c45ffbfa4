"""Read what was added to a run's record since the last reading, so that to follow a long run costs little."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normlab.stats.profiles import Profiles
from normlab.store.arrays import Part, row_type
from normlab.store.files import io_error
from normlab.store.reading import parse_rows
from normlab.store.runs import RunFolder

_COMPARED = 256
"""Bytes before a position in a file that are compared with those at the last reading."""


class AddedRecord:
    """Reads the rows of a run's metrics and statistics, each once.

    Rows that are cut when the run is resumed and written again are read again. A row that is not complete yet is read
    when it is. Damaged rows are left out.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._metrics = _AddedBytes(folder.metrics_path)
        self._names: list[str] = []
        self._parts: dict[Path, tuple[Part, _AddedBytes]] = {}

    def read(self) -> tuple[list[Mapping[str, Any]], list[Profiles]]:
        """Return the rows and the statistics that were added. The statistics of a step are written before its rows.

        Raises:
            StoreError: A file cannot be read.
        """
        content = self._metrics.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._metrics.advance(complete)
        return list(parse_rows(complete).rows), self._read_statistics()

    def _read_statistics(self) -> list[Profiles]:
        names = self._folder.statistics.file_names()
        if names != self._names:
            for _, part in self._folder.statistics.parts([]):
                self._parts.setdefault(part.file.path, (part, _AddedBytes(part.file.path)))
            self._names = names
        profiles: list[Profiles] = []
        for part, added in self._parts.values():
            content = added.read()
            complete = content[: len(content) - len(content) % row_type(part.layout.width).itemsize]
            added.advance(complete)
            if complete:
                profiles.append(part.parse(complete)[0])
        return profiles


class _AddedBytes:
    """The bytes of a file after a position; all, if those before the position have changed since the last reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._before = b""

    def read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position - len(self._before))
                content = file.read()
                if content.startswith(self._before):
                    return content[len(self._before) :]
                self._position, self._before = 0, b""
                file.seek(0)
                return file.read()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise io_error(self._path, "read", error) from error

    def advance(self, content: bytes) -> None:
        """Move the position behind `content`, which `read` returned or which begins what it returned."""
        self._position += len(content)
        self._before = (self._before + content)[-_COMPARED:]
