"""Render rows as a table that fits the terminal, and name the columns that it leaves out to do so.

Settings that all runs share are listed once above the table, and notes below it. A single row is rendered with a line
for each value. `rich` is not used: it takes ten times as long for a folder of many runs.
"""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Sequence

from normlab.report.table_format import (
    Row,
    column_title,
    corpora_note,
    corpus_label,
    format_value,
    is_numeric,
    old_baselines_note,
)

_SHARED = ("state", "norm", "placement", "depth", "width", "seed", "lr", "corpus", "device", "precision")
"""Columns that are moved above the table where all runs have the same value."""
_DROP_ORDER = (
    "update, last", "seeds", "attn/stream, last", "mlp/stream, last", "last/first", "loss", "grad profile",
    "its profile", "memory", "spikes", "tokens/s", "best val", "less baseline at shared lr", "p (Holm) at shared lr",
    "edge lr", "val loss at shared lr", "usable lr", "S", "seconds", "precision", "tokens_per_s", "device",
    "train_loss", "best_val_loss", "last_val_loss", "corpus", "width", "vs_bigram", "steps", "step", "seed", "lr",
    "init", "grad, last", "depth", "corpora", "created", "placement", "norm",
)  # fmt: skip
"""Columns to leave out where the table is too wide, the least informative first."""
_GAP = 2
_MIN_WIDTH = 56
_MIN_TEXT = 8
"""Width that a text column keeps in the narrowest terminal."""

Columns = dict[str, list[str]]
"""The cells of each column, by key."""


def render_table(rows: Sequence[Row], width: int) -> str:
    """Render rows in lines of at most `width` characters (at least 56): numbers to the right, long texts folded."""
    width = max(width, _MIN_WIDTH)
    if len(rows) == 1:
        texts = {column_title(key): format_value(key, value) for key, value in rows[0].items()}
        indent = max(map(len, texts)) + _GAP
        return _fold_lines([title.ljust(indent) + text for title, text in texts.items() if text], width, indent)
    columns = _columns(rows)
    shared = _take_shared(columns) if "run" in columns else {}
    dropped = _drop_columns(columns, width)
    named = zip(_names(rows), rows, strict=True)
    below = [f"{name}: {format_value('note', row['note'])}" for name, row in named if row.get("note")]
    below += [old_baselines_note(rows), corpora_note(rows)]
    if dropped:
        titles = ", ".join(map(column_title, dropped))
        below.append(f"not shown: {titles} (use a wider terminal, or --format json for all values)")
    above = "in common: " + ", ".join(f"{column_title(key)} {value}" for key, value in shared.items())
    parts = [_fold_lines([above] if shared else [], width), _grid(columns, width), _fold_lines(below, width)]
    return "\n\n".join(filter(None, parts))


def _columns(rows: Sequence[Row]) -> Columns:
    """Format the columns of a table; what a table does not show, and what is empty in every row, is left out."""
    columns = {key: [format_value(key, row[key]) for row in rows] for key in rows[0]}
    if "run" in columns:
        columns["run"] = _names(rows)
    if "step" in columns and "steps" in columns:
        pairs = zip(columns["step"], columns.pop("steps"), strict=True)
        columns["step"] = [f"{step}/{steps}" if step and steps else step for step, steps in pairs]
    if corpora_note(rows):
        columns["corpora"] = [corpus_label(row) for row in rows]
        columns.pop("corpus")
    hidden = ("id", "corpus_sha256", "baselines", "note")
    return {key: cells for key, cells in columns.items() if any(cells) and key not in hidden}


def _names(rows: Sequence[Row]) -> list[str]:
    """The name of each run, with its id where several runs have that name."""
    names = [format_value("run", row.get("run")) for row in rows]
    count = Counter(names)
    return [
        name if count[name] == 1 or not row.get("id") else f"{name} ({format_value('id', row['id'])})"
        for name, row in zip(names, rows, strict=True)
    ]


def _take_shared(columns: Columns) -> dict[str, str]:
    """Remove the columns that have one value in all runs that name any, and return these values."""
    shared = {}
    for key in _SHARED:
        values = set(columns.get(key, ())) - {""}
        if len(values) == 1:
            shared[key] = values.pop()
            del columns[key]
    return shared


def _drop_columns(columns: Columns, width: int) -> list[str]:
    """Remove columns in `_DROP_ORDER` until the rest fits, and return their keys. The first column stays."""
    dropped = []
    first = next(iter(columns))
    for key in _DROP_ORDER:
        if _total(_widths(columns, width, _min_text(width))) <= width:
            break
        if key != first and columns.pop(key, None):
            dropped.append(key)
    return dropped


def _min_text(width: int) -> int:
    """Width that a text column keeps while there are columns to leave out."""
    return max(24, width // 3)


def _widths(columns: Columns, width: int, min_text: int) -> dict[str, int]:
    """The width of each column. Text columns shrink to `min_text` until all fit, those whose words still fit first.

    The first column does not fold, because it is a name to type; only a run's name can have any length.
    """
    first = next(iter(columns))
    widths = {key: max(map(_cell_len, [column_title(key), *cells])) for key, cells in columns.items()}
    texts = {key: min(widths[key], width) for key in columns if not is_numeric(key) and (key != first or key == "run")}
    words = {key: max(map(_cell_len, " ".join([column_title(key), *columns[key]]).split())) for key in texts}
    widths |= texts
    while _total(widths) > width and (wide := [key for key in texts if widths[key] > min_text]):
        widest = max([key for key in wide if widths[key] > words[key]] or wide, key=widths.__getitem__)
        widths[widest] -= 1
    return widths


def _total(widths: dict[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _grid(columns: Columns, width: int) -> str:
    widths = _widths(columns, width, _min_text(width))
    if _total(widths) > width:
        widths = _widths(columns, width, _MIN_TEXT)
    lines: list[str] = []
    for row in [tuple(map(column_title, columns)), *zip(*columns.values(), strict=True)]:
        folded = [_fold(text, widths[key]) for key, text in zip(columns, row, strict=True)]
        for texts in itertools.zip_longest(*folded, fillvalue=""):
            padded = [_pad(text, widths[key], is_numeric(key)) for key, text in zip(columns, texts, strict=True)]
            lines.append((" " * _GAP).join(padded).rstrip())
    return "\n".join([lines[0], "-" * max(map(_cell_len, lines)), *lines[1:]])


def _pad(text: str, width: int, right: bool) -> str:
    gap = " " * (width - _cell_len(text))
    return gap + text if right else text + gap


def _fold(text: str, width: int) -> list[str]:
    # textwrap counts characters, and a wide character takes two cells of the terminal.
    is_wide = _cell_len(text) > len(text)
    return textwrap.wrap(text, width // 2 if is_wide else width, break_on_hyphens=False) or [""]


def _cell_len(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _fold_lines(lines: Sequence[str], width: int, indent: int = 2) -> str:
    wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_on_hyphens=False)
    return "\n".join(folded for line in lines for folded in wrapper.wrap(line))
