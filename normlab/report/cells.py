"""What a person reads of a row's values: titles, roundings, and the warning where corpora differ.

Shared by the table and the Markdown; JSON and CSV hold the values themselves.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from normlab.store.outcome import WHOLE_TEXT_NOTE
from normlab.store.schema import number

Row = dict[str, Any]

_TITLES = {
    "val_loss": "val loss",
    "best_val_loss": "best val",
    "last_val_loss": "last val",
    "train_loss": "train loss",
    "vs_bigram": "vs bigram",
    "corpus_sha256": "corpus sha256",
    "tokens_per_s": "tokens/s",
}
_NUMBERS = {
    "depth": "g",
    "width": "g",
    "seed": ".0f",
    "lr": ".4g",
    "step": ".0f",
    "steps": ".0f",
    "val_loss": ".4f",
    "best_val_loss": ".4f",
    "last_val_loss": ".4f",
    "train_loss": ".4f",
    "vs_bigram": "+.4f",
    "tokens_per_s": ",.0f",
    "seconds": ",.1f",
}


_LARGE = 1e5
"""From here on four digits of a loss say enough."""


def title(key: str) -> str:
    """The heading of a column."""
    return _TITLES.get(key, key)


def is_number(key: str) -> bool:
    """Whether a column holds numbers, and stands to the right."""
    return key in _NUMBERS


def cell(key: str, value: Any) -> str:
    """A value as people read it; blank for None. Control characters are shown, not sent to the terminal."""
    if value is None:
        return ""
    if key == "created":
        value = _local_time(value)
    elif key in _NUMBERS and (known := number(value)) is not None:
        with contextlib.suppress(OverflowError):  # a damaged record may hold what no float does
            form = _NUMBERS[key].replace(".4f", ".4g") if abs(known) >= _LARGE else _NUMBERS[key]
            return format(known, form).replace("+nan", "nan")
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(value))


def _local_time(created: Any) -> Any:
    try:
        seconds = datetime.fromisoformat(created).timestamp() if isinstance(created, str) else created
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (TypeError, ValueError, OverflowError, OSError):
        return created


def corpus_cell(row: Row) -> str:
    """A corpus by its name and the beginning of its hash, for where names do not tell them apart."""
    return f"{cell('corpus', row['corpus'])} {cell('corpus_sha256', row['corpus_sha256'])[:8]}".strip()


def old_baselines(rows: Sequence[Row]) -> str:
    """A note where runs have a number against baselines of the whole validation text, else nothing."""
    old = sum(bool(row.get("baselines")) and row.get("vs_bigram") is not None for row in rows)
    return f"vs bigram of {old} older {'run' if old == 1 else 'runs'}: {WHOLE_TEXT_NOTE}" if old else ""


def differing_corpora(rows: Sequence[Row]) -> str:
    """A warning where the rows are not all of one corpus, else nothing."""
    counts = Counter(corpus_cell(row) for row in rows if row.get("corpus_sha256"))
    if len(counts) < 2:
        return ""
    words = ", ".join(f"{corpus}: {n} {'run' if n == 1 else 'runs'}" for corpus, n in counts.items())
    return f"{len(counts)} corpora, and losses compare only within one ({words})"
