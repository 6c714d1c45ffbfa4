"""The form of the record: its version, its files, the states of a run, and how numbers are written.

JSON has no NaN and no infinity, and a run that diverges has both. They are written as the strings "nan",
"inf" and "-inf", so that every file stays strict JSON that any tool reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from typing import Any

RECORD_VERSION = 1
"""Written into run.json and status.json. Raised when an older reader would misread what is written."""

SEAL = "sha256"
"""The field of run.json, status.json and a checkpoint's manifest that holds the hash of the others."""

RUNS_FOLDER = "runs"
SWEEPS_FOLDER = "sweeps"
PLAN_FILE = "plan.json"
"""In a sweep's folder: the ids of its runs, which lie among the others."""
QUEUE_FILE = "queue.json"
"""In its `slurm/`: which of its packs Slurm has."""
RUN_FILE = "run.json"
STATUS_FILE = "status.json"
METRICS_FILE = "metrics.jsonl"
LOCK_FILE = "lock"

KNOWN_FIELDS = frozenset({
    "command", "config", "continued_from", "corpus", "created", "doubts", "fingerprint", "git", "identity", "name",
    "norm", "pack", "placement", "resolved", "run_id", "trunk", "version", "versions",
    "best_val_loss", "best_val_step", "checkpoint", "diverged", "elsewhere", "error", "initial_val_loss", "metrics",
    "outcome", "peak_memory_bytes", "seconds", "spikes", "state", "step", "steps", "tokens", "tokens_per_s",
    "train_loss", "updated", "val_loss",
    "val_loss_batch_statistics",
})  # fmt: skip
"""What run.json and status.json may hold. A newer normlab may write more under the same version; that is said."""

RUNNING = "running"
FINISHED = "finished"
DIVERGED = "diverged"
INTERRUPTED = "interrupted"
FAILED = "failed"
ENDED = (FINISHED, DIVERGED)
"""Nothing is left to train of a run."""
STATES = (RUNNING, FINISHED, DIVERGED, INTERRUPTED, FAILED)
"""The states that a run writes of itself."""

KILLED = "killed"
"""What readers call a run whose status says running while no process holds its lock."""
DAMAGED = "damaged"
"""What readers call a run whose run.json or status.json cannot be read."""

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_TEXT_FIELDS = frozenset({"kind", "state", "error"})


def encode(value: Any) -> Any:
    """`value` with every NaN and infinity in it, at any depth, as its string."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def decode(value: Any) -> Any:
    """The inverse of `encode`, for rows and statuses: where their fields are text, text stays text.

    Not for run.json, where a name may well be "inf"; what is a number there is read with `number`.
    """
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: item if key in _TEXT_FIELDS else decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return value


def number(value: Any) -> float | None:
    """A number of the record, encoded or not; None for whatever is no number, or none that a float can hold."""
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    if isinstance(value, float):
        return value
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and abs(value) <= sys.float_info.max else None


def to_json(value: Any, indent: int | None = None) -> bytes:
    """`value` as strict JSON in ASCII, ended by a newline: one line unless `indent` is given."""
    separators = (",", ":") if indent is None else None
    return json.dumps(encode(value), allow_nan=False, indent=indent, separators=separators).encode() + b"\n"


def seal(record: Mapping[str, Any], version: int = RECORD_VERSION) -> bytes:
    """A record as it is written, run.json as well as a manifest: its fields, its version, and the hash of both."""
    plain = json.loads(to_json({"version": None} | dict(record) | {"version": version}))
    return to_json({**plain, SEAL: digest(plain)}, indent=2)


def is_sealed(record: Mapping[str, Any]) -> bool:
    """Whether a record is what `seal` wrote: a bit that flipped inside a number leaves JSON that parses."""
    return record.get(SEAL) == digest({key: value for key, value in record.items() if key != SEAL})


def digest(record: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of a record's content, however it is laid out."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
