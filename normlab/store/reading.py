"""Reading what a kill, a full disk or a bad one may have left.

run.json and status.json are sealed: any change is seen. A row of metrics.jsonl has no hash of its own: one that
is no JSON any more is left out and counted. The last status of a run that ended holds the number of rows and the
hash of all of them (`RunFolder.metrics_problem`).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.errors import StoreError
from normlab.parsing import from_json, read_at_most
from normlab.store.files import refusal
from normlab.store.schema import PLAN_FILE, QUEUE_FILE, RECORD_VERSION, RUN_FILE, SEAL, STATUS_FILE, decode, is_sealed

MENDING = {
    RUN_FILE: "put back a copy, or delete the run's folder and run it again",
    STATUS_FILE: (
        "delete this one file and the same `normlab train` goes on from the last checkpoint; "
        "where there is none, run.fresh=true starts another run beside this one"
    ),
    PLAN_FILE: "delete this one file and start the same `normlab sweep` again: its finished runs are used",
    QUEUE_FILE: "see with `squeue` that none of the sweep's tasks is left, then delete this one file",
}
"""What to do where a file of a run or a sweep is damaged."""

LARGEST_RECORD = 2**24
"""Most bytes of run.json, status.json, a checkpoint's manifest and the like, which have thousands."""
LARGEST_PLAN = 2**27
"""Most bytes of plan.json, which has some 5,000 for each run of a sweep."""
LARGEST_TOKENIZER = 2**27
"""Most bytes of tokenizer.json."""
LARGEST_METRICS = 2**31
"""Most bytes of metrics.jsonl, which has some 120 for each step."""

_LONGEST_ROW = 2**14
"""Bytes at the end of the metrics in which a whole row is looked for."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What could be read of a run's metrics."""

    rows: list[dict[str, Any]]
    """Rows, oldest first."""
    damaged: int
    """Lines that could not be read, and are not among the rows."""
    torn: bool
    """Whether one of them is the last line, cut short: the mark of a kill, and of nothing worse."""


def read_record(path: Path) -> dict[str, Any]:
    """The content of run.json, status.json or plan.json, as it was encoded.

    Raises:
        StoreError: It is missing or damaged, or was written by a newer normlab.
    """
    try:
        record = _parse(read_at_most(path, LARGEST_PLAN if path.name == PLAN_FILE else LARGEST_RECORD))
    except ValueError as error:
        raise StoreError(f"{path}: is damaged ({error}); {_mending(path)}") from None
    except FileNotFoundError:
        raise StoreError(f"{path}: is missing; {_mending(path)}") from None
    except OSError as error:
        raise refusal(path, "read", error) from error
    if record is None:
        raise StoreError(f"{path}: is damaged (no JSON object); {_mending(path)}")
    # Before the version is believed: one bit of it makes this normlab's file a newer one's.
    if not is_sealed(record):
        raise StoreError(f"{path}: is damaged (its content is not what was written); {_mending(path)}")
    version = record.get("version")
    if type(version) is not int or version < 1:
        raise StoreError(f"{path}: is damaged (there is no record version {version!r}); {_mending(path)}")
    if version > RECORD_VERSION:
        raise StoreError(
            f"{path}: is of record version {version}, and this normlab reads versions 1 to {RECORD_VERSION}; "
            "update normlab"
        )
    return {key: value for key, value in record.items() if key != SEAL}


def read_bytes(path: Path) -> bytes:
    """Return the content of a run's metrics; empty where there are none.

    Raises:
        StoreError: The file is there and cannot be opened, or is too large.
    """
    try:
        return read_at_most(path, LARGEST_METRICS)
    except FileNotFoundError:
        return b""
    except ValueError as error:
        raise StoreError(f"{path}: is damaged ({error}); {_mending(path)}") from None
    except OSError as error:
        raise refusal(path, "read", error) from error


def read_rows(path: Path, kind: str | None = None, *, without: str | None = None) -> Rows:
    """The rows of one kind, or all; lines that cannot be read are skipped and counted.

    Args:
        path: The metrics.
        kind: The kind that is wanted.
        without: A kind that is passed over unread: a row's kind is the first thing that is written of it.

    Raises:
        StoreError: The file is there and cannot be opened.
    """
    lines = read_bytes(path).split(b"\n")
    passed_over = None if without is None else b'{"kind":"%b"' % without.encode()
    wanted = [line for line in lines if line and (passed_over is None or not line.startswith(passed_over))]
    if (whole := _at_once(wanted)) is not None:
        return Rows([row for row in whole if kind is None or row.get("kind") == kind], damaged=0, torn=False)
    rows: list[dict[str, Any]] = []
    damaged: list[int] = []
    for index, line in enumerate(lines):
        if not line or (passed_over is not None and line.startswith(passed_over)):
            continue
        row = _parse(line)
        if row is None:
            damaged.append(index)
        elif kind is None or row.get("kind") == kind:
            rows.append(decode(row))
    # Every whole line ends in a newline, so what follows the last one was cut short.
    return Rows(rows=rows, damaged=len(damaged), torn=damaged[-1:] == [len(lines) - 1])


def read_last_row(path: Path) -> dict[str, Any] | None:
    """The newest whole row of a run's metrics, without reading the others; None where there is none, or it is damaged.

    Raises:
        StoreError: The file is there and cannot be opened.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_ROW))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refusal(path, "read", error) from error
    row = _parse(lines[-2]) if len(lines) > 1 else None
    return None if row is None else decode(row)


def _at_once(lines: list[bytes]) -> list[dict[str, Any]] | None:
    """All rows, decoded, several times as quick as one by one; None where that might not be the same.

    Each line must begin with the only brace that opens anything in it. Where together they are as many objects as they
    are lines, each object is one line: none runs into the next.
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
    # Few have a number that JSON has no word for; an escape would hide one, and rows of ours have none in a number.
    return list(map(decode, rows)) if b'nan"' in content or b'inf"' in content or b"\\" in content else rows


def _mending(path: Path) -> str:
    return MENDING.get(path.name, "put back a copy; the numbers that it describes are left out")


def _parse(content: bytes) -> dict[str, Any] | None:
    """One JSON object, or None where the bytes are none."""
    try:
        return from_json(content)
    except ValueError:
        return None
