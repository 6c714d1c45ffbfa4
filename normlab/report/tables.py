"""Render the rows of a report as a table, Markdown, LaTeX, JSON or CSV; the columns of runs.

JSON and CSV hold the exact values, the others round. A table fits the terminal: columns that do not fit are named below
it. `rich` is not used, because it takes ten times as long for a folder of many runs.
"""

import csv
import io
import itertools
import json
import re
import shutil
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from normlab.analysis.settings import format_setting
from normlab.base.errors import NormlabError, counted, printable, unknown
from normlab.store.format import encode
from normlab.store.outcome import format_loss
from normlab.store.throughput import format_mfu, format_tflops

Row = dict[str, Any]
FORMATS = ("table", "json", "csv", "markdown", "latex")


def render(
    rows: Sequence[Row], format: str = "table", width: int | None = None, fixed: Collection[str] | None = None
) -> str:
    """Return rows as text, without a newline at the end.

    JSON and CSV hold the exact numbers, with NaN and infinity as "nan", "inf" and "-inf", and None as null or an empty
    field; the others round. Every format escapes texts, which may be someone else's.

    A table has lines of `width` characters, by default of the terminal's width, or 160 without a terminal. A narrow one
    keeps the columns `fixed`, by default texts, and of runs the state and the loss.

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
        return _latex(rows)
    return render_table(rows, width or terminal_width(), fixed)


def terminal_width() -> int:
    """Return the characters per line of the terminal, at least 56; 160 without a terminal."""
    return max(shutil.get_terminal_size((160, 24)).columns, _MIN_WIDTH)


def _csv_value(value: Any) -> Any:
    """Return a value of CSV: a list as JSON; before a text that a spreadsheet would evaluate, an apostrophe."""
    if isinstance(value, list):
        return json.dumps(encode(value))
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
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # Markdown keeps an underscore inside a word, and most names have one.
    return re.sub(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)


def _latex(rows: Sequence[Row]) -> str:
    lines = [[_title(key) for key in rows[0]], *([format_value(*item) for item in row.items()] for row in rows)]
    head, *body = (rf"{' & '.join(map(_latex_text, line))} \\" for line in lines)
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
    """How the values of a key of JSON and CSV are written in a table, in Markdown, in LaTeX and on the page."""

    title: str = ""
    """The heading; empty for the key."""
    format: Callable[[float], str] | None = None
    """The format of a column of numbers, which is aligned to the right; None for a column of text."""
    is_hidden: bool = False
    """Whether a table leaves it out, but not Markdown and LaTeX."""
    is_shared: bool = False
    """Whether a value that all runs share moves to a line above the table."""


_SETTING, _TEXT = Column(format=format_setting, is_shared=True), Column(is_shared=True)
COLUMNS = {
    "state": _TEXT,
    "norm": _TEXT,
    "placement": _TEXT,
    **dict.fromkeys(("depth", "width", "seed", "lr"), _SETTING),
    "step": Column(format="{:.0f}".format),
    "steps": Column(format="{:.0f}".format),
    "val_loss": Column("val loss", format_loss),
    "val_loss_ema": Column("val ema", format_loss),
    "best_val_loss": Column("best val", format_loss),
    "train_loss": Column("train loss", format_loss),
    "vs_bigram": Column("vs bigram", partial(format_loss, sign="+")),
    "corpus": _TEXT,
    "corpus_sha256": Column("corpus sha256", is_hidden=True),
    "device": _TEXT,
    "precision": _TEXT,
    "tokens_per_s": Column("tok/s", "{:,.0f}".format),
    "flops_per_token": Column("FLOPs/token", "{:.4g}".format, is_hidden=True),
    "flops_per_s": Column("TFLOP/s", format_tflops, is_hidden=True),
    "mfu": Column("MFU", format_mfu),
    "seconds": Column(format="{:,.1f}".format),
    "pack": _TEXT,
    "id": Column(is_hidden=True),
    "note": Column(is_hidden=True),
    "folder": Column(is_hidden=True),
}
"""The columns of a run by key; others are texts with their key as the title."""
_KEPT = ("run", "state", "val_loss")


def column(key: str) -> Column:
    return COLUMNS.get(key) or Column()


def format_value(key: str, value: Any) -> str:
    """Return a value as text, empty for None, with control characters escaped."""
    if value is None:
        return ""
    if (form := column(key).format) and isinstance(value, int | float):
        return form(value)
    return printable(str(value))


def format_p(p: float | None) -> str:
    return "" if p is None else "<0.0001" if p < 1e-4 else f"{p:.2g}"


def _title(key: str) -> str:
    return printable(column(key).title or key)


def _corpora_note(rows: Sequence[Row]) -> str:
    """Return a warning if the runs have different corpora, else an empty text; names of corpora are not unique."""
    counts = Counter(
        f"{format_value('corpus', row['corpus'])} {format_value('', row['corpus_sha256'])[:8]}".strip()
        for row in rows
        if row.get("corpus_sha256")
    )
    listed = ", ".join(f"{corpus}: {counted(n, 'run')}" for corpus, n in counts.items())
    return f"{len(counts)} corpora: losses are comparable only within one corpus ({listed})" if len(counts) > 1 else ""


# Tables

_GAP = 2
_MIN_WIDTH = 56
_MIN_TEXT = 8

Columns = dict[str, list[str]]


def render_table(rows: Sequence[Row], width: int, fixed: Collection[str] | None = None) -> str:
    """Render rows in lines of at most `width` characters (at least 56), with long texts folded.

    If the table is too wide, columns are left out from the right, but those in `fixed`.
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
    names = [format_value(key := next(iter(row)), row[key]) for row in rows]
    below = [
        f"{name}: {format_value('note', row['note'])}" for name, row in zip(names, rows, strict=True) if row.get("note")
    ]
    below.append(_corpora_note(rows))
    if dropped:
        titles = ", ".join(_title(key) for key in dropped)
        below.append(f"not shown: {titles} (use a wider terminal, or JSON for all values)")
    above = "in common: " + ", ".join(f"{_title(key)} {value}" for key, value in shared.items())
    parts = [fold_lines([above] if shared else [], width), _grid(columns, widths), fold_lines(below, width)]
    return "\n\n".join(filter(None, parts))


def _columns(rows: Sequence[Row]) -> Columns:
    """Return the texts of each column of a table, without hidden and empty columns; equal names of runs need the id."""
    columns = {key: [format_value(key, row[key]) for row in rows] for key in rows[0]}
    needs_id = len(set(columns.get("run", ()))) < len(columns.get("run", ()))
    if "step" in columns and "steps" in columns:
        pairs = zip(columns["step"], columns.pop("steps"), strict=True)
        columns["step"] = [f"{step}/{steps}" if step and steps else step for step, steps in pairs]
    is_hidden = {key: column(key).is_hidden and not (key == "id" and needs_id) for key in columns}
    return {key: texts for key, texts in columns.items() if any(texts) and not is_hidden[key]}


def _fit(columns: Columns, width: int, fixed: Collection[str] | None) -> tuple[list[str], dict[str, int]]:
    """Remove columns from the right until the rest fits; return removed keys and widths."""
    if fixed is None:
        fixed = [key for key in columns if key not in COLUMNS or key in _KEPT]
    dropped: list[str] = []
    optional = [key for key in list(columns)[1:] if key not in fixed]
    while _total(widths := _widths(columns, width, max(24, width // 3))) > width and optional:
        dropped.insert(0, optional.pop())
        del columns[dropped[0]]
    return dropped, widths if _total(widths) <= width else _widths(columns, width, _MIN_TEXT)


def _widths(columns: Columns, width: int, min_text: int) -> dict[str, int]:
    """Return column widths; the widest text shrinks until the table fits, to `min_text` at least.

    The first column does not fold, because users copy names from it, but for the names of runs, which may be long.
    """
    first = next(iter(columns))
    widths = {key: max(map(len, [_title(key), *texts])) for key, texts in columns.items()}
    foldable = [key for key in columns if not column(key).format and (key != first or key == "run")]
    widths |= {key: min(widths[key], width) for key in foldable}
    while _total(widths) > width and (wide := [key for key in foldable if widths[key] > min_text]):
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _total(widths: dict[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _grid(columns: Columns, widths: dict[str, int]) -> str:
    lines: list[str] = []
    for row in [tuple(map(_title, columns)), *zip(*columns.values(), strict=True)]:
        folded = [
            textwrap.wrap(text, widths[key], break_on_hyphens=False) or [""]
            for key, text in zip(columns, row, strict=True)
        ]
        for texts in itertools.zip_longest(*folded, fillvalue=""):
            pairs = zip(columns, texts, strict=True)
            padded = [text.rjust(widths[key]) if column(key).format else text.ljust(widths[key]) for key, text in pairs]
            lines.append((" " * _GAP).join(padded).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def fold_lines(lines: Sequence[str], width: int, indent: int = 2) -> str:
    wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_on_hyphens=False)
    return "\n".join(folded for line in lines for folded in wrapper.wrap(line))
