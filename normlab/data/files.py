"""The text of files: their order and formats, one hash of their content, and their documents.

A text file is one document. A file of another format has one document per row.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

from normlab.config.corpora import DataConfig, FilesData
from normlab.data.documents import TextCounts
from normlab.errors import DataError, did_you_mean

SUFFIXES = {
    "json": ".json .jsonl .ndjson .jl",
    "parquet": ".parquet",
    "text": (
        ".txt .text .md .markdown .rst .tex .org .adoc .srt .log .xml .css .yaml .yml .toml .ini .cfg .sql "
        ".py .pyi .c .h .cc .cpp .hpp .cu .cs .java .js .jsx .ts .tsx .go .rs .rb .php .pl .lua .sh .swift .kt .scala "
        ".hs .ml .lisp .el .clj .erl .ex .r .f90 .m"
    ),
}
"""Suffixes of the formats: prose, markup and source code are text, as is a file without a suffix. Any other suffix may
be a page, a table, a backup or an archive, whose syntax would become text."""

FORMAT_OF = {suffix: format for format, suffixes in SUFFIXES.items() for suffix in suffixes.split()} | {"": "text"}

EXCLUDED_FOLDERS = frozenset(
    ("test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "_bundled", "lib-dynload")
)
"""Folders below the standard library with tests or installed packages."""

BUILD_SPECIFIC = ("config-", "_sysconfigdata")
"""Prefixes of the names of files that differ between builds of one Python version."""

OUTPUTS = {"runs": ("run.json", "lock"), "sweeps": ("plan.json", "lock"), "studies": ("report.json",)}
"""Files by which a folder of a run, a sweep or a study is recognised, by the name of its parent."""

BATCH_SIZE = 16
"""Rows of a Parquet file in memory at once."""


@dataclass(frozen=True, slots=True)
class Source:
    path: Path
    name: str
    """Path relative to the folder in `data.path`, with `/`; the hash of the corpus depends on the names in order."""

    format: str = "text"
    """A key of `SUFFIXES`; JSON is lines, or one list."""


def find_sources(config: DataConfig) -> list[Source]:
    """Return the files of a corpus, in order.

    `stdlib`: every `*.py` of the standard library in UTF-8, sorted by path, without tests, installed packages and files
    that differ between builds of one Python version. `files`: the files of `path` in the order of the list; the files
    in a folder and its subfolders are sorted by path, without hidden ones and the results of normlab. A file that is
    listed twice is used once.

    Raises:
        DataError: A path does not exist, a folder has no file, or a file has no known format.
    """
    if not isinstance(config, FilesData):
        return _stdlib()
    sources = [_with_format(source) for source in _listed(config.path)]
    if config.column != "text" and all(source.format == "text" for source in sources):
        raise DataError(
            f"data.column={config.column}: has no effect, since data.path has only text files; leave it out, or add "
            "JSON or Parquet"
        )
    return sources


def files_below(root: Path, skipped: frozenset[str] = frozenset()) -> list[Source]:
    """Return the files below a folder, sorted by path, without hidden and `skipped` ones and the results of normlab."""
    paths: list[Path] = []
    for name, folders, files in os.walk(root, onerror=_raise_unreadable):
        folder = Path(name)
        folders[:] = [
            each for each in folders if each[0] != "." and each not in skipped and not _is_output(folder / each)
        ]
        paths += [folder / each for each in files if each[0] != "."]
    # Drop dangling links, sockets and pipes; reading a pipe would block.
    sources = [Source(path, path.relative_to(root).as_posix()) for path in paths if path.is_file()]
    return sorted(sources, key=lambda source: source.name)


def source_sha256(sources: Iterable[Source]) -> str:
    """Return the SHA-256, in hex, of the names and bytes of files, in order.

    Raises:
        DataError: A file cannot be read.
    """
    total = hashlib.sha256()
    for source in sources:
        try:
            with source.path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            _raise_unreadable(error)
        # Both hashes have a fixed length, so two different lists of files cannot give the same bytes.
        total.update(hashlib.sha256(os.fsencode(source.name)).digest() + content)
    return total.hexdigest()


class FilesText:
    """The documents of files and folders, or of the standard library.

    Raises:
        DataError: A file has no known format, or cannot be read.
    """

    provenance = None
    """The source in the record of a run; None, because files have no dataset or commit."""

    def __init__(self, config: DataConfig) -> None:
        self._column = config.column if isinstance(config, FilesData) else "text"
        self._sources = find_sources(config)
        self.key: dict[str, Any] = {
            "source_sha256": source_sha256(self._sources),
            "column": self._column,
        }
        """All inputs that determine the text, as plain JSON values."""
        self.counts = TextCounts(dict(sorted(Counter(source.format for source in self._sources).items())))

    def connect(self) -> None:
        """Do nothing, because files need no network."""

    def documents(self, scratch: Path) -> Generator[str]:
        """Yield the documents of the files in order; `scratch` is unused.

        Raises:
            DataError: A file is not UTF-8, is not in its format, lacks the column, or has a row that is not text.
        """
        for source in self._sources:
            try:
                with closing(_rows_of(source, self._column)) as rows:  # closes the file also after an error
                    yield from self.counts.documents_of(rows, self._column)
            except DataError as error:
                raise DataError(f"{source.path}: {error}") from error
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{source.path}: not UTF-8 ({error}); convert the file (iconv -t utf-8), unpack it if it is "
                    "compressed, or leave it out"
                ) from error
            except Exception as error:  # the errors of `pyarrow` have no common class
                reason = str(error).partition("\n")[0] or type(error).__name__
                raise DataError(
                    f"{source.path}: cannot be read as {source.format} ({reason}); fix it or leave it out"
                ) from error


def _stdlib() -> list[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    sources = [
        source
        for source in files_below(root, EXCLUDED_FOLDERS)
        if source.path.suffix == ".py" and not source.name.startswith(BUILD_SPECIFIC) and _is_utf8(source.path)
    ]
    if not sources:
        raise DataError(f"{root}: has no source files of Python's standard library; use data=files data.path=...")
    return sources


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def _listed(paths: Iterable[str]) -> list[Source]:
    sources: dict[Path, Source] = {}
    for name in paths:
        path = Path(name).expanduser()
        if not os.path.isdir(path) and not os.path.isfile(path):  # Path.is_dir raises for a name that is too long
            raise DataError(f"data.path={name}: no such file or folder; check the path")
        below = files_below(path) if path.is_dir() else [Source(path, path.name)]
        if not below:
            raise DataError(f"data.path={name}: has no files, or only hidden ones and results; add text files")
        for source in below:
            sources.setdefault(source.path.resolve(), source)
    return list(sources.values())


def _with_format(source: Source) -> Source:
    """Return a source with the format of its suffix."""
    suffix = "~" if source.name.endswith("~") else source.path.suffix.lower()
    if suffix not in FORMAT_OF:
        raise DataError(
            f"{source.path}: {suffix} is the suffix of no known format; leave it out, unpack it, or rename it (.txt, "
            ".jsonl or .parquet)"
        )
    return replace(source, format=FORMAT_OF[suffix])


def _is_output(folder: Path) -> bool:
    """Return whether normlab wrote a folder: that of a run, a sweep or a study."""
    parent = os.path.basename(os.path.dirname(os.path.abspath(folder)))
    return any((folder / name).is_file() for name in OUTPUTS.get(parent, ()))


def _rows_of(source: Source, column: str) -> Generator[Any]:
    r"""Yield the column of each row of a file, with None for a row without it.

    Line ends of text files become `\n`, as in Python's text mode. Line ends inside other formats stay.

    Raises:
        DataError: The file has no such column, or a NUL character.
        Exception: The file is not UTF-8, or not in its format.
    """
    if source.format == "parquet":
        yield from _parquet_rows(source.path, column)
        return
    with source.path.open(encoding="utf-8-sig") as file:
        if source.format == "json":
            yield from _json_rows(file, column)
        else:
            text = file.read()
            if "\0" in text:
                raise DataError(
                    "has a NUL character, as binary files and UTF-16 have; convert the file to UTF-8, or leave it out"
                )
            yield text


def _json_rows(file: TextIO, column: str) -> Iterator[Any]:
    """Yield the column of rows of JSON Lines, or of one list; a row may be a string."""
    for number, row in enumerate(_json_values(file)):
        if isinstance(row, dict):
            if number == 0 and row:
                _index_of(column, list(row))
            yield row.get(column)
        else:
            yield row


def _json_values(file: TextIO) -> Iterator[Any]:
    for line in file:
        text = line.strip(" \t\r\n\ufeff")  # files with byte order marks may have been concatenated
        if text.startswith("["):
            yield from json.loads(text + file.read())
        elif text:
            yield json.loads(text)


def _parquet_rows(path: Path, column: str) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        _index_of(column, table.schema_arrow.names)
        for batch in table.iter_batches(BATCH_SIZE, columns=[column]):
            yield from batch.column(0).to_pylist()


def _index_of(column: str, names: Sequence[str]) -> int:
    """Return the index of the only column of that name."""
    if (count := names.count(column)) != 1:
        hint = "" if count else did_you_mean(column, names)
        listed = ", ".join(f"{name:.40}" for name in names[:20]) or "none"
        raise DataError(f"{count or 'no'} column{'s' * (count > 1)} {column!r}{hint}; it has {listed}; set data.column")
    return names.index(column)


def _raise_unreadable(error: OSError) -> NoReturn:
    raise DataError(
        f"{error.filename}: cannot be read ({error.strerror or error}); make it readable or leave it out"
    ) from error
