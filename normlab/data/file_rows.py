"""The rows of one file: a text file is one row, and a file of another format has one document per row.

At most one text file, or a few rows, are in memory at once.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import re
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from normlab.data.documents import BYTE_ORDER_MARK, SourceCounts
from normlab.errors import DataError, did_you_mean

CHUNK = 1 << 20
"""Characters of JSON that are read at once."""

BATCH_SIZE = 16
"""Rows of a Parquet file in memory at once."""

JSON_BLANK = re.compile(r"[ \t\r\n\ufeff]*")
"""White space between rows; a file made by concatenation may contain byte order marks."""

_OTHER_ENCODINGS = {
    "utf-32": rb"\xff\xfe\0\0|\0\0\xfe\xff",
    "utf-16": rb"\xff\xfe|\xfe\xff",
    "utf-32le": rb"[^\0]\0\0\0",
    "utf-32be": rb"\0\0\0[^\0]",
    "utf-16le": rb"[^\0]\0",
    "utf-16be": rb"\0[^\0]",
}
"""How a text in another encoding begins: with a byte order mark, or with an ASCII character and its NULs. The mark of
UTF-16 is the start of that of UTF-32."""

_REPEATED = object()
"""Stands for the values of a key that a JSON object has twice."""


def rows_of(path: Path, counts: SourceCounts, column: str) -> Generator[Any]:
    r"""Yield the column of each row of a file, in the format of `counts`: None for a row without it.

    Line ends of text files become `\n`, as in Python's text mode. Line ends inside other formats stay.

    Raises:
        DataError: The file cannot be opened, is not UTF-8, or has no such column, or more than one.
        Exception: The file is not in this format.
    """
    if counts.format == "parquet":
        yield from _parquet_column(path, column)
        return
    with _opened_text(path, counts, newline="" if counts.format in ("csv", "tsv") else None) as file:
        if counts.format == "text":
            yield file.read()
        elif counts.format == "json":
            yield from _json_column(path, file, column)
        else:
            yield from _csv_column(path, file, column, "\t" if counts.format == "tsv" else ",")


def _json_column(path: Path, file: io.TextIOWrapper, column: str) -> Iterator[Any]:
    """Yield a column of JSON rows, with None for a row without it; a row may be a string."""

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row = {key.replace(BYTE_ORDER_MARK, ""): value for key, value in pairs}
        if len(row) < len(pairs) and sum(key.replace(BYTE_ORDER_MARK, "") == column for key, _ in pairs) > 1:
            row[column] = _REPEATED
        return row

    values = _json_values(file, json.JSONDecoder(object_pairs_hook=to_dict))
    rows = (row for value in values for row in (value if isinstance(value, list) else [value]))
    for number, row in enumerate(rows, start=1):
        if number == 1 and isinstance(row, dict) and row:
            _column_index(path, column, list(row))
        text = row.get(column) if isinstance(row, dict) else row
        if text is _REPEATED:
            raise DataError(f"{path}: row {number} has more than one {column!r}; remove all but one, or rename them")
        yield text


def _json_values(file: io.TextIOWrapper, decoder: json.JSONDecoder) -> Iterator[Any]:
    """Yield the JSON values of a file, with at most twice the longest value in memory."""
    text = ""
    while chunk := file.read(max(CHUNK, len(text))):
        text += chunk
        start = _skip_blank(text, 0)
        try:
            while start < len(text):
                value, end = decoder.raw_decode(text, start)
                yield value
                start = _skip_blank(text, end)
        except json.JSONDecodeError as error:
            # An incomplete value fails at the end of the chunk, or as an unterminated string: read the next chunk.
            if error.pos < len(text) - 16 and not error.msg.startswith("Unterminated"):
                raise
        text = text[start:]
    if text:
        decoder.decode(text)  # raises the error of the incomplete value


def _skip_blank(text: str, start: int) -> int:
    match = JSON_BLANK.match(text, start)
    return match.end() if match else start


def _csv_column(path: Path, file: io.TextIOWrapper, column: str, delimiter: str) -> Iterator[str]:
    """Yield a column of a file with a header; blank lines are no rows."""
    csv.field_size_limit(sys.maxsize)  # the default is 128 KiB
    # `strict` rejects text after a closing quote, and a quote without an end, which would join rows.
    rows = csv.reader(file, delimiter=delimiter, strict=True)
    header = next(rows, [])
    index = _column_index(path, column, header)
    for number, row in enumerate(filter(None, rows), start=1):
        if len(row) != len(header):
            raise DataError(
                f"{path}: row {number} has {len(row)} fields, and the header has {len(header)}; quote the fields that "
                "contain a delimiter"
            )
        yield row[index]


def _parquet_column(path: Path, column: str) -> Iterator[Any]:
    import pyarrow.parquet

    with opened(path) as file, pyarrow.parquet.ParquetFile(file) as table:
        names = table.schema_arrow.names
        name = names[_column_index(path, column, names)]
        for batch in table.iter_batches(BATCH_SIZE, columns=[name]):
            yield from batch.column(0).to_pylist()


def _column_index(path: Path, column: str, names: Sequence[str]) -> int:
    """Return the index of a column among the names, without their byte order marks."""
    names = [name.replace(BYTE_ORDER_MARK, "") for name in names]
    if names.count(column) > 1:
        raise DataError(f"{path}: has {names.count(column)} columns {column!r}; remove all but one, or rename them")
    if column not in names:
        hint = did_you_mean(column, names)
        listed = ", ".join(f"{name:.40}" for name in names[:20]) or "none"
        raise DataError(f"{path}: no column {column!r}{hint}; it has {listed}; set data.column")
    return names.index(column)


def invalid_utf8_at(path: Path) -> int | None:
    """Return the offset of the first byte that is not UTF-8, or None for a UTF-8 file.

    Raises:
        DataError: The file cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    start = 0
    with opened(path) as file:
        while True:
            pending = len(decoder.getstate()[0])
            chunk = file.read(CHUNK)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                return start - pending + error.start
            if not chunk:
                return None
            start += len(chunk)


@contextlib.contextmanager
def _opened_text(path: Path, counts: SourceCounts, newline: str | None) -> Iterator[io.TextIOWrapper]:
    """Open a UTF-8 file after its byte order mark, which is counted."""
    with opened(path) as file:
        for encoding, start in _OTHER_ENCODINGS.items():
            if re.match(start, file.peek(4)):
                raise DataError(
                    f"{path}: seems to be {encoding}, not UTF-8; convert the file (iconv -f {encoding} -t utf-8)"
                )
        if file.peek(3).startswith(codecs.BOM_UTF8):
            file.read(3)
            counts.byte_order_marks += 1
        with io.TextIOWrapper(file, encoding="utf-8", newline=newline) as text:
            yield text


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading bytes; raise DataError if it cannot be read."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise_unreadable(error, path)


def raise_unreadable(error: OSError, path: Path | None = None) -> NoReturn:
    """Raise the DataError of a file or folder that cannot be read."""
    raise DataError(
        f"{path or error.filename}: cannot be read ({error.strerror or error}); make it readable or leave it out"
    ) from error
