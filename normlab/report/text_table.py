"""Render rows as lines that fit the terminal: long texts are folded, and columns that do not fit are named below.

`rich` is not used, because it takes ten times as long for a folder of many runs.
"""

import itertools
import shutil
import textwrap
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from normlab.analysis.columns import Column, Definition
from normlab.base.errors import counted, printable

TableRow = dict[str, Any]
_GAP = 2
_MIN_WIDTH = 56
_MIN_TEXT = 8


def terminal_width() -> int:
    """Return the characters per line of the terminal, at least 56; 160 without a terminal."""
    return max(shutil.get_terminal_size((160, 24)).columns, _MIN_WIDTH)


def text_of(column: Column[Any], row: TableRow) -> str:
    """Return the value of a column as text, with control characters escaped."""
    return printable(column.text_of(row[column.key]))


def titles_of(columns: Sequence[Column[Any]]) -> list[str]:
    return [printable(column.title) for column in columns]


def corpora_note(rows: Sequence[TableRow]) -> str:
    """Return a warning if the runs have different corpora, else an empty text; names of corpora are not unique."""
    counts = Counter[str]()
    for row in rows:
        if row.get("corpus_sha256"):
            name = printable(str(row["corpus"] or ""))
            sha256 = printable(str(row["corpus_sha256"]))
            counts[f"{name} {sha256[:8]}".strip()] += 1
    if len(counts) < 2:
        return ""
    listed = ", ".join(f"{corpus}: {counted(n, 'run')}" for corpus, n in counts.items())
    return f"{len(counts)} corpora: losses are comparable only within one corpus ({listed})"


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
    columns: Sequence[Column[Any]],
    rows: Sequence[TableRow],
    width: int,
    fixed: Collection[str] | None = None,
    *,
    has_definitions: bool = True,
) -> str:
    """Render rows in lines of at most `width` characters (at least 56), with long texts folded.

    If the table is too wide, columns are left out from the right, but those in `fixed`. The definitions of columns may
    be left out, too.
    """
    width = max(width, _MIN_WIDTH)
    # A single row is read down, because across it seldom fits.
    if len(rows) == 1:
        definitions = [Definition(column.note) for column in columns if column.note and text_of(column, rows[0])]
        below = list(definitions) if has_definitions else without_definitions(definitions)
        parts = [_render_row(columns, rows[0], width), fold_lines(below, width)]
        return "\n\n".join(filter(None, parts))
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
            below.append(f"{text_of(columns[0], row)}: {printable(str(row['note']))}")
    for column in text_columns:
        if column.column.note:
            below.append(Definition(column.column.note))
    below.append(corpora_note(rows))
    if dropped:
        titles = ", ".join(column.title for column in dropped)
        below.append(f"not shown: {titles} (use a wider terminal, or JSON for all values)")
    if not has_definitions:
        below = without_definitions(below)
    parts = [fold_lines([above], width), _grid(text_columns), fold_lines(below, width)]
    return "\n\n".join(filter(None, parts))


def without_definitions(notes: Sequence[str]) -> list[str]:
    """Return the notes that are no definitions, and a line that names the words of the definitions."""
    words: list[str] = []
    others: list[str] = []
    for note in notes:
        if isinstance(note, Definition):
            words.append(note.word)
        else:
            others.append(note)
    if words:
        others.append(f"--notes explains: {', '.join(words)}")
    return others


def _render_row(columns: Sequence[Column[Any]], row: TableRow, width: int) -> str:
    """Render a single row as a line for each column."""
    titles = titles_of(columns)
    indent = max(map(len, titles)) + _GAP
    lines: list[str] = []
    for title, column in zip(titles, columns, strict=True):
        text = text_of(column, row)
        if text:
            lines.append(title.ljust(indent) + text)
    return fold_lines(lines, width, indent)


def _text_columns(columns: Sequence[Column[Any]], rows: Sequence[TableRow]) -> list[_TextColumn]:
    """Return the columns of a table as texts, without hidden and empty ones; equal names of runs need the id."""
    texts: dict[str, list[str]] = {}
    for column in columns:
        texts[column.key] = [text_of(column, row) for row in rows]
    names = texts.get("run", [])
    needs_id = len(set(names)) < len(names)
    # The step and the steps of a run are one column: 40/80.
    if "step" in texts and "steps" in texts:
        for index, (step, steps) in enumerate(zip(texts["step"], texts.pop("steps"), strict=True)):
            if step and steps:
                texts["step"][index] = f"{step}/{steps}"
    text_columns: list[_TextColumn] = []
    for column in columns:
        is_needed = column.key == "id" and needs_id
        if column.is_hidden and not is_needed:
            continue
        if any(texts.get(column.key, ())):
            text_columns.append(_TextColumn(column, texts[column.key], is_first=not text_columns))
    return text_columns


def _take_shared(columns: list[_TextColumn], rows: Sequence[TableRow]) -> list[str]:
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
    # A column is rather left out than folded into lines of a few characters, unless no other is left.
    readable = max(24, width // 3)
    _set_widths(columns, width, readable)
    while _total(columns) > width and optional:
        column = optional.pop()
        columns.remove(column)
        dropped.insert(0, column)
        _set_widths(columns, width, readable)
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
    texts_of_columns: list[list[str]] = []
    for column in columns:
        texts_of_columns.append([column.title, *column.texts])
    lines: list[str] = []
    for row in zip(*texts_of_columns, strict=True):
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
    folded: list[str] = []
    for line in lines:
        folded += wrapper.wrap(line)
    return "\n".join(folded)
