"""Render the rows of a report as a table, Markdown, LaTeX, JSON or CSV.

JSON and CSV hold the exact values, the others round. A table of lines that fits the terminal is in `text_table`.
"""

import csv
import io
import json
import re
import unicodedata
from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Any

from normlab.analysis.columns import Column
from normlab.analysis.settings import format_setting
from normlab.base.errors import NormlabError, printable, unknown
from normlab.report.text_table import (
    TableRow,
    corpora_note,
    fold_lines,
    render_table,
    terminal_width,
    text_of,
    titles_of,
    without_definitions,
)
from normlab.store.format import encode

FORMATS = ("table", "json", "csv", "markdown", "latex")


def number_column(key: str) -> Column[TableRow]:
    """Return the column of a number that is also a config option."""
    return Column(key, itemgetter(key), key, format_setting, is_number=True, is_shared=True)


def text_column(key: str) -> Column[TableRow]:
    """Return the column of a text with its key as the title."""
    return Column(key, itemgetter(key), key, is_kept=True)


COLUMNS: Sequence[Column[TableRow]] = (
    *map(number_column, ("depth", "width", "seed", "lr")),
    Column("note", itemgetter("note"), "note", is_hidden=True),
)
"""The columns of any table by their keys; all others are texts."""


def render(
    rows: Sequence[TableRow],
    format: str = "table",
    width: int | None = None,
    fixed: Collection[str] | None = None,
    columns: Sequence[Column[Any]] = COLUMNS,
    *,
    has_definitions: bool = True,
) -> str:
    """Return rows as text, without a newline at the end.

    JSON and CSV hold the exact numbers, with NaN and infinity as "nan", "inf" and "-inf", and None as null or an empty
    field; the others round, by the `columns` of the keys that are not texts. Every format escapes texts, which may be
    someone else's.

    A table has lines of `width` characters, by default of the terminal's width, or 160 without a terminal. A narrow one
    keeps the columns `fixed`, by default texts, and of runs the state and the loss. It may leave out the definitions
    of its columns.

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
    return render_table(columns, rows, width or terminal_width(), fixed, has_definitions=has_definitions)


def add_notes(table: str, notes: Sequence[str], format: str, *, has_definitions: bool = True) -> str:
    """Return a rendered table with notes below it, each on one line: LaTeX comments, a list in Markdown, or folded.

    A table of lines may leave out the definitions, and name the words that they explain.
    """
    if format == "table" and not has_definitions:
        notes = without_definitions(notes)
    if not notes:
        return table
    notes = list(map(printable, notes))
    lines = [table]
    if format == "latex":
        for note in notes:
            lines.append(f"% {note}")
        return "\n".join(lines)
    if format == "markdown":
        lines.append("")
        for note in notes:
            lines.append(f"- {escape_markdown(note)}")
        return "\n".join(lines)
    return f"{table}\n\n{fold_lines(notes, terminal_width())}"


def _texts(columns: Sequence[Column[Any]], rows: Sequence[TableRow]) -> list[list[str]]:
    """Return the titles of columns, then the texts of each row."""
    table = [titles_of(columns)]
    for row in rows:
        table.append([text_of(column, row) for column in columns])
    return table


# CSV, Markdown and LaTeX


def _csv(rows: Sequence[TableRow]) -> str:
    # A key may be missing in the first row, such as the reason why an estimate is missing.
    keys: dict[str, None] = {}
    for row in rows:
        keys |= dict.fromkeys(row)
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


def _markdown(columns: Sequence[Column[Any]], rows: Sequence[TableRow]) -> str:
    alignments: list[str] = []
    for column in columns:
        alignments.append("---:" if column.is_number else "---")
    lines: list[str] = []
    for texts in _texts(columns, rows):
        lines.append(f"| {' | '.join(map(escape_markdown, texts))} |")
    lines.insert(1, f"| {' | '.join(alignments)} |")
    warning = corpora_note(rows)
    if warning:
        lines += ["", escape_markdown(warning)]
    return "\n".join(lines)


def escape_markdown(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # Markdown keeps an underscore inside a word, and most names have one.
    return re.sub(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)


def _latex(columns: Sequence[Column[Any]], rows: Sequence[TableRow]) -> str:
    lines: list[str] = []
    for texts in _texts(columns, rows):
        lines.append(rf"{' & '.join(map(_latex_text, texts))} \\")
    head, *body = lines
    alignments = ""
    for column in columns:
        is_number = all(_is_number(row[column.key]) for row in rows)
        alignments += "r" if is_number else "l"
    begin, end = rf"\begin{{tabular}}{{{alignments}}}", r"\end{tabular}"
    return "\n".join([begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", end])


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or its text with at most a unit; also an empty text."""
    if not isinstance(value, str):
        return True
    return re.fullmatch(r"([-+]?[\d.,]+(e[-+]?\d+)?( GiB| %)?)?", value) is not None


_LATEX = {
    "#": r"\#", "$": r"\$", "%": r"\%", "&": r"\&", "_": r"\_", "{": r"\{", "}": r"\}",
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": "$<$",
    ">": "$>$",
}  # fmt: skip


def _latex_text(text: str) -> str:
    """Escape a text; a negative number, a difference and a product (` x `) have signs of mathematics."""
    escaped = text.translate(str.maketrans(_LATEX)).replace(" x ", r" $\times$ ")
    return re.sub(r"(?<![\w.-])-(?=\d)|(?<= )-(?= )", "$-$", escaped)
