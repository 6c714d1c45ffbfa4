"""The files of a corpus: their order, their formats, one hash of their content, and their documents."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from normlab.config.corpora import DataConfig, FilesData
from normlab.data.documents import SourceCounts
from normlab.data.file_rows import invalid_utf8_at, opened, raise_unreadable, rows_of
from normlab.errors import DataError, one_line
from normlab.paths import is_output_file, is_output_folder

SUFFIXES = {
    "json": ".json .jsonl .ndjson .jl",
    "csv": ".csv",
    "tsv": ".tsv .tab",
    "parquet": ".parquet",
    "text": (
        ".txt .text .md .markdown .rst .tex .org .adoc .srt .log .xml .css .yaml .yml .toml .ini .cfg .sql "
        ".py .pyi .c .h .cc .cpp .hpp .cu .cs .java .js .jsx .ts .tsx .go .rs .rb .php .pl .lua .sh .swift .kt .scala "
        ".hs .ml .lisp .el .clj .erl .ex .r .f90 .m"
    ),
}
"""Suffixes of the formats: prose, markup and source code are text, as is a file without a suffix. Any other suffix may
be a page, a table, a backup or an archive, whose syntax would become text; it needs `data.format`."""

EXCLUDED_FOLDERS = frozenset(
    ("test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "_bundled", "lib-dynload")
)
"""Folders below the standard library with tests or installed packages."""

BUILD_SPECIFIC = ("config-", "_sysconfigdata")
"""Prefixes of the names of files that differ between builds of one Python version."""

FORMAT_OF = {suffix: format for format, suffixes in SUFFIXES.items() for suffix in suffixes.split()} | {"": "text"}


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a corpus."""

    path: Path
    name: str
    """Path relative to the folder in `data.path`, with `/`; the hash of the corpus depends on the names in order."""

    format: str = "text"
    """A key of `SUFFIXES`; JSON is lines, or one list."""


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
    sources = [_with_format(source, config) for source in _files(config.path)]
    for option, value, default in (("column", config.column, "text"), ("skip", config.skip, "empty")):
        if value != default and all(source.format == "text" for source in sources):
            raise DataError(
                f"data.{option}={value}: has no effect, since data.path has only text files; leave it out, or add "
                "JSON, CSV or Parquet"
            )
    return sources


def _with_format(source: Source, config: FilesData) -> Source:
    """Return a source with the format of `data.format`, or of its suffix."""
    if config.format != "auto":
        return replace(source, format=config.format)
    suffix = "~" if source.name.endswith("~") else source.path.suffix.lower()
    if suffix not in FORMAT_OF:
        raise DataError(
            f"{source.path}: {suffix} is the suffix of no known format; leave it out, unpack it, rename it (.txt, "
            ".jsonl, .csv, .tsv or .parquet), or set data.format=text (json, csv, tsv or parquet) for all files"
        )
    if not suffix and _begins_with_json(source.path):
        raise DataError(
            f"{source.path}: has no suffix and begins with a JSON object; set data.format=json (or text) for all "
            "files, or rename it (.jsonl or .txt)"
        )
    return replace(source, format=FORMAT_OF[suffix])


_START = 2**20
"""Bytes of a file in which its first line is looked for."""


def _begins_with_json(path: Path) -> bool:
    """Return whether the first line of a file that is not blank is a JSON object, as in JSON Lines."""
    with opened(path) as file:
        start = file.read(_START).lstrip(b" \t\r\n\xef\xbb\xbf")
    line, newline, _ = start.partition(b"\n")
    try:
        # A longer line cannot be prose in braces.
        return start.startswith(b"{") and (
            (not newline and len(start) > _START // 2) or isinstance(json.loads(line), dict)
        )
    except (ValueError, RecursionError):
        return False


def source_sha256(sources: Iterable[Source]) -> str:
    """Return the SHA-256, in hex, of the names and bytes of files, in order.

    Raises:
        DataError: A file cannot be read.
    """
    total = hashlib.sha256()
    for source in sources:
        with opened(source.path) as file:
            content = hashlib.file_digest(file, "sha256").digest()
        # Both hashes have a fixed length, so two different lists of files cannot give the same bytes.
        total.update(hashlib.sha256(os.fsencode(source.name)).digest() + content)
    return total.hexdigest()


class FilesText:
    """The documents of files and folders, or of the standard library.

    Args:
        config: The source of the text.

    Raises:
        DataError: A file has no known format, or cannot be read.
    """

    provenance = None
    """The source in the record of a run; None, because files have no dataset or commit."""

    def __init__(self, config: DataConfig) -> None:
        files = config if isinstance(config, FilesData) else FilesData(path=[])
        self._column, self._skip = files.column, files.skip
        self._sources = find_sources(config)
        self.key: dict[str, Any] = {
            "source_sha256": source_sha256(self._sources),
            "column": files.column,
            "format": files.format,
            "skip": files.skip,
        }
        """All inputs that determine the text, as plain JSON values."""
        folders = (folder for path in files.path if (folder := Path(path).expanduser()).is_dir())
        self.left_out = [line for folder in folders for line in outputs_below(folder)]
        """The output of normlab, which is not read."""
        self.counts = [
            SourceCounts(one_line(each.name), each.format, each.path.stat().st_size) for each in self._sources
        ]
        """What was read of each file."""

    def connect(self) -> None:
        """Do nothing, because files need no network."""

    def documents(self, scratch: Path) -> Generator[str]:
        """Yield the documents of the files in order; `scratch` is unused.

        Raises:
            DataError: A file is not UTF-8, is not in its format, lacks the column, or has a row without text.
        """
        for source, counts in zip(self._sources, self.counts, strict=True):
            path = source.path
            try:
                with closing(rows_of(path, counts, self._column)) as rows:  # closes the file also after an error
                    yield from counts.documents_of(counts.texts(rows, self._column, self._skip, str(path)))
            except DataError:
                raise
            except Exception as error:  # the errors of `pyarrow` have no common class
                if isinstance(error, UnicodeDecodeError) and source.format != "parquet":
                    raise DataError(
                        f"{path}: not UTF-8 at byte {invalid_utf8_at(path)}; convert the file (iconv -t utf-8), unpack "
                        "it if it is compressed, or leave it out"
                    ) from error
                reason = str(error).partition("\n")[0] or type(error).__name__
                raise DataError(
                    f"{path}: cannot be read as {source.format} ({reason}); fix it, leave it out or set data.format"
                ) from error


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
            raise DataError(f"data.path={name}: has no files, or only hidden ones and results; add text files")
        for source in below:
            sources.setdefault(source.path.resolve(), source)
    return list(sources.values())


def files_below(root: Path, skipped: frozenset[str] = frozenset()) -> list[Source]:
    """Return the files below a folder, sorted by path, without hidden and `skipped` ones and the output of normlab."""
    paths = [path for _, files, _ in _walk(root, skipped) for path in files]
    # Drop dangling links, sockets and pipes; reading a pipe would block.
    sources = [Source(path, path.relative_to(root).as_posix()) for path in paths if path.is_file()]
    return sorted(sources, key=lambda source: source.name)


def outputs_below(root: Path) -> list[str]:
    """Return a line per folder with output of normlab, which is not read: its first output and the number of others."""
    lines = []
    for folder, _, outputs in sorted(_walk(root)):
        if outputs:
            more = f" and {len(outputs) - 1} more in {folder}" if len(outputs) > 1 else ""
            lines.append(one_line(f"{min(outputs)}{more}"))
    return lines


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[tuple[Path, list[Path], list[Path]]]:
    """Yield each folder that is read, its files, and the output of normlab in it."""
    for name, folders, files in os.walk(root, onerror=raise_unreadable):
        folder, absolute = Path(name), Path(os.path.abspath(name))
        visible = [each for each in folders if not each.startswith(".") and each not in skipped]
        outputs = {each for each in visible if is_output_folder(absolute / each)}
        outputs |= {each for each in files if not each.startswith(".") and is_output_file(folder / each)}
        folders[:] = [each for each in visible if each not in outputs]
        read = [folder / each for each in files if not each.startswith(".") and each not in outputs]
        yield folder, read, [folder / each for each in outputs]
