"""Rows of tables that are text: CSV, TSV, JSON Lines, and JSON with a list. A cell is the text that the file has.

No type is guessed: `NA` and `null` are words in a CSV, and `007` keeps its zeros. A file that is not what its format
demands is an error that names the line, because a lenient reader joins rows or drops characters.
"""

import csv
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TextIO

from normlab.base.errors import DataError, did_you_mean
from normlab.data.documents import SourceRow

LARGEST_CELL = 2**30
"""Most characters of a cell of a CSV; the limit of Python's csv is 2^17 unless it is set."""

SEPARATORS = (";", "\t", "|", ",")
"""What may separate the cells of a header that was read as one cell."""

FIRST_ROWS = 100
"""Rows of a JSON file of which one must have the column; without it, a row has no text."""

FIX_CSV = "fix the line, or write the file as JSON Lines or Parquet"
FIX_JSON = "write one object in each line"

OpenFile = Callable[[], AbstractContextManager[TextIO]]
"""Opens a file at its start, without a translation of line ends."""


def csv_rows(open_file: OpenFile, separator: str, column: str, columns: Sequence[str] = ()) -> Iterator[SourceRow]:
    """Yield a column of a CSV or TSV file, which has a header unless `columns` names its columns.

    Quotes are those of RFC 4180: a quoted cell may have separators, line breaks and doubled quotes. The quotes of a TSV
    may also be characters of the text (see `_has_quoted_cells`). A blank line is a row with empty cells.

    Raises:
        DataError: The file lacks the column or has two of it, its quotes are invalid, or a row is not as long as the
            header.
    """
    is_quoted = separator != "\t" or _has_quoted_cells(open_file, separator)
    with open_file() as file:
        rows = _split_rows(file, separator, is_quoted)
        # A file without a line has no header and no rows.
        header = list(columns) or next(rows, (0, [column]))[1]
        if header.count(column) != 1:
            # A header of one cell is rather read with the wrong separator than a table of one column.
            if len(header) == 1:
                _check_separator(header[0], separator)
            raise column_error(column, header)
        for line, cells in rows:
            if not cells:
                yield SourceRow(f"line {line}", "")
            elif len(cells) == len(header):
                yield SourceRow(f"line {line}", cells[header.index(column)])
            else:
                raise DataError(f"line {line}: number of cells: {len(cells)} (header: {len(header)}); {FIX_CSV}")


def _split_rows(file: TextIO, separator: str, is_quoted: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each row, with the number of its first line.

    Raises:
        DataError: A quoted cell does not end, or has characters after its end.
    """
    csv.field_size_limit(LARGEST_CELL)
    quoting = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
    reader = csv.reader(file, delimiter=separator, quoting=quoting, strict=True)
    line = 1
    try:
        for cells in reader:
            yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"the row that starts in line {line}: {error}; double each quote inside a quoted cell, or write the file "
            "as JSON Lines or Parquet"
        ) from error


@dataclass(frozen=True, slots=True)
class _Shape:
    """The shape of a table that is read with or without quotes."""

    rows: int
    lengths: set[int]
    """The numbers of cells of its rows; a table has one."""


def _has_quoted_cells(open_file: OpenFile, separator: str) -> bool:
    """Return whether the quotes of a TSV enclose cells, as spreadsheets write them; else they are characters.

    They enclose cells if all rows are then equally long. But if the file is also a regular table with quotes read as
    characters, and reading them as quotes would join lines, they are characters: of sentences that start or end with a
    quote. A line break inside a quoted cell of a table with one column thus starts a row, and no text is lost.
    """
    quoted = _shape(open_file, separator, is_quoted=True)
    if quoted is None or len(quoted.lengths) > 1:
        return False
    plain = _shape(open_file, separator, is_quoted=False)
    if plain is None or len(plain.lengths) > 1:
        return True
    return plain.rows == quoted.rows


def _shape(open_file: OpenFile, separator: str, is_quoted: bool) -> _Shape | None:
    """Return the shape of a table without its blank lines; None if its quotes are invalid."""
    rows, lengths = 0, set()
    try:
        with open_file() as file:
            for _, cells in _split_rows(file, separator, is_quoted):
                if cells:
                    rows += 1
                    lengths.add(len(cells))
    except DataError:
        return None
    return _Shape(rows, lengths)


def json_rows(open_file: OpenFile, column: str) -> Iterator[SourceRow]:
    """Yield a field of the objects of a JSON file: one in each line, or a list of them.

    A list of strings is the column "text". A row without the field has no text, as one with null.

    Raises:
        DataError: A line is not JSON, has two equal keys, or is no object; or no row has the field.
    """
    with open_file() as file:
        objects = _json_objects(file)
        first = list(itertools.islice(objects, FIRST_ROWS))
        if first and not any(column in fields for _, fields in first):
            raise column_error(column, list(first[0][1]))
        for place, fields in itertools.chain(first, objects):
            yield SourceRow(place, fields.get(column))


def _json_objects(file: TextIO) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the fields of each object; blank lines are skipped."""
    for number, line in enumerate(file, start=1):
        if line.lstrip().startswith("["):
            values = _parse_json(line + file.read(), number)
            for index, value in enumerate(values, start=1):
                yield f"item {index}", _fields(value, f"item {index}")
            return
        if not line.isspace():
            yield f"line {number}", _fields(_parse_json(line.rstrip("\r\n"), number), f"line {number}")


def _parse_json(text: str, line: int) -> Any:
    """Return a JSON value, which starts in a line of a file."""
    try:
        return json.loads(text, object_pairs_hook=_without_equal_keys)
    except json.JSONDecodeError as error:
        place = f"line {line + error.lineno - 1}, column {error.colno}"
        raise DataError(f"{place}: is not JSON ({error.msg}); {FIX_JSON}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"line {line}: cannot be read ({error}); {FIX_JSON}") from error


def _without_equal_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # A parser keeps the last of two equal keys in silence, and the text of the first would be lost.
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has two keys {max(keys, key=keys.count)!r}")
    return fields


def _fields(value: Any, place: str) -> dict[str, Any]:
    # A list of strings has no names of columns; `datasets` calls its column "text".
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise DataError(f"{place}: {value!r:.40} is no object with a field for each column; {FIX_JSON}")
    return value


def column_error(column: str, header: Sequence[str]) -> DataError:
    """Return the error for a table that lacks a column, or has several of its name."""
    if column in header:
        return DataError(f"has {header.count(column)} columns {column!r}; rename one")
    hint = did_you_mean(column, header)
    names = ", ".join(_quoted(name) for name in header)
    return DataError(f"no column {column!r}{hint}; it has {names or 'none'}; set data.column")


def _quoted(name: str) -> str:
    """Return the name of a column, in quotes if it is more than letters, digits, `_`, `-` and `.`."""
    if re.fullmatch(r"[\w.-]+", name):
        return name
    return repr(name)


def _check_separator(cell: str, separator: str) -> None:
    """Raise DataError if the only cell of a header has another separator in it."""
    for probable in SEPARATORS:
        if probable != separator and probable in cell:
            raise DataError(
                f"the header is one cell, {cell!r:.80}: its separator looks like {probable!r}, and is read as "
                f"{separator!r}; write the file with {separator!r}, or set sep: {json.dumps(probable)} for it in a "
                "README.md, under configs"
            )
