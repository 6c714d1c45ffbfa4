"""Read files of a run or a sweep that a kill or a disk error may have damaged.

run.json and status.json hold a checksum, so any change is noticed. A row of metrics.jsonl has none: a line that is no
longer JSON is left out and counted. The last status of a completed run holds the number of rows and the hash of all of
them (`RunFolder.metrics_problem`).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.errors import StoreError
from normlab.parsing import from_json, read_at_most
from normlab.store.files import io_error
from normlab.store.format import (
    CHECKS_FILE,
    CHECKSUM_KEY,
    PLAN_FILE,
    QUEUE_FILE,
    RECORD_VERSION,
    RUN_FILE,
    STATUS_FILE,
    decode,
    has_valid_checksum,
)

HOW_TO_FIX = {
    RUN_FILE: "restore a copy, or delete the run's folder and run it again",
    STATUS_FILE: (
        "delete this one file and the same `normlab train` resumes from the last checkpoint; "
        "where there is none, run.fresh=true starts another run beside this one"
    ),
    PLAN_FILE: "delete this one file and start the same `normlab sweep` again: its finished runs are used",
    CHECKS_FILE: "`normlab verify RUN` writes it again",
    QUEUE_FILE: "check with `squeue` that none of the sweep's tasks is left, then delete this one file",
}
"""What to do about a damaged file of a run or a sweep."""

LARGEST_RECORD = 2**24
"""Limit on the bytes of run.json, status.json, a checkpoint's manifest and the like, which have thousands."""
LARGEST_PLAN = 2**27
"""Limit on the bytes of plan.json, which has about 5,000 per run of the sweep."""
LARGEST_METRICS = 2**31
"""Limit on the bytes of metrics.jsonl, which has about 120 per step, and of a file of statistics."""

_LONGEST_ROW = 2**14
"""Bytes at the end of metrics.jsonl that are searched for the last row."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The readable rows of a run's metrics."""

    rows: list[dict[str, Any]]
    """Oldest first."""
    damaged: int
    """Number of lines that could not be read, and are not among the rows."""
    torn: bool
    """Whether the last line is cut short: a kill leaves that, and it is harmless."""


class OtherFormat(StoreError):
    """A file that an older or a newer normlab wrote."""


def read_record(path: Path) -> dict[str, Any]:
    """Return the content of a file with a checksum, without the checksum; numbers stay encoded.

    Raises:
        StoreError: The file is missing or damaged, or has another format.
    """
    try:
        record = from_json(read_at_most(path, LARGEST_PLAN if path.name == PLAN_FILE else LARGEST_RECORD))
    except ValueError as error:
        reason = "not a JSON object" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else error
        raise _damaged(path, reason) from None
    except FileNotFoundError:
        raise StoreError(f"{path}: is missing; {_how_to_fix(path)}") from None
    except OSError as error:
        raise io_error(path, "read", error) from error
    # Check the checksum first: one flipped bit of the version would make the file look like another normlab's.
    if not has_valid_checksum(record):
        raise _damaged(path, "its checksum does not match")
    check_format(path, record.get("version"))
    return {key: value for key, value in record.items() if key != CHECKSUM_KEY}


def check_format(path: Path, version: object) -> None:
    """Check the `version` of a file.

    Raises:
        OtherFormat: An older or a newer normlab wrote the file.
        StoreError: The version is not a number.
    """
    if type(version) is not int:
        raise _damaged(path, f"there is no format {version!r:.40}")
    if version < RECORD_VERSION:
        raise OtherFormat(
            f"{path}: was written by an older normlab (format {version}); move its folder away and train again, or "
            "check out the normlab that wrote it"
        )
    if version > RECORD_VERSION:
        raise OtherFormat(f"{path}: was written by a newer normlab (format {version}); update normlab")


def read_bytes(path: Path) -> bytes:
    """Return the content of a run's metrics or statistics; empty where there is no file.

    Raises:
        StoreError: The file exists and cannot be read, or is too large.
    """
    try:
        return read_at_most(path, LARGEST_METRICS)
    except FileNotFoundError:
        return b""
    except ValueError as error:
        raise _damaged(path, error) from None
    except OSError as error:
        raise io_error(path, "read", error) from error


def read_rows(path: Path, kind: str | None = None, *, exclude: str | None = None) -> Rows:
    """Return the rows of one kind, or all; unreadable lines are skipped and counted.

    Args:
        path: The metrics.
        kind: The kind to return.
        exclude: A kind to skip without parsing: `kind` is the first field of every row.

    Raises:
        StoreError: The file exists and cannot be read.
    """
    return parse_rows(read_bytes(path), kind, exclude=exclude)


def parse_rows(content: bytes, kind: str | None = None, *, exclude: str | None = None) -> Rows:
    """Return the rows in the content of a run's metrics, or in some of its lines; the arguments are `read_rows`'."""
    lines = content.split(b"\n")
    prefix = None if exclude is None else b'{"kind":"%b"' % exclude.encode()
    selected = [
        (index, line) for index, line in enumerate(lines) if line and (prefix is None or not line.startswith(prefix))
    ]
    if (parsed := _parse_together([line for _, line in selected])) is not None:
        return Rows([row for row in parsed if kind is None or row.get("kind") == kind], damaged=0, torn=False)
    rows: list[dict[str, Any]] = []
    damaged: list[int] = []
    for index, line in selected:
        row = _parse(line)
        if row is None:
            damaged.append(index)
        elif kind is None or row.get("kind") == kind:
            rows.append(decode(row))
    # Every complete line ends in a newline, so the text after the last newline was cut short.
    return Rows(rows=rows, damaged=len(damaged), torn=damaged[-1:] == [len(lines) - 1])


def read_last_row(path: Path) -> dict[str, Any] | None:
    """Return the last complete row of a run's metrics, reading only the end; None if missing or damaged.

    Raises:
        StoreError: The file exists and cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_ROW))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise io_error(path, "read", error) from error
    row = _parse(lines[-2]) if len(lines) > 1 else None
    return None if row is None else decode(row)


def _parse_together(lines: list[bytes]) -> list[dict[str, Any]] | None:
    """Return all rows, decoded, several times as fast as line by line; None where the result might differ.

    Each line must begin with the only opening bracket in it. If together the lines are as many objects as there are
    lines, each object is one line.
    """
    content = b",".join(lines)
    flat = b"[" not in content and content.count(b"{") == len(lines) and all(line[:1] == b"{" for line in lines)
    if not flat:
        return None
    try:
        rows = json.loads(b"[%b]" % content)
    except (ValueError, RecursionError):
        return None
    if len(rows) != len(lines):
        return None
    # Few rows hold a NaN or an infinity. An escape could hide one, and rows have no escapes in a number.
    return list(map(decode, rows)) if b'nan"' in content or b'inf"' in content or b"\\" in content else rows


def _parse(content: bytes) -> dict[str, Any] | None:
    try:
        return from_json(content)
    except ValueError:
        return None


def _damaged(path: Path, reason: object) -> StoreError:
    return StoreError(f"{path}: is damaged ({reason}); {_how_to_fix(path)}")


def _how_to_fix(path: Path) -> str:
    return HOW_TO_FIX.get(path.name, "restore a copy; the numbers that it describes are left out")
