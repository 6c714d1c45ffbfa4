"""The format of a record: version, file names, states of a run, and how numbers are encoded.

JSON has no NaN and no infinity, and a run that diverges has both. They are written as the strings "nan", "inf" and
"-inf", so that every file is strict JSON.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

RECORD_VERSION = 6
"""The format of every file with a `version`: raised with each change, since only files of this format are read."""

_CHECKSUM, _END = b',\n  "sha256": "', b"\n}\n"
"""The bytes before and after the checksum of run.json, status.json and the like. It is the SHA-256 of the file without
its last field, `sha256`."""

RUNS_FOLDER = "runs"
SWEEPS_FOLDER = "sweeps"
PLAN_FILE = "plan.json"
"""In a sweep's folder: its runs, which are stored among all others, and its packs."""
OUTCOMES_FILE = "ends.jsonl"
"""In a sweep's folder: one line for each end of a pack."""
QUEUE_FILE = "queue.json"
"""In a sweep's `slurm/`: its packs that Slurm has."""
RUN_FILE = "run.json"
STATUS_FILE = "status.json"
METRICS_FILE = "metrics.jsonl"
TOKENIZER_FILE = "tokenizer.json"
STATISTICS_FOLDER = "stats"
LOCK_FILE = "lock"
REPORT_FILE = "report.json"
CHECKS_FILE = "verify.json"
"""In the folder of a run, or of a study's sweep: the result of `normlab verify` for its blocks."""

CLIP_FACTOR_KEY = "clip"
"""The key of the clip factor in a training row of metrics.jsonl; `optim.clip` is the limit, not the factor."""

RUNNING = "running"
FINISHED = "finished"
DIVERGED = "diverged"
INTERRUPTED = "interrupted"
FAILED = "failed"
COMPLETED_STATES = (FINISHED, DIVERGED)
"""States in which nothing is left to train."""
STATES = (RUNNING, FINISHED, DIVERGED, INTERRUPTED, FAILED)
"""States that a run writes."""

KILLED = "killed"
"""State that readers give to a run whose status is running while no process holds its lock."""
DAMAGED = "damaged"
"""State that readers give to a run whose run.json or status.json cannot be read."""

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any) -> Any:
    """Return `value` with every NaN and infinity, at any depth, as its string."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def decode(value: Any) -> Any:
    """Return the inverse of `encode`, for values without text; a record with text is decoded by its types."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return value


def to_json(value: Any, indent: int | None = None) -> bytes:
    """Return `value` as strict ASCII JSON that ends in a newline: one line unless `indent` is given."""
    # A row of metrics has no space; a record is for people too.
    separators = (",", ":") if indent is None else None
    return json.dumps(encode(value), allow_nan=False, indent=indent, separators=separators).encode() + b"\n"


def with_checksum(record: Mapping[str, Any], version: int = RECORD_VERSION) -> bytes:
    """Return a record as the content of a file: the version, the fields, and the SHA-256 of the file without it."""
    # The version comes first in the file and cannot be overwritten by a field of the record.
    return _with_checksum(to_json({"version": version} | {**record, "version": version}, indent=2))


def without_checksum(content: bytes) -> bytes:
    """Return the content of a file without its checksum, as JSON.

    Raises:
        ValueError: The checksum is missing or does not match. (JSON may still parse after a bit has flipped.)
    """
    # The whole file is compared, so that bytes after the checksum are noticed, too.
    plain = content.rpartition(_CHECKSUM)[0] + _END
    if content != _with_checksum(plain):
        raise ValueError("its checksum does not match")
    return plain


def _with_checksum(plain: bytes) -> bytes:
    return b'%b%b%b"%b' % (plain.removesuffix(_END), _CHECKSUM, hashlib.sha256(plain).hexdigest().encode(), _END)
