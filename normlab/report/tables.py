"""Render the rows of a report as a table, Markdown, LaTeX, JSON or CSV.

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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from normlab.analysis.columns import Column
from normlab.analysis.settings import format_setting
from normlab.base.errors import NormlabError, counted, printable, unknown
from normlab.store.format import encode

Row = dict[str, Any]
FORMATS = ("table", "json", "csv", "markdown", "latex")


def number_column(key: str) -> Column[Row]:
    """Return the column of a number that is also a config option."""
    return Column(key, itemgetter(key), key, format_setting, is_number=True, is_shared=True)


def text_column(key: str) -> Column[Row]:
    """Return the column of a text with its key as the title."""
    return Column(key, itemgetter(key), key, is_kept=True)


COLUMNS: Sequence[Column[Row]] = (
    *map(number_column, ("depth", "width", "seed", "lr")),
    Column("note", itemgetter("note"), "note", is_hidden=True),
)
"""The columns of any table by their keys; all others are texts."""


def render(
    rows: Sequence[Row],
    format: str = "table",
    width: int | None = None,
    fixed: Collection[str] | None = None,
    columns: Sequence[Column[Any]] = COLUMNS,
) -> str:
    """Return rows as text, without a newline at the end.

    JSON and CSV hold the exact numbers, with NaN and infinity as "nan", "inf" and "-inf", and None as null or an empty
    field; the others round, by the `columns` of the keys that are not texts. Every format escapes texts, which may be
    someone else's.

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
        return _csv(rows)
    by_key = {column.key: column for column in columns}
    columns = [by_key.get(key) or text_column(key) for key in rows[0]]
    if format == "markdown":
        return _markdown(columns, rows)
    if format == "latex":
        return _latex(columns, rows)
    return render_table(columns, rows, width or terminal_width(), fixed)


def add_notes(table: str, notes: Sequence[str], format: str) -> str:
    """Return a rendered table with notes below it, each on one line: LaTeX comments, a list in Markdown, or folded."""
    notes = list(map(printable, notes))
    if format == "latex":
        return "\n".join([table, *(f"% {note}" for note in notes)])
    if format == "markdown":
        return "\n".join([table, "", *(f"- {escape_markdown(note)}" for note in notes)])
    return f"{table}\n\n{fold_lines(notes, terminal_width())}"


def terminal_width() -> int:
    """Return the characters per line of the terminal, at least 56; 160 without a terminal."""
    return max(shutil.get_terminal_size((160, 24)).columns, _MIN_WIDTH)


def _text(column: Column[Any], row: Row) -> str:
    """Return the value of a column as text, with control characters escaped."""
    return printable(column.text_of(row[column.key]))


def _texts(columns: Sequence[Column[Any]], rows: Sequence[Row]) -> list[list[str]]:
    """Return the titles of columns, then the texts of each row."""
    table = [_titles(columns)]
    for row in rows:
        table.append([_text(column, row) for column in columns])
    return table


def _titles(columns: Sequence[Column[Any]]) -> list[str]:
    return [printable(column.title) for column in columns]


# CSV, Markdown and LaTeX


def _csv(rows: Sequence[Row]) -> str:
    # A key may be missing in the first row, such as the reason why an estimate is missing.
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_csv_value, keys))
    for row in rows:
        writer.writerow(_csv_value(row.get(key)) for key in keys)
    return text.getvalue().removesuffix("\n")


def _csv_value(value: Any) -> Any:
    """Return a value of CSV: a list as JSON; before a text that a spreadsheet would evaluate, an apostrophe."""
    if isinstance(value, list):
        return json.dumps(encode(value))
    if not isinstance(value, str):
        return encode(value)
    # A spreadsheet ignores white space, and reads full-width signs too.
    first = unicodedata.normalize("NFKC", value.lstrip()[:1])
    if first in ("=", "+", "-", "@") and not _is_number(value):
        value = f"'{value}"
    return printable(value)


def _markdown(columns: Sequence[Column[Any]], rows: Sequence[Row]) -> str:
    lines = [f"| {' | '.join(map(escape_markdown, cells))} |" for cells in _texts(columns, rows)]
    alignments: list[str] = []
    for column in columns:
        alignments.append("---:" if column.is_number else "---")
    lines.insert(1, f"| {' | '.join(alignments)} |")
    warning = _corpora_note(rows)
    if warning:
        lines += ["", escape_markdown(warning)]
    return "\n".join(lines)


def escape_markdown(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # Markdown keeps an underscore inside a word, and most names have one.
    return re.sub(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)


def _latex(columns: Sequence[Column[Any]], rows: Sequence[Row]) -> str:
    head, *body = (rf"{' & '.join(map(_latex_text, cells))} \\" for cells in _texts(columns, rows))
    alignments = ""
    for column in columns:
        is_number = all(_is_number(row[column.key]) for row in rows)
        alignments += "r" if is_number else "l"
    begin, end = rf"\begin{{tabular}}{{{alignments}}}", r"\end{tabular}"
    return "\n".join([begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", end])


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or its text with at most a unit; also an empty text."""
    return not isinstance(value, str) or re.fullmatch(r"([-+]?[\d.,]+(e[-+]?\d+)?( GiB| %)?)?", value) is not None


_LATEX = {
    "#": r"\#", "$": r"\$", "%": r"\%", "&": r"\&", "_": r"\_", "{": r"\{", "}": r"\}",
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": "$<$",
    ">": "$>$",
}  # fmt: skip


def _latex_text(text: str) -> str:
    """Escape a text; a negative number, a difference and a product (` x `) have signs of mathematics."""
    escaped = text.translate(str.maketrans(_LATEX)).replace(" x ", r" $\times$ ")
    return re.sub(r"(?<![\w.-])-(?=\d)|(?<= )-(?= )", "$-$", escaped)


def _corpora_note(rows: Sequence[Row]) -> str:
    """Return a warning if the runs have different corpora, else an empty text; names of corpora are not unique."""
    counts = Counter[str]()
    for row in rows:
        if row.get("corpus_sha256"):
            name, sha256 = printable(str(row["corpus"] or "")), printable(str(row["corpus_sha256"]))
            counts[f"{name} {sha256[:8]}".strip()] += 1
    if len(counts) < 2:
        return ""
    listed = ", ".join(f"{corpus}: {counted(n, 'run')}" for corpus, n in counts.items())
    return f"{len(counts)} corpora: losses are comparable only within one corpus ({listed})"


# Tables of lines that fit the terminal

_GAP = 2
_MIN_WIDTH = 56
_MIN_TEXT = 8


@dataclass(slots=True, eq=False)
class _TextColumn:
    """A column of a table as texts, one for each row."""

    column: Column[Any]
    texts: list[str]
    is_first: bool
    width: int = 0

    @property
    def title(self) -> str:
        return printable(self.column.title)

    @property
    def is_foldable(self) -> bool:
        """Whether its texts may be folded.

        The first column does not fold, because users copy names from it, but for the names of runs, which may be long.
        """
        return not self.column.is_number and (not self.is_first or self.column.key == "run")

    def padded(self, text: str) -> str:
        if self.column.is_number:
            return text.rjust(self.width)
        return text.ljust(self.width)


def render_table(
    columns: Sequence[Column[Any]], rows: Sequence[Row], width: int, fixed: Collection[str] | None = None
) -> str:
    """Render rows in lines of at most `width` characters (at least 56), with long texts folded.

    If the table is too wide, columns are left out from the right, but those in `fixed`.
    """
    width = max(width, _MIN_WIDTH)
    # A single row is read down, because across it seldom fits.
    if len(rows) == 1:
        return _render_row(columns, rows[0], width)
    text_columns = _text_columns(columns, rows)
    above = ""
    if any(column.key == "run" for column in columns):
        shared = _take_shared(text_columns, rows)
        if shared:
            above = f"in common: {', '.join(shared)}"
    dropped = _fit(text_columns, width, fixed)
    # Notes are too long for a column.
    below: list[str] = []
    for row in rows:
        if row.get("note"):
            below.append(f"{_text(columns[0], row)}: {printable(str(row['note']))}")
    below.append(_corpora_note(rows))
    if dropped:
        titles = ", ".join(column.title for column in dropped)
        below.append(f"not shown: {titles} (use a wider terminal, or JSON for all values)")
    parts = [fold_lines([above], width), _grid(text_columns), fold_lines(below, width)]
    return "\n\n".join(filter(None, parts))


def _render_row(columns: Sequence[Column[Any]], row: Row, width: int) -> str:
    """Render a single row as a line for each column."""
    titles = _titles(columns)
    indent = max(map(len, titles)) + _GAP
    lines: list[str] = []
    for title, column in zip(titles, columns, strict=True):
        text = _text(column, row)
        if text:
            lines.append(title.ljust(indent) + text)
    return fold_lines(lines, width, indent)


def _text_columns(columns: Sequence[Column[Any]], rows: Sequence[Row]) -> list[_TextColumn]:
    """Return the columns of a table as texts, without hidden and empty ones; equal names of runs need the id."""
    texts: dict[str, list[str]] = {}
    for column in columns:
        texts[column.key] = [_text(column, row) for row in rows]
    names = texts.get("run", [])
    needs_id = len(set(names)) < len(names)
    # The step and the steps of a run are one column: 40/80.
    if "step" in texts and "steps" in texts:
        for index, (step, steps) in enumerate(zip(texts["step"], texts.pop("steps"), strict=True)):
            if step and steps:
                texts["step"][index] = f"{step}/{steps}"
    text_columns: list[_TextColumn] = []
    for column in columns:
        is_hidden = column.is_hidden and not (column.key == "id" and needs_id)
        if not is_hidden and any(texts.get(column.key, ())):
            text_columns.append(_TextColumn(column, texts[column.key], is_first=not text_columns))
    return text_columns


def _take_shared(columns: list[_TextColumn], rows: Sequence[Row]) -> list[str]:
    """Remove the columns in which all runs have one value, and return their titles and values."""
    shared: list[str] = []
    for column in list(columns):
        values = {row[column.column.key] for row in rows} - {None, ""}
        if column.column.is_shared and len(values) == 1:
            columns.remove(column)
            value = next(filter(None, column.texts))
            shared.append(f"{column.title} {value}")
    return shared


def _fit(columns: list[_TextColumn], width: int, fixed: Collection[str] | None) -> list[_TextColumn]:
    """Set the widths of columns, and remove columns from the right until the others fit; return the removed ones."""
    optional: list[_TextColumn] = []
    for column in columns[1:]:
        is_fixed = column.column.is_kept if fixed is None else column.column.key in fixed
        if not is_fixed:
            optional.append(column)
    dropped: list[_TextColumn] = []
    _set_widths(columns, width, max(24, width // 3))
    while _total(columns) > width and optional:
        dropped.insert(0, optional.pop())
        columns.remove(dropped[0])
        _set_widths(columns, width, max(24, width // 3))
    if _total(columns) > width:
        _set_widths(columns, width, _MIN_TEXT)
    return dropped


def _set_widths(columns: Sequence[_TextColumn], width: int, min_text: int) -> None:
    """Set the widths of columns; the widest text shrinks until the table fits, to `min_text` at least."""
    for column in columns:
        column.width = max(map(len, [column.title, *column.texts]))
        if column.is_foldable:
            column.width = min(column.width, width)
    # One character at a time, so that the widest columns end equally wide.
    while _total(columns) > width:
        wide = [column for column in columns if column.is_foldable and column.width > min_text]
        if not wide:
            return
        widest = max(wide, key=lambda column: column.width)
        widest.width -= 1


def _total(columns: Sequence[_TextColumn]) -> int:
    return sum(column.width for column in columns) + _GAP * (len(columns) - 1)


def _grid(columns: Sequence[_TextColumn]) -> str:
    lines: list[str] = []
    titles = tuple(column.title for column in columns)
    for row in [titles, *zip(*(column.texts for column in columns), strict=True)]:
        # A row is as many lines as its longest folded text.
        folded: list[list[str]] = []
        for column, text in zip(columns, row, strict=True):
            folded.append(textwrap.wrap(text, column.width, break_on_hyphens=False) or [""])
        for texts in itertools.zip_longest(*folded, fillvalue=""):
            padded = [column.padded(text) for column, text in zip(columns, texts, strict=True)]
            lines.append((" " * _GAP).join(padded).rstrip())
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:]])


def fold_lines(lines: Sequence[str], width: int, indent: int = 2) -> str:
    # Names of runs have hyphens, and are copied whole.
    wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_on_hyphens=False)
    return "\n".join(folded for line in lines for folded in wrapper.wrap(line))
