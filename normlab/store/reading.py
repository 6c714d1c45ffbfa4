"""Read files of a run or a sweep that a kill or a disk error may have damaged: a file parses, or it is damaged.

run.json and status.json hold a checksum, so any change is noticed. A row of metrics.jsonl has none: a line that is no
row is left out and counted. The last status of a completed run holds the number of lines and the hash of all of them,
which `RunFolder.rows` compares.

Each file of a run has the run's id, so that a file of another run is noticed: status.json and the descriptions of
statistics as a field, metrics.jsonl in its first line, and rows of statistics in their checksums.
"""

import contextlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from normlab.base.errors import StoreError
from normlab.base.parsing import from_json, open_to_read, read_at_most
from normlab.store.files import io_error
from normlab.store.format import (
    CHECKS_FILE,
    OUTCOMES_FILE,
    PLAN_FILE,
    QUEUE_FILE,
    RECORD_VERSION,
    REPORT_FILE,
    RUN_FILE,
    STATUS_FILE,
    decode,
    encode,
    to_json,
    without_checksum,
)

T = TypeVar("T")

RESTORES_STATUS = (
    "the same command resumes from the last checkpoint; where there is none, run.fresh=true starts another run "
    "beside this one"
)
"""What to do about a run without a status.json."""

HOW_TO_FIX = {
    RUN_FILE: "restore a copy, or delete the run's folder and run it again",
    STATUS_FILE: f"delete this one file and {RESTORES_STATUS}",
    PLAN_FILE: "delete this one file and start the same command again, `normlab sweep` or `normlab study run`: its "
    "finished runs are used",
    OUTCOMES_FILE: "delete this one file: the sweep trains again what has failed",
    CHECKS_FILE: "the same `normlab study run` writes it again",
    REPORT_FILE: "restore a copy, or delete it: `normlab study report` writes it again from the records that are there",
    QUEUE_FILE: "check with `squeue` that none of the sweep's tasks is left, then delete this one file",
}

LARGEST_RECORD = 2**24
"""Limit on the bytes of run.json, status.json, a checkpoint's manifest and the like, which have thousands."""
LARGEST_PLAN = 2**27
"""Limit on the bytes of plan.json, which has about 5,000 per run of the sweep."""
LARGEST_METRICS = 2**31
"""Limit on the bytes of metrics.jsonl, which has about 120 per step, and of a file of statistics."""

_LONGEST_ROW = 2**14
"""Bytes at the end of metrics.jsonl that are searched for the last row."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A step or a size: a float holds it exactly."""


def read_record(path: Path, kind: type[T] = dict[str, Any]) -> T:
    """Return the content of a file with a checksum, as an object of a type; NaN and infinities of a float are decoded.

    Raises:
        StoreError: The file is missing or damaged, or has another format.
    """
    # A larger file is no record, and reading it could take all memory.
    max_bytes = LARGEST_PLAN if path.name == PLAN_FILE else LARGEST_RECORD
    try:
        return parse_record(path, read_at_most(path, max_bytes), kind)
    except ValueError as error:
        raise damaged(path, error) from None
    except RecursionError:
        raise damaged(path, "nested too deeply") from None
    except FileNotFoundError:
        raise StoreError(f"{path}: is missing; {_how_to_fix(path)}") from None
    except OSError as error:
        raise io_error(path, "read", error) from error


def parse_record(path: Path, content: bytes, kind: type[T] = dict[str, Any]) -> T:
    """Return the content of the file at `path` as an object of a type, as `read_record` does.

    Raises:
        StoreError: The file has another format.
        ValueError: The content is damaged.
    """
    # Check the checksum first: one flipped bit of the version would make the file look like another normlab's.
    try:
        plain = without_checksum(content)
    except ValueError:
        with contextlib.suppress(ValueError):  # older formats have another checksum
            version = from_json(content).get("version")
            if version in range(1, RECORD_VERSION):
                check_format(path, version)
        raise
    if b"\\ud" in plain:  # half of a surrogate pair, as in a path that is no UTF-8, which msgspec does not decode
        record = from_json(plain)
        check_format(path, record.get("version"))
        return msgspec.convert(record, kind, strict=False)
    check_format(path, _VERSION.decode(plain).version)
    # Straight from JSON to the type: a dict of all values in between takes longer than everything else here.
    return _decoder_of(kind).decode(plain)


class _Versioned(msgspec.Struct):
    """The part of a file that tells its format."""

    version: Any = None


_VERSION = msgspec.json.Decoder(_Versioned)


@cache  # a decoder takes longer to make than to use, and readers decode thousands of records
def _decoder_of(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return the decoder of JSON to a type; it reads "nan" as a float, which a strict one refuses."""
    return msgspec.json.Decoder(kind, strict=False)


def check_format(path: Path, version: object) -> None:
    """Check the `version` of a file.

    Raises:
        StoreError: An older or a newer normlab wrote the file, or the version is not a number.
    """
    if type(version) is not int:
        raise damaged(path, f"there is no format {version!r:.40}")
    if version < RECORD_VERSION:
        raise StoreError(
            f"{path}: was written by an older normlab (format {version}); move its folder away and train again, or "
            "check out the normlab that wrote it"
        )
    if version > RECORD_VERSION:
        raise StoreError(f"{path}: was written by a newer normlab (format {version}); update normlab")


def read_bytes(path: Path) -> bytes:
    """Return the content of a run's metrics or statistics; empty where there is no file."""
    try:
        return read_at_most(path, LARGEST_METRICS)
    except FileNotFoundError:
        return b""
    except ValueError as error:
        raise damaged(path, error) from None
    except OSError as error:
        raise io_error(path, "read", error) from error


def damaged(path: Path, reason: object) -> StoreError:
    return StoreError(f"{path}: is damaged ({reason}); {_how_to_fix(path)}")


def _how_to_fix(path: Path) -> str:
    return HOW_TO_FIX.get(path.name, "restore a copy; the numbers that it describes are left out")


def check_run_id(path: Path, run_id: object, folder: Path) -> None:
    """Check that a file is of the run in whose folder it is.

    Raises:
        StoreError: It is of another run.
    """
    if run_id != folder.name:
        raise StoreError(
            f"{path}: is of run {run_id!r:.80}, not of run {folder.name}; put back the files of each run, or the name "
            "of its folder"
        )


# The rows of metrics.jsonl.


def first_line(run_id: str) -> bytes:
    """Return the first line of the metrics of a run."""
    return to_json({"kind": "run", "run_id": run_id})


def split_first_line(content: bytes) -> tuple[str | None, bytes]:
    """Return the run id in the first line of metrics, and the lines after it; None and all lines if it has none.

    A kill may have torn the line, with no row after it.
    """
    line, newline, rows = content.partition(b"\n")
    if not line.startswith(b'{"kind":"run"') or not newline:
        return None, content
    try:
        return str(from_json(line)["run_id"]), rows
    except (ValueError, KeyError):
        return None, content


class _Row(msgspec.Struct, tag_field="kind"):
    step: Count


class _Train(_Row, tag="train"):
    loss: float
    grad_norm: float
    clip: float
    lr: float


class _Eval(_Row, tag="eval"):
    loss: float
    loss_batch_statistics: float | msgspec.UnsetType = msgspec.UNSET
    loss_ema: float | msgspec.UnsetType = msgspec.UNSET


class _Pace(_Row, tag="pace"):
    seconds: float
    tokens_per_s: float


_DECODER = msgspec.json.Decoder(_Train | _Eval | _Pace, strict=False)
_OBJECT = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a run's metrics that are intact."""

    rows: list[dict[str, Any]]
    """Oldest first."""
    damaged: int
    """Number of lines that are not among the rows."""
    torn: bool
    """Whether the last line is cut short: a kill leaves that, and it is harmless."""

    def problem(self, path: Path) -> str:
        """Return a message with the number of damaged lines, without a torn last one; empty if there are none."""
        lost = self.damaged - self.torn
        if lost == 0:
            return ""
        return f"{path}: damaged rows, left out: {lost}"


def parse_rows(content: bytes, *kinds: str, decoder: msgspec.json.Decoder[Any] = _DECODER) -> Rows:
    """Return the rows in the content of a run's metrics, or in some of its lines: of some kinds, or all."""
    lines = content.split(b"\n")
    is_complete = not lines[-1]  # every complete line ends in a newline
    lines = [line for line in lines if line]
    if kinds:
        # The kind is the first field of a row, so that rows of other kinds need no parsing.
        starts = tuple(b'{"kind":"%b"' % kind.encode() for kind in kinds)
        lines = [line for line in lines if line.startswith(starts)]
    # All lines at once are parsed several times as fast as one by one, and are nearly always intact.
    try:
        rows = decoder.decode_lines(b"\n".join(lines))
    except ValueError:
        rows = []
    if len(rows) == len(lines):  # else a line is damaged
        rows = msgspec.to_builtins(rows)
        # Each NaN is `math.nan`, so that two rows compare equal.
        if b'nan"' in content:
            rows = [decode(encode(row)) for row in rows]
        return Rows(rows, damaged=0, torn=False)
    parsed = [_parse(line, decoder) for line in lines]
    rows = [row for row in parsed if row is not None]
    return Rows(rows, len(parsed) - len(rows), torn=not is_complete and parsed[-1] is None)


def read_rows(path: Path) -> Rows:
    """Return the lines of a file that are JSON objects."""
    return parse_rows(read_bytes(path), decoder=_OBJECT)


def read_last_row(path: Path) -> dict[str, Any] | None:
    """Return the last complete row of a run's metrics, reading only the end; None if missing or damaged."""
    try:
        with open_to_read(path, LARGEST_METRICS) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_ROW))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise damaged(path, error) from None
    except OSError as error:
        raise io_error(path, "read", error) from error
    # The last part is empty, or a row whose end is not written yet.
    if len(lines) < 2:
        return None
    return _parse(lines[-2])


def _parse(line: bytes, decoder: msgspec.json.Decoder[Any] = _DECODER) -> dict[str, Any] | None:
    try:
        return decode(encode(msgspec.to_builtins(decoder.decode(line))))
    except ValueError:
        return None
