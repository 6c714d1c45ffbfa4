"""The files of a corpus: their order, one hash of their content, and their documents.

A text file is one document. A JSON or Parquet file has one document per row. At most one text file, or a few rows, are
in memory at once.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import json
import os
import re
import sysconfig
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from normlab.config.corpora import DataConfig, FilesData
from normlab.errors import DataError, did_you_mean

KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""Format of a file by its suffix; any other file is text."""

EXCLUDED_FOLDERS = frozenset(
    ("test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "_bundled", "lib-dynload")
)
"""Folders below the standard library with tests or installed packages."""

BUILD_SPECIFIC = ("config-", "_sysconfigdata")
"""Prefixes of the names of files that differ between builds of one Python version."""

CHUNK = 1 << 20
"""Bytes, or characters of JSON, that are read at once."""

BATCH_SIZE = 16
"""Rows of a Parquet file in memory at once."""

JSON_BLANK = re.compile(r"[ \t\r\n\ufeff]*")
"""White space between rows; a file made by concatenation may contain byte order marks."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a corpus."""

    path: Path
    name: str
    """Path relative to the folder in `data.path`, with `/`; the hash of the corpus depends on the names in order."""

    @property
    def kind(self) -> str:
        """The format: text, json (lines, or one list) or parquet."""
        return KINDS.get(self.path.suffix.lower(), "text")


def find_sources(config: DataConfig) -> list[Source]:
    """Return the files of a corpus, in order.

    `stdlib`: every `*.py` of the standard library in UTF-8, sorted by path, without tests, installed packages and files
    that differ between builds of one Python version. `files`: the files of `path` in the order of the list; the files
    in a folder and its subfolders are sorted by path, without hidden ones. A file that is listed twice is used once.

    Raises:
        DataError: A path does not exist, or a folder has no file.
    """
    if not isinstance(config, FilesData):
        return _stdlib()
    sources = _files(config.path)
    if config.column != FilesData().column and all(source.kind == "text" for source in sources):
        raise DataError(
            f"data.column={config.column}: has no effect, since data.path has only text files; leave it out, or add "
            "JSONL or Parquet"
        )
    return sources


def source_sha256(sources: Iterable[Source]) -> str:
    """Return the SHA-256, in hex, of the names and bytes of files, in order.

    Raises:
        DataError: A file cannot be read.
    """
    total = hashlib.sha256()
    for source in sources:
        with _opened(source.path) as file:
            content = hashlib.file_digest(file, "sha256").digest()
        # Both hashes have a fixed length, so two different lists of files cannot give the same bytes.
        total.update(hashlib.sha256(os.fsencode(source.name)).digest() + content)
    return total.hexdigest()


def invalid_utf8_at(path: Path) -> int | None:
    """Return the offset of the first byte that is not UTF-8, or None for a UTF-8 file.

    Raises:
        DataError: The file cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    start = 0
    with _opened(path) as file:
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


class FilesText:
    """The documents of files and folders, or of the standard library.

    Args:
        config: The source of the text.

    Raises:
        DataError: A file cannot be read.
    """

    provenance = None
    """The source in the record of a run; None, because files have no dataset or commit."""

    def __init__(self, config: DataConfig) -> None:
        self._column = config.column if isinstance(config, FilesData) else "text"
        self._sources = find_sources(config)
        self.key: dict[str, Any] = {"source_sha256": source_sha256(self._sources), "column": self._column}
        """All inputs that determine the text, as plain JSON values."""

    def connect(self) -> None:
        """Do nothing, because files need no network."""

    def documents(self, scratch: Path) -> Generator[str]:
        """Yield the documents of the files in order; `scratch` is unused."""
        return read_documents(self._sources, self._column)


def read_documents(sources: Iterable[Source], column: str) -> Generator[str]:
    r"""Yield the documents of files: one for a text file, one per row of a JSON or Parquet file.

    Line ends of text files become `\n`, as in Python's text mode. Line ends inside JSON strings and Parquet stay.

    Args:
        sources: The files.
        column: The column of JSON and Parquet files that holds the text.

    Raises:
        DataError: A file is not UTF-8, is not in the format of its suffix, lacks the column, or has a row without text.
    """
    for source in sources:
        try:
            if source.kind == "text":
                with _opened_text(source.path) as file:
                    yield file.read()
                continue
            values = _json_column if source.kind == "json" else _parquet_column
            for number, text in enumerate(values(source.path, column), start=1):
                if not isinstance(text, str):
                    raise DataError(
                        f"{source.path}: row {number} of column {column!r} is {text!r:.40}, not text; "
                        "remove such rows, or set data.column to another column"
                    )
                text.encode()  # half of a surrogate pair raises UnicodeEncodeError
                yield text
        except DataError:
            raise
        except Exception as error:  # the errors of `pyarrow` have no common class
            if isinstance(error, UnicodeDecodeError) and source.kind != "parquet":
                raise DataError(
                    f"{source.path}: not UTF-8 at byte {invalid_utf8_at(source.path)}; convert the file (iconv -t "
                    "utf-8), unpack it if it is compressed, or leave it out"
                ) from error
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise DataError(
                f"{source.path}: cannot be read as {source.kind} ({reason}); fix it or leave it out"
            ) from error


def _json_column(path: Path, column: str) -> Iterator[Any]:
    """Yield a column of JSON rows, with None for a row without it; a row may be a string."""
    with _opened_text(path) as file:
        rows = (row for value in _json_values(file) for row in (value if isinstance(value, list) else [value]))
        for number, row in enumerate(rows):
            if number == 0 and isinstance(row, dict) and row:
                _check_column(path, column, row)
            yield row.get(column) if isinstance(row, dict) else row


def _json_values(file: io.TextIOWrapper) -> Iterator[Any]:
    """Yield the JSON values of a file, with at most twice the longest value in memory."""
    decoder, text = json.JSONDecoder(), ""
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


def _parquet_column(path: Path, column: str) -> Iterator[Any]:
    import pyarrow.parquet

    with _opened(path) as file, pyarrow.parquet.ParquetFile(file) as table:
        _check_column(path, column, table.schema_arrow.names)
        for batch in table.iter_batches(BATCH_SIZE, columns=[column]):
            yield from batch.column(0).to_pylist()


def _check_column(path: Path, column: str, names: Iterable[str]) -> None:
    if column not in names:
        hint = did_you_mean(column, names)
        raise DataError(f"{path}: no column {column!r}{hint}; it has {', '.join(names)}; set data.column")


def _stdlib() -> list[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    sources = [
        source
        for source in files_below(root, EXCLUDED_FOLDERS)
        if source.path.suffix == ".py"
        and not source.name.startswith(BUILD_SPECIFIC)
        and invalid_utf8_at(source.path) is None
    ]
    if not sources:
        raise DataError(f"{root}: has no source files of Python's standard library; use data=files data.path=...")
    return sources


def _files(paths: Iterable[str]) -> list[Source]:
    sources: dict[Path, Source] = {}
    for name in paths:
        path = Path(name).expanduser()
        if not os.path.exists(path):  # Path.exists raises for a name that is too long
            raise DataError(f"data.path={name}: no such file or folder; check the path")
        if not path.is_dir() and not path.is_file():
            raise DataError(f"data.path={name}: is a device or a pipe; choose a file or a folder")
        below = files_below(path) if path.is_dir() else [Source(path, path.name)]
        if not below:
            raise DataError(f"data.path={name}: has no files, or only hidden ones; add text files")
        for source in below:
            sources.setdefault(source.path.resolve(), source)
    return list(sources.values())


def files_below(root: Path, skipped: frozenset[str] = frozenset()) -> list[Source]:
    """Return the files below a folder, sorted by path, without hidden and `skipped` ones."""
    paths = []
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    # Drop dangling links, sockets and pipes; reading a pipe would block.
    sources = [Source(path, path.relative_to(root).as_posix()) for path in paths if path.is_file()]
    return sorted(sources, key=lambda source: source.name)


@contextlib.contextmanager
def _opened_text(path: Path) -> Iterator[io.TextIOWrapper]:
    with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8") as text:
        yield text


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        _raise_unreadable(error, path)


def _raise_unreadable(error: OSError, path: Path | None = None) -> NoReturn:
    raise DataError(
        f"{path or error.filename}: cannot be read ({error.strerror or error}); make it readable or leave it out"
    ) from error
