"""Files of a run's statistics: one row of numbers per measured step, and a description of the columns.

`stats/core.json` describes the columns, with formulas and units; `stats/core.bin` holds the rows. A row is the step
(int64), the numbers (float32 each) and the CRC-32 of the run's id and of both, all little-endian. So a row of another
run is a damaged row. numpy reads the file in one line:

    np.fromfile("core.bin", dtype=[("step", "<i8"), ("values", "<f4", (N,)), ("crc", "<u4")])

When the columns change, new rows go to new files, `core.2.json`, `core.2.bin`, ...: after a resume with other
statistics, or once Adam has moments, after the first update.

Shapes: S measured steps, N numbers per step.
"""

import hashlib
import os
import re
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normlab.base.errors import StoreError
from normlab.catalogue.statistics.profiles import Layout, Profiles
from normlab.catalogue.statistics.registry import STATISTICS
from normlab.catalogue.statistics.statistic import OF, TIERS
from normlab.store.files import AppendFile, io_error, make_folder, write_atomic
from normlab.store.format import STATISTICS_FOLDER, with_checksum
from normlab.store.reading import check_run_id, damaged, read_bytes, read_record
from normlab.store.status import RowsDigest

ROW = "little-endian: the step, int64; the values, float32 each; CRC-32 of the run's id and the bytes before it, uint32"
LAYERS = "0: the embeddings; 1 to depth: the blocks; depth + 1: the head"
_NAME = re.compile(rf"(?P<tier>{'|'.join(TIERS)})(\.(?P<part>[1-9][0-9]*))?\.(json|bin)")


def row_type(width: int) -> np.dtype[Any]:
    """Return the numpy type of a row with N = `width` numbers."""
    return np.dtype([("step", "<i8"), ("values", "<f4", (width,)), ("crc", "<u4")])


class Part:
    """One file of rows with equal columns, of the run in whose folder it is."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.layout = layout
        self._crc_of_id = zlib.crc32(path.parent.parent.name.encode())
        self.file = AppendFile(path, lines=False)

    def append(self, profiles: Profiles) -> None:
        """Append rows in one system call.

        Raises:
            StoreError: The write failed; the file holds none of the rows.
        """
        if not len(profiles.steps):
            return
        rows = np.zeros(len(profiles.steps), row_type(self.layout.width))
        rows["step"], rows["values"] = profiles.steps, profiles.values
        for row in rows:
            row["crc"] = self._checksum(row)
        self.file.append(rows.tobytes())

    def parse(self, content: bytes) -> tuple[Profiles, int]:
        """Return the intact rows in the content of the file, or in some of its rows, and the number of damaged rows."""
        rows, intact = self._rows(content)
        intact_rows = rows[intact]
        profiles = Profiles(self.layout, intact_rows["step"].astype(np.int64), intact_rows["values"])
        return profiles, len(rows) - len(intact_rows)

    def has_torn_row(self) -> bool:
        return len(read_bytes(self.file.path)) % row_type(self.layout.width).itemsize > 0

    def truncate(self, step: int) -> None:
        """Delete the rows from `step` on, and a torn last row."""
        content = read_bytes(self.file.path)
        rows, intact = self._rows(content)
        # The step of a damaged row may be any number, so an intact row tells where to cut.
        late = np.flatnonzero(intact & (rows["step"] >= step))
        kept_rows = len(rows)
        if len(late):
            kept_rows = int(late[0])
        size = kept_rows * rows.dtype.itemsize
        if size < len(content):
            self.file.truncate(size)

    def _rows(self, content: bytes) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the complete rows, (S,), and their intact flags, (S,)."""
        kind = row_type(self.layout.width)
        rows = np.frombuffer(content, kind, len(content) // kind.itemsize)
        return rows, np.array([row["crc"] == self._checksum(row) for row in rows], dtype=bool)

    def _checksum(self, row: np.void) -> int:
        return zlib.crc32(row.tobytes()[:-4], self._crc_of_id)


class StatisticsFiles:
    """The statistics files of a run. Any process may read them; only the holder of the run's lock may write.

    Args:
        path: The run's folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path / STATISTICS_FOLDER
        self._open: dict[str, Part] = {}

    def append(self, tier: str, profiles: Profiles) -> None:
        """Append measured rows to the tier's file with their layout.

        Raises:
            StoreError: The write failed; the record holds none of the rows.
        """
        part = self._open.get(tier)
        if part is None or part.layout != profiles.layout:
            # A file has one layout, so the old one is complete.
            if part is not None:
                part.file.sync()
                part.file.close()
            part = self._open[tier] = self._find_or_create(tier, profiles.layout)
        part.append(profiles)

    def parts(self, problems: list[str]) -> Iterator[tuple[str, Part]]:
        """Yield the tier and part of each readable file, the parts of a tier oldest first.

        Args:
            problems: Receives a message for each description that is missing, damaged or of another format.
        """
        # The rows and their description are two files of one part. Numbers sort as numbers: core.10 after core.2.
        numbered: set[tuple[str, int]] = set()
        for match in self._matches():
            numbered.add((match["tier"], int(match["part"] or 1)))
        for tier, number in sorted(numbered):
            path = self._description_path(tier, number)
            try:
                described = read_record(path)
                check_run_id(path, described.get("run_id"), self.path.parent)
                layout = Layout.from_tree(described)
            except StoreError as error:
                problems.append(str(error))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problems.append(str(damaged(path, error)))
            else:
                yield tier, Part(path.with_suffix(".bin"), layout)

    def read(self, tier: str) -> tuple[list[Profiles], int]:
        """Return the intact rows of a tier, one entry per part, and the number of damaged rows.

        Parts without a readable description are left out; `parts` reports them.
        """
        profiles: list[Profiles] = []
        damaged_rows = 0
        for part_tier, part in self.parts([]):
            if part_tier == tier:
                intact, damaged_of_part = part.parse(read_bytes(part.file.path))
                profiles.append(intact)
                damaged_rows += damaged_of_part
        return profiles, damaged_rows

    def digests(self, tiers: Collection[str] = TIERS) -> dict[str, RowsDigest]:
        """Return the number of rows and the SHA-256 of each file with a readable description, by its name."""
        digests: dict[str, RowsDigest] = {}
        for tier, part in self.parts([]):
            if tier not in tiers:
                continue
            content = read_bytes(part.file.path)
            rows = len(content) // row_type(part.layout.width).itemsize
            digests[part.file.path.name] = RowsDigest(rows, hashlib.sha256(content).hexdigest())
        return digests

    def truncate(self, step: int) -> None:
        """Delete the rows from `step` on."""
        self.close()
        for _, part in self.parts([]):
            part.truncate(step)

    def copy(self, path: Path, before: int) -> None:
        """Copy the rows before a step into another run's folder.

        Raises:
            StoreError: A row or a description is damaged, or of another run; nothing is copied then.
        """
        # Everything is read before anything is written: a copy of a part of the rows would look complete.
        problems: list[str] = []
        tiers = {tier: self.read(tier) for tier, _ in self.parts(problems)}
        for _, damaged_rows in tiers.values():
            if damaged_rows:
                problems.append(f"{self.path}: damaged rows: {damaged_rows}; restore a copy")
        if problems:
            raise StoreError(problems[0])
        copies = StatisticsFiles(path)
        for tier, (parts, _) in tiers.items():
            for profiles in parts:
                early = profiles.steps < before
                copies.append(tier, Profiles(profiles.layout, profiles.steps[early], profiles.values[early]))
        copies.sync()
        copies.close()

    def sync(self) -> None:
        for part in self._open.values():
            part.file.sync()

    def close(self) -> None:
        for part in self._open.values():
            part.file.close()
        self._open.clear()

    def file_names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise io_error(self.path, "read", error) from error

    def _description_path(self, tier: str, number: int) -> Path:
        if number == 1:
            return self.path / f"{tier}.json"
        return self.path / f"{tier}.{number}.json"

    def _matches(self) -> list[re.Match[str]]:
        """Return the match of each name of a file of statistics, with its `tier` and `part`."""
        matches = map(_NAME.fullmatch, self.file_names())
        return [match for match in matches if match is not None]

    def _find_or_create(self, tier: str, layout: Layout) -> Part:
        for part_tier, part in self.parts([]):
            if part_tier == tier and part.layout == layout:
                return part
        # Never reuse the number of a file without a description: its rows may have another layout.
        numbers = [int(match["part"] or 1) for match in self._matches() if match["tier"] == tier]
        path = self._description_path(tier, max(numbers, default=0) + 1)
        # The description comes before the rows: without it they are numbers without names.
        make_folder(self.path, parents=False)
        write_atomic(path, with_checksum(description(self.path.parent.name, tier, layout)))
        return Part(path.with_suffix(".bin"), layout)


def description(run_id: str, tier: str, layout: Layout) -> dict[str, Any]:
    """Return the content of a description file: the columns, formulas and units of a layout."""
    # Each once, in the order of the columns.
    names = dict.fromkeys(group.statistic for group in layout.groups)
    kinds = dict.fromkeys(STATISTICS[name].of for name in names)
    fields = ("formula", "unit", "of", "merge", "question", "source")
    statistics: dict[str, dict[str, Any]] = {}
    for name in names:
        statistics[name] = {field: getattr(STATISTICS[name], field) for field in fields}
    return {
        "run_id": run_id,
        "tier": tier,
        "row": ROW,
        "numbers": layout.width,
        "order": "group by group, and in a group place by place",
        "places": LAYERS,
        "of": {kind: OF[kind] for kind in kinds},
        "statistics": statistics,
        **layout.as_tree(),
    }
