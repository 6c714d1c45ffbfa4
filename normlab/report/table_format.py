"""Format the values of a report's rows for people: column titles, rounding, and the notes on corpora and baselines.

The table and the Markdown use it; JSON and CSV keep the values.
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
    "corpora": "corpus",
}
_FORMATS = {
    **dict.fromkeys(("depth", "width"), "g"),
    **dict.fromkeys(("seed", "step", "steps"), ".0f"),
    **dict.fromkeys(("val_loss", "best_val_loss", "last_val_loss", "train_loss"), ".4f"),
    "lr": ".4g",
    "vs_bigram": "+.4f",
    "tokens_per_s": ",.0f",
    "seconds": ",.1f",
}
_LARGE = 1e5
"""Losses from here on have four significant digits instead of four decimals."""


def column_title(key: str) -> str:
    """Return the heading of a column."""
    return _TITLES.get(key, key)


def is_numeric(key: str) -> bool:
    """Whether a column holds numbers, which are aligned to the right."""
    return key in _FORMATS


def format_value(key: str, value: Any) -> str:
    """Return a value as text, empty for None; control characters are escaped, because a name may hold any."""
    if value is None:
        return ""
    if key == "created":
        value = _local_time(value)
    elif key in _FORMATS and (known := number(value)) is not None:
        with contextlib.suppress(OverflowError):  # a damaged record may hold an integer that no float can
            form = _FORMATS[key].replace(".4f", ".4g") if abs(known) >= _LARGE else _FORMATS[key]
            return format(known, form).replace("+nan", "nan")
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(value))


def _local_time(created: Any) -> Any:
    try:
        seconds = datetime.fromisoformat(created).timestamp() if isinstance(created, str) else created
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (TypeError, ValueError, OverflowError, OSError):
        return created


def corpus_label(row: Row) -> str:
    """Return the corpus's name with the beginning of its hash: two texts can have the same name."""
    return f"{format_value('corpus', row['corpus'])} {format_value('corpus_sha256', row['corpus_sha256'])[:8]}".strip()


def old_baselines_note(rows: Sequence[Row]) -> str:
    """Return a note on runs whose `vs_bigram` uses baselines of the whole validation text; empty if there are none."""
    old = sum(bool(row.get("baselines")) and row.get("vs_bigram") is not None for row in rows)
    return f"vs bigram of {_runs(old)} with older records: {WHOLE_TEXT_NOTE}" if old else ""


def corpora_note(rows: Sequence[Row]) -> str:
    """Return a warning where the runs have different corpora; empty if they have the same."""
    counts = Counter(corpus_label(row) for row in rows if row.get("corpus_sha256"))
    if len(counts) < 2:
        return ""
    listed = ", ".join(f"{corpus}: {_runs(n)}" for corpus, n in counts.items())
    return f"{len(counts)} corpora: losses compare only within one corpus ({listed})"


def _runs(n: int) -> str:
    return "1 run" if n == 1 else f"{n} runs"
