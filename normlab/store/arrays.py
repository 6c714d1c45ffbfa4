"""Statistics on the disk: rows of one length, appended to, with what their numbers are written beside them.

`stats/core.json` says what the numbers of a row are, with their formulas and units; `stats/core.bin` holds the
rows. Each is, little-endian, the step (int64), the numbers (float32 each) and a CRC-32 of both; numpy reads the
file in one line:

    np.fromfile("core.bin", dtype=[("step", "<i8"), ("values", "<f4", (N,)), ("crc", "<u4")])

Rows of other statistics get files of their own, `core.2.json`, `core.2.bin`, ...: where a run goes on with others, and
where there is more to measure later, as of Adam, which has moments from the first update on. `stats/cadence.json` says
from which step on each tier was measured how often, so that rows that were lost are missed.

Shapes: S measured steps, N numbers a step.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normlab.errors import StoreError
from normlab.parsing import read_at_most
from normlab.stats.profiles import Layout, Profiles
from normlab.stats.statistic import CORE, OF, STATISTICS, TIERS
from normlab.store.files import refusal, write_all, write_atomic
from normlab.store.reading import LARGEST_METRICS, read_record
from normlab.store.schema import seal

FOLDER = "stats"
"""Where a run keeps them, in its own folder."""
ROW = "little-endian: the step, int64; the values, float32 each; CRC-32 of the bytes before it, uint32"
PLACES = "0: the embeddings; 1 to depth: the blocks; depth + 1: the head"
CADENCE_FILE = "cadence.json"
"""From which step on each tier was measured how often."""
_NAME = re.compile(rf"(?P<tier>{'|'.join(TIERS)})(\.(?P<part>[1-9][0-9]*))?\.(json|bin)")


def row_type(width: int) -> np.dtype[Any]:
    """A row of N = `width` numbers."""
    return np.dtype([("step", "<i8"), ("values", "<f4", (width,)), ("crc", "<u4")])


@dataclass(slots=True)
class Part:
    """One pair of files: rows that have one layout."""

    path: Path
    """Of the rows."""
    layout: Layout
    _descriptor: int | None = field(default=None, repr=False)

    def append(self, profiles: Profiles) -> None:
        """Write rows at the end, in one system call: a kill tears the last one at most.

        Raises:
            StoreError: The system refused; none of them is in the file.
        """
        if not len(profiles.steps):
            return
        rows = np.zeros(len(profiles.steps), row_type(self.layout.width))
        rows["step"], rows["values"] = profiles.steps, profiles.values
        for row in rows:
            row["crc"] = _checksum(row)
        try:
            if self._descriptor is None:
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o666)
            start = os.fstat(self._descriptor).st_size
            try:
                write_all(self._descriptor, rows.tobytes())
            except BaseException:
                os.ftruncate(self._descriptor, start)
                raise
        except OSError as error:
            raise refusal(self.path, "written", error) from error

    def rows(self) -> tuple[NDArray[Any], int]:
        """The whole rows, and how many bytes of the last one there are besides.

        Raises:
            StoreError: The file is there and cannot be read.
        """
        kind = row_type(self.layout.width)
        try:
            content = read_at_most(self.path, LARGEST_METRICS)
        except FileNotFoundError:
            content = b""
        except ValueError as error:
            raise StoreError(f"{self.path}: is damaged ({error}); put back a copy") from None
        except OSError as error:
            raise refusal(self.path, "read", error) from error
        count, torn = divmod(len(content), kind.itemsize)
        return np.frombuffer(content, kind, count), torn

    def torn(self) -> bool:
        """Whether half a row stands at the end.

        Raises:
            StoreError: The file is there and cannot be read.
        """
        return self.rows()[1] > 0

    def cut(self, step: int) -> None:
        """Drop what was measured at `step` and later, and half a row at the end."""
        rows, torn = self.rows()
        late = [index for index, row in enumerate(rows) if row["step"] >= step and row["crc"] == _checksum(row)]
        keep = late[0] if late else len(rows)
        if keep < len(rows) or torn:
            self.close()
            try:
                with self.path.open("r+b") as file:
                    file.truncate(keep * rows.dtype.itemsize)
                    os.fsync(file.fileno())
            except OSError as error:
                raise refusal(self.path, "cut", error) from error

    def sync(self) -> None:
        """Return once the rows are on the disk."""
        if self._descriptor is not None:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise refusal(self.path, "written", error) from error

    def close(self) -> None:
        """Close the file; the next `append` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Arrays:
    """A run's statistics, to be read by anyone and written by the holder of the run's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path / FOLDER
        self._open: dict[str, Part] = {}

    def append(self, tier: str, profiles: Profiles) -> None:
        """Write what was measured, into the tier's files of this layout.

        Raises:
            StoreError: The system refused; none of the rows is in the record.
        """
        part = self._open.get(tier)
        if part is None or part.layout != profiles.layout:
            if part is not None:  # nobody syncs or closes it later
                part.sync()
                part.close()
            part = self._open[tier] = self._part(tier, profiles.layout)
        part.append(profiles)

    def parts(self, problems: list[str]) -> Iterator[tuple[str, Part]]:
        """Every tier and part that can be read, a tier's in the order in which they were begun.

        Args:
            problems: Is told of each description that is missing, damaged, or a newer normlab's.
        """
        found = {(match["tier"], int(match["part"] or 1)) for match in map(_NAME.fullmatch, self._names()) if match}
        for tier, number in sorted(found):
            path = self._file(tier, number)
            try:
                layout = Layout.from_tree(read_record(path))
            except StoreError as error:
                problems.append(str(error))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problems.append(f"{path}: is damaged (it names no columns: {error}); put back a copy")
            else:
                yield tier, Part(path.with_suffix(".bin"), layout)

    def begin(self, step: int, every: Mapping[str, int | None]) -> None:
        """Note that from a step on each tier is measured every so many steps, or not.

        Raises:
            StoreError: The system refused.
        """
        known = self._cadence()
        kept = [(first, tiers) for first, tiers in known if first < step]
        own = {tier: steps for tier, steps in every.items() if steps}
        if own != (kept[-1][1] if kept else {}):
            kept.append((step, own))
        if kept != known:
            self._make()
            noted = [{"step": first, "every": tiers} for first, tiers in kept]
            write_atomic(self.path / CADENCE_FILE, seal({"from": noted}))

    def missing(self, before: int) -> dict[str, list[int]]:
        """By tier, the steps before this one that were measured and have no row; nothing where that is not certain.

        Raises:
            StoreError: A file cannot be read.
        """
        known, problems = self._cadence(), list[str]()
        ends = [*(first for first, _ in known), before][1:]
        tiers = {tier for tier, _ in self.parts(problems)} | {CORE}  # a closer look may see nothing, and writes nothing
        lost: dict[str, list[int]] = {}
        for tier in sorted(tiers if not problems else ()):
            parts, damaged = self.read(tier)
            there = {step for part in parts for step in part.steps.tolist()}
            due: list[int] = []
            for (first, every), end in zip(known, ends, strict=True):
                if steps := every.get(tier):
                    # A closer look at Adam alone sees nothing before the first update.
                    start = first if tier == CORE else max(first, 1)
                    due += range(-(-start // steps) * steps, min(end, before), steps)
            gone = [step for step in due if step not in there]
            if len(gone) > damaged:  # those are told of as damaged
                lost[tier] = gone
        return lost

    def told_missing(self, before: int) -> list[str]:
        """What is said of them, a line for each tier.

        Raises:
            StoreError: A file cannot be read.
        """
        return [
            f"{self.path}: rows of {tier} statistics are missing, of {len(steps)} measured steps from {steps[0]} to "
            f"{steps[-1]}; put back a copy"
            for tier, steps in self.missing(before).items()
        ]

    def cut(self, step: int) -> None:
        """Drop what was measured at `step` and later."""
        self.close()
        for _, part in self.parts([]):
            part.cut(step)

    def copy(self, path: Path, before: int) -> None:
        """Put what was measured before a step into another run's folder.

        Raises:
            StoreError: A file cannot be read or written.
        """
        copies = Arrays(path)
        for tier in dict.fromkeys(tier for tier, _ in self.parts([])):
            for profiles in self.read(tier)[0]:
                early = profiles.steps < before
                copies.append(tier, Profiles(profiles.layout, profiles.steps[early], profiles.values[early]))
        for first, every in self._cadence():
            if first < before:
                copies.begin(first, every)
        copies.sync()
        copies.close()

    def sync(self) -> None:
        """Return once all rows are on the disk."""
        for part in self._open.values():
            part.sync()

    def close(self) -> None:
        """Close the files."""
        for part in self._open.values():
            part.close()
        self._open.clear()

    def read(self, tier: str) -> tuple[list[Profiles], int]:
        """What was measured with a tier, part by part, and how many rows are damaged and left out.

        Parts that are not described are left out too: `parts` tells of them.

        Raises:
            StoreError: A file cannot be read.
        """
        found, damaged = [], 0
        for own, part in self.parts([]):
            if own == tier:
                rows, _ = part.rows()
                whole = np.array([row["crc"] == _checksum(row) for row in rows], dtype=bool)
                damaged += int((~whole).sum())
                rows = rows[whole]
                found.append(Profiles(part.layout, rows["step"].astype(np.int64), rows["values"]))
        return found, damaged

    def _cadence(self) -> list[tuple[int, dict[str, int]]]:
        """From which step on each tier was measured how often, in the order of the steps; nothing if unknown."""
        try:
            noted = read_record(self.path / CADENCE_FILE)["from"]
            return [(int(one["step"]), {tier: int(steps) for tier, steps in one["every"].items()}) for one in noted]
        except (StoreError, KeyError, TypeError, ValueError, AttributeError):
            return []

    def _make(self) -> None:
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise refusal(self.path, "made", error) from error

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise refusal(self.path, "read", error) from error

    def _file(self, tier: str, number: int) -> Path:
        return self.path / (f"{tier}.json" if number == 1 else f"{tier}.{number}.json")

    def _part(self, tier: str, layout: Layout) -> Part:
        """The files of a layout: those that are there, or new ones."""
        for own, part in self.parts([]):
            if own == tier and part.layout == layout:
                return part
        # Rows whose description is gone keep their name: what follows would not be what they are.
        taken = [
            int(match["part"] or 1) for match in map(_NAME.fullmatch, self._names()) if match and match["tier"] == tier
        ]
        path = self._file(tier, max(taken, default=0) + 1)
        self._make()
        write_atomic(path, seal(description(tier, layout)))
        return Part(path.with_suffix(".bin"), layout)


def description(tier: str, layout: Layout) -> dict[str, Any]:
    """What is written beside the rows: what each number is, in words that need no code to be understood."""
    names = dict.fromkeys(group.statistic for group in layout.groups)
    said = ("formula", "unit", "of", "merge", "question", "source")
    statistics: Mapping[str, Any] = {name: {word: getattr(STATISTICS[name], word) for word in said} for name in names}
    return {
        "tier": tier,
        "row": ROW,
        "numbers": layout.width,
        "order": "group by group, and in a group place by place",
        "places": PLACES,
        "of": {of: OF[of] for of in dict.fromkeys(STATISTICS[name].of for name in names)},
        "statistics": statistics,
        **layout.as_tree(),
    }


def _checksum(row: np.void) -> int:
    return zlib.crc32(row.tobytes()[:-4])
