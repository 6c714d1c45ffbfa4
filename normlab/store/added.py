"""Read what was added to a run's record since the last reading, so that following a long run costs little.

The follower of W&B reads with it. Damaged rows are left out.
"""

from pathlib import Path
from typing import Any

from normlab.base.parsing import open_to_read
from normlab.catalogue.statistics.profiles import Profiles
from normlab.store.arrays import Part, row_type
from normlab.store.files import io_error
from normlab.store.reading import LARGEST_METRICS, check_run_id, damaged, parse_rows, split_first_line
from normlab.store.runs import RunFolder

_COMPARED = 256
"""Bytes before a position in a file that are compared with those at the last reading."""


class AddedRows:
    """Reads the rows of a run's metrics as they are written."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._metrics = _AddedBytes(folder.metrics_path)
        self.damaged = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the added rows, and whether they replace all earlier ones, as after a resume that cut the file.

        Raises:
            StoreError: The file cannot be read, or is of another run.
        """
        content, is_from_start = self._metrics.read()
        if is_from_start:
            run_id, content = split_first_line(content)
            if run_id is not None:
                check_run_id(self._folder.metrics_path, run_id, self._folder.path)
        content_rows = parse_rows(content)
        rows = [row for row in content_rows.rows if type(row.get("step")) is int and isinstance(row.get("kind"), str)]
        # Rows that are read again replace the earlier ones, and so do their damaged lines.
        if is_from_start:
            self.damaged = 0
        self.damaged += content_rows.damaged + len(content_rows.rows) - len(rows)
        return rows, is_from_start


class AddedRecord:
    """Reads the rows of a run's metrics and statistics as they are written.

    When a resumed run has cut a file, all of its rows are read again.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._metrics = AddedRows(folder)
        self._names: list[str] = []
        self._parts: dict[Path, tuple[Part, _AddedBytes]] = {}

    def read(self) -> tuple[list[dict[str, Any]], list[Profiles]]:
        """Return the rows and the statistics that were added. The statistics of a step are written before its rows.

        Raises:
            StoreError: A file cannot be read.
        """
        rows, _ = self._metrics.read()
        names = self._folder.statistics.file_names()
        if names != self._names:
            problems: list[str] = []
            for _, part in self._folder.statistics.parts(problems):
                added = _AddedBytes(part.file.path, row_type(part.layout.width).itemsize)
                self._parts.setdefault(part.file.path, (part, added))
            # A description that cannot be read now may be readable later, so that the next reading tries all again.
            self._names = [] if problems else names
        added_rows = [(part, added.read()[0]) for part, added in self._parts.values()]
        return rows, [part.parse(content)[0] for part, content in added_rows if content]


class _AddedBytes:
    """Reads the complete rows after a position in a file; all rows, if the bytes just before it have changed.

    Args:
        path: The file.
        row_size: The bytes of a row; None if rows end in a line break.
    """

    def __init__(self, path: Path, row_size: int | None = None) -> None:
        self._path = path
        self._row_size = row_size
        self._position = 0
        self._before = b""

    def read(self) -> tuple[bytes, bool]:
        """Return the complete rows after the position, and whether they are the first ones of the file."""
        try:
            with open_to_read(self._path, LARGEST_METRICS) as file:
                file.seek(self._position - len(self._before))
                content = file.read()
                # A resume cuts the file and writes other rows: the bytes before the position are not those of before.
                if not content.startswith(self._before):
                    self._position, self._before = 0, b""
                    file.seek(0)
                    content = file.read()
        except FileNotFoundError:
            return b"", self._position == 0
        except ValueError as error:
            raise damaged(self._path, error) from None
        except OSError as error:
            raise io_error(self._path, "read", error) from error
        is_from_start = self._position == 0
        content = content[len(self._before) :]
        # The writer may be in the middle of a row, which the next reading returns.
        end = content.rfind(b"\n") + 1
        if self._row_size is not None:
            end = len(content) - len(content) % self._row_size
        self._position += end
        self._before = (self._before + content[:end])[-_COMPARED:]
        return content[:end], is_from_start
