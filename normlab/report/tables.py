"""Render the rows of a report as a table, Markdown, JSON or CSV, and draw sparklines.

JSON and CSV hold the exact values. Tables and Markdown have rounded values, and notes on corpora and baselines. A table
fits the terminal: columns that do not fit are named below it. `rich` is not used, because it takes ten times as long
for a folder of many runs.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import shutil
import textwrap
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from normlab.analysis.phrases import counted
from normlab.analysis.settings import format_setting
from normlab.errors import NormlabError, printable, unknown
from normlab.store.format import encode
from normlab.store.outcome import format_loss
from normlab.store.throughput import format_mfu, format_tflops

T = TypeVar("T")
Row = dict[str, Any]
FORMATS = ("table", "json", "csv", "markdown", "latex")


def render(
    rows: Sequence[Row],
    format: str = "table",
    width: int | None = None,
    fixed: Collection[str] = (),
    bold: Collection[tuple[int, str]] = (),
) -> str:
    """Return rows as text, without a newline at the end.

    JSON and CSV hold the exact numbers, with NaN and infinity as "nan", "inf" and "-inf", and None as null or an empty
    field; the others round. Every format escapes texts, which may be someone else's.

    Args:
        rows: Rows with the same keys.
        format: One of `FORMATS`.
        width: Characters per line of a table; by default the terminal's, or 160 without a terminal.
        fixed: The columns that a narrow table keeps.
        bold: The values that LaTeX prints in bold, by row and key.

    Raises:
        NormlabError: The format is unknown.
    """
    if format not in FORMATS:
        raise NormlabError(unknown("format", format, FORMATS))
    if format == "json":
        return json.dumps([encode(row) for row in rows], indent=2, allow_nan=False)
    if not rows:
        return ""
    if format == "csv":
        text = io.StringIO()
        lines = [list(rows[0]), *([row[key] for key in rows[0]] for row in rows)]
        csv.writer(text, lineterminator="\n").writerows(map(_csv_value, line) for line in lines)
        return text.getvalue().removesuffix("\n")
    if format == "markdown":
        return _markdown(rows)
    if format == "latex":
        return _latex(rows, bold)
    return render_table(rows, width or terminal_width(), fixed)


def terminal_width() -> int:
    """Return the characters per line of the terminal, at least 56; 160 without a terminal."""
    return max(shutil.get_terminal_size((160, 24)).columns, _MIN_WIDTH)


def _csv_value(value: Any) -> Any:
    """Return a value of CSV; an apostrophe precedes a text that a spreadsheet would evaluate as a formula."""
    if not isinstance(value, str):
        return encode(value)
    is_formula = unicodedata.normalize("NFKC", value.lstrip()[:1]) in ("=", "+", "-", "@") and not _is_number(value)
    return printable(f"'{value}" if is_formula else value)


def _markdown(rows: Sequence[Row]) -> str:
    keys = list(rows[0])
    table = [
        [escape_markdown(_title(key)) for key in keys],
        ["---:" if column(key).format else "---" for key in keys],
        *([escape_markdown(format_value(key, row[key])) for key in keys] for row in rows),
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    if warning := _corpora_note(rows):
        lines += ["", escape_markdown(warning)]
    return "\n".join(lines)


def escape_markdown(text: str) -> str:
    """Escape the characters that Markdown or HTML interprets."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # Markdown keeps an underscore inside a word, and most names have one.
    return re.sub(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)


def _latex(rows: Sequence[Row], bold: Collection[tuple[int, str]]) -> str:
    """Return a tabular of the LaTeX package booktabs."""
    lines = [" & ".join(_latex_text(_title(key)) for key in rows[0])]
    for index, row in enumerate(rows):
        texts = {key: _latex_text(format_value(key, value)) for key, value in row.items()}
        lines.append(" & ".join(rf"\textbf{{{text}}}" if (index, key) in bold else text for key, text in texts.items()))
    head, *body = (rf"{line} \\" for line in lines)
    columns = "".join("r" if all(_is_number(row[key]) for row in rows) else "l" for key in rows[0])
    begin, end = rf"\begin{{tabular}}{{{columns}}}", r"\end{tabular}"
    return "\n".join([begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", end])


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or its text with at most a unit; also an empty text."""
    return not isinstance(value, str) or re.fullmatch(r"([-+]?[\d.,]+(e[-+]?\d+)?( GiB| %)?)?", value) is not None


_LATEX = {
    **{char: f"\\{char}" for char in "#$%&_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": "$<$",
    ">": "$>$",
}  # fmt: skip


def _latex_text(text: str) -> str:
    """Escape a text; a negative number, a difference and a product (` x `) have signs of mathematics."""
    escaped = "".join(_LATEX.get(char, char) for char in text).replace(" x ", r" $\times$ ")
    return re.sub(r"(?<![\w.-])-(?=\d)|(?<= )-(?= )", "$-$", escaped)


# Columns


@dataclass(frozen=True, slots=True)
class Column:
    """How the values of a key of JSON and CSV are written in a table, in Markdown and in LaTeX."""

    title: str = ""
    """The heading; empty for the key."""
    format: Callable[[float], str] | None = None
    """The format of a column of numbers, which is aligned to the right; None for a column of text."""
    is_hidden: bool = False
    """Whether a table leaves it out, but not Markdown and LaTeX."""
    is_shared: bool = False
    """Whether a value that all runs share moves to a line above the table."""
    is_kept: bool = False
    """Whether a table that is too wide keeps it."""


_LOSS, _INTEGER = Column(format=format_loss), Column(format="{:.0f}".format)
_SETTING = Column(format=format_setting, is_shared=True)
_SHARED, _HIDDEN = Column(is_shared=True), Column(is_hidden=True)
COLUMNS = {
    **dict.fromkeys(
        ("update, last", "seeds", "attn/stream, last", "mlp/stream, last", "last/first", "loss", "grad profile",
         "its profile", "memory", "spikes", "MFU"), Column()
    ),
    "mfu": Column("MFU", format_mfu),
    **dict.fromkeys(
        ("tok/s", "best val", "vs baseline at shared lr", "p (Holm) at shared lr", "too-high lr",
         "val loss at shared lr", "near-best lr", "S"), Column()
    ),
    "pack": _SHARED,
    "seconds": Column(format="{:,.1f}".format),
    "precision": _SHARED,
    "tokens_per_s": Column("tok/s", "{:,.0f}".format),
    "device": _SHARED,
    "train_loss": replace(_LOSS, title="train loss"),
    "best_val_loss": replace(_LOSS, title="best val"),
    "last_val_loss": replace(_LOSS, title="last val"),
    "corpus": _SHARED,
    "width": _SETTING,
    "vs_bigram": Column("vs bigram", partial(format_loss, sign="+")),
    "steps": _INTEGER,
    "step": _INTEGER,
    "seed": _SETTING,
    "lr": _SETTING,
    "init": Column(),
    "grad, last": Column(),
    "depth": _SETTING,
    "corpora": Column("corpus"),
    "created": Column(),
    "placement": _SHARED,
    "norm": _SHARED,
    "state": replace(_SHARED, is_kept=True),
    "val_loss": replace(_LOSS, title="val loss", is_kept=True),
    "corpus_sha256": Column("corpus sha256", is_hidden=True),
    "flops_per_token": Column("FLOPs/token", "{:.4g}".format, is_hidden=True),
    "flops_per_s": Column("TFLOP/s", format_tflops, is_hidden=True),
    **dict.fromkeys(("id", "note"), _HIDDEN),
}  # fmt: skip
"""The columns by key, in the order in which a table that is too wide leaves them out; others are kept texts."""
_TEXT = Column(is_kept=True)


def column(key: str) -> Column:
    """Return the column of a key."""
    return COLUMNS.get(key, _TEXT)


def format_value(key: str, value: Any) -> str:
    """Return a value as text, empty for None, with control characters escaped."""
    if value is None:
        return ""
    if key == "created":
        value = _local_time(value)
    elif (form := column(key).format) and isinstance(value, int | float):
        return form(value)
    return printable(str(value))


def format_p(p: float | None) -> str:
    """Return a p-value as text, empty for None."""
    return "" if p is None else "<0.0001" if p < 1e-4 else f"{p:.2g}"


def _title(key: str) -> str:
    return printable(column(key).title or key)


def _local_time(created: Any) -> Any:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(created))
    except (TypeError, ValueError, OverflowError, OSError):
        return created


def _corpus_label(row: Row) -> str:
    """Return the name of a corpus and the beginning of its hash; names are not unique."""
    return f"{format_value('corpus', row['corpus'])} {format_value('corpus_sha256', row['corpus_sha256'])[:8]}".strip()


def _corpora_note(rows: Sequence[Row]) -> str:
    """Return a warning if the runs have different corpora, else an empty text."""
    counts = Counter(_corpus_label(row) for row in rows if row.get("corpus_sha256"))
    if len(counts) < 2:
        return ""
    listed = ", ".join(f"{corpus}: {counted(n, 'run')}" for corpus, n in counts.items())
    return f"{len(counts)} corpora: losses are comparable only within one corpus ({listed})"


# Tables

_GAP = 2
_MIN_WIDTH = 56
_MIN_TEXT = 8
"""Smallest width of a text column."""

Columns = dict[str, list[str]]
"""The texts of each column, by key."""


def render_table(rows: Sequence[Row], width: int, fixed: Collection[str] = ()) -> str:
    """Render rows in lines of at most `width` characters (at least 56), with long texts folded.

    Columns that do not fit are left out, but those in `fixed`.
    """
    width = max(width, _MIN_WIDTH)
    if len(rows) == 1:
        texts = {_title(key): format_value(key, value) for key, value in rows[0].items()}
        indent = max(map(len, texts)) + _GAP
        return fold_lines([title.ljust(indent) + text for title, text in texts.items() if text], width, indent)
    columns = _columns(rows)
    shared: dict[str, str] = {}
    for key in list(columns) if "run" in columns else ():
        if column(key).is_shared and len({row[key] for row in rows} - {None, ""}) == 1:
            shared[key] = next(filter(None, columns.pop(key)))
    dropped, widths = _fit(columns, width, fixed)
    named = zip(_names(rows), rows, strict=True)
    below = [f"{name}: {format_value('note', row['note'])}" for name, row in named if row.get("note")]
    below.append(_corpora_note(rows))
    if dropped:
        titles = ", ".join(_title(key) for key in dropped)
        below.append(f"not shown: {titles} (use a wider terminal, or JSON for all values)")
    above = "in common: " + ", ".join(f"{_title(key)} {value}" for key, value in shared.items())
    parts = [fold_lines([above] if shared else [], width), _grid(columns, widths), fold_lines(below, width)]
    return "\n\n".join(filter(None, parts))


def _columns(rows: Sequence[Row]) -> Columns:
    """Return the texts of each column of a table, without hidden and empty columns."""
    columns = {key: [format_value(key, row[key]) for row in rows] for key in rows[0]}
    if "run" in columns:
        columns["run"] = _names(rows)
    if "step" in columns and "steps" in columns:
        pairs = zip(columns["step"], columns.pop("steps"), strict=True)
        columns["step"] = [f"{step}/{steps}" if step and steps else step for step, steps in pairs]
    if _corpora_note(rows):
        columns["corpora"] = [_corpus_label(row) for row in rows]
        columns.pop("corpus")
    return {key: texts for key, texts in columns.items() if any(texts) and not column(key).is_hidden}


def _names(rows: Sequence[Row]) -> list[str]:
    """Return the name of each row: of its run, with another id if several runs have that name, or the first column."""
    key = "run" if "run" in rows[0] else next(iter(rows[0]))
    names = [format_value(key, row.get(key)) for row in rows]
    count = Counter(names)
    named = zip(names, [format_value("id", row.get("id")) for row in rows], strict=True)
    return [name if count[name] == 1 or id in ("", name) else f"{name} ({id})" for name, id in named]


def _fit(columns: Columns, width: int, fixed: Collection[str]) -> tuple[list[str], dict[str, int]]:
    """Remove columns in the order of `COLUMNS` until the rest fits; return removed keys and widths."""
    dropped: list[str] = []
    first = next(iter(columns))
    for key in (
        "",
        *(key for key in COLUMNS if key in columns and key not in (first, *fixed) and not COLUMNS[key].is_kept),
    ):
        if columns.pop(key, None):
            dropped.append(key)
        widths = _widths(columns, width, max(24, width // 3))
        if _total(widths) <= width:
            return dropped, widths
    return dropped, _widths(columns, width, _MIN_TEXT)


def _widths(columns: Columns, width: int, min_text: int) -> dict[str, int]:
    """Return column widths; text columns shrink until the table fits, to `min_text` at least.

    Columns in which no word has to be cut shrink first. The first column does not fold, because users copy names from
    it; a run's name folds, because it can have any length.
    """
    first = next(iter(columns))
    cells = {key: [_title(key), *texts] for key, texts in columns.items()}
    widths = {key: max(map(_cell_len, texts)) for key, texts in cells.items()}
    foldable = [key for key in columns if not column(key).format and (key != first or key == "run")]
    words = {key: max(map(_cell_len, " ".join(cells[key]).split())) for key in foldable}
    widths |= {key: min(widths[key], width) for key in foldable}
    while _total(widths) > width and (wide := [key for key in foldable if widths[key] > min_text]):
        widest = max([key for key in wide if widths[key] > words[key]] or wide, key=widths.__getitem__)
        widths[widest] -= 1
    return widths


def _total(widths: dict[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _grid(columns: Columns, widths: dict[str, int]) -> str:
    lines: list[str] = []
    for row in [tuple(_title(key) for key in columns), *zip(*columns.values(), strict=True)]:
        folded = [_fold(text, widths[key]) for key, text in zip(columns, row, strict=True)]
        for texts in itertools.zip_longest(*folded, fillvalue=""):
            padded: list[str] = []
            for key, text in zip(columns, texts, strict=True):
                gap = " " * (widths[key] - _cell_len(text))
                padded.append(gap + text if column(key).format else text + gap)
            lines.append((" " * _GAP).join(padded).rstrip())
    return "\n".join([lines[0], "-" * max(map(_cell_len, lines)), *lines[1:]])


def _fold(text: str, width: int) -> list[str]:
    # textwrap counts characters, but a wide character takes two columns of the terminal.
    is_wide = _cell_len(text) > len(text)
    return textwrap.wrap(text, width // 2 if is_wide else width, break_on_hyphens=False) or [""]


def _cell_len(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def fold_lines(lines: Sequence[str], width: int, indent: int = 2) -> str:
    """Return the lines folded to a width, with continuation lines indented."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_on_hyphens=False)
    return "\n".join(folded for line in lines for folded in wrapper.wrap(line))


# Sparklines

BARS = "▁▂▃▄▅▆▇█"
_FLAT = 0.01
"""Relative difference up to which numbers are drawn at the same height."""


def evenly_spaced(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most `most` (2 or more) items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """Draw at most `width` of the numbers, evenly spaced, as bars; `?` for NaN and infinity.

    The scale is logarithmic if all finite numbers are positive, else linear. Numbers within 1 % of each other are all
    drawn at half height.
    """
    heights = evenly_spaced(values, width)
    finite = [value for value in heights if math.isfinite(value)]
    flat = _FLAT * max(map(abs, finite), default=0.0)
    if finite and min(finite) > 0:
        heights, flat = [math.log(value) if math.isfinite(value) else value for value in heights], _FLAT
    finite = [height for height in heights if math.isfinite(height)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)

    def bar(height: float) -> str:
        if not math.isfinite(height):
            return "?"
        return BARS[3] if span <= flat else BARS[round((height - low) / span * (len(BARS) - 1))]

    return "".join(map(bar, heights))
