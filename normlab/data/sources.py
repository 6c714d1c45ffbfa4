"""The files of a corpus, and one hash of their content. Does not import `datasets`."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from normlab.config.corpora import DataConfig, FilesData, StdlibData
from normlab.errors import DataError, unknown

KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""Format of a file by its suffix; any other file is text."""

EXCLUDED_FOLDERS = frozenset(
    ("test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "_bundled", "lib-dynload")
)
"""Folders below the standard library with tests or installed packages."""

BUILD_SPECIFIC = ("config-", "_sysconfigdata")
"""Prefixes of the names that the build of an interpreter writes."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a corpus."""

    path: Path
    name: str
    """Path below the folder in `data.path`, with `/`; the hash of the corpus depends on names and their order."""

    @property
    def kind(self) -> str:
        """The format: text, json (lines, or one list) or parquet."""
        return KINDS.get(self.path.suffix.lower(), "text")


def find_sources(config: DataConfig) -> list[Source]:
    """Return the files of a corpus, in order.

    `stdlib`: every `*.py` of the standard library in UTF-8, sorted by path, without tests, installed packages and files
    that differ between builds of one Python version. `files`: the files of `path` in its order; those of a folder are
    sorted by path, with subfolders and without hidden files. A file that is named twice is used once.

    Raises:
        DataError: A path does not exist, or has no file.
    """
    if isinstance(config, StdlibData):
        return _stdlib()
    if isinstance(config, FilesData):
        sources = _files(config.path)
        if config.column != FilesData().column and all(source.kind == "text" for source in sources):
            raise DataError(
                f"data.column={config.column}: has no effect, text has no columns and data.path has no JSONL or "
                "Parquet; leave it out"
            )
        return sources
    raise DataError(unknown("corpus of files", config.name, ("stdlib", "files")))


def source_sha256(sources: Iterable[Source]) -> str:
    """Return the SHA-256, in hex, of the names and bytes of files, in order.

    Raises:
        DataError: A file cannot be read.
    """
    total = hashlib.sha256()
    for source in sources:
        with _opened(source.path) as file:
            content = hashlib.file_digest(file, "sha256").digest()
        # Both parts have a fixed length, so that two lists of files cannot give the same bytes.
        total.update(hashlib.sha256(os.fsencode(source.name)).digest() + content)
    return total.hexdigest()


def invalid_utf8_at(path: Path) -> int | None:
    """Return the offset of the first byte of a file that is not UTF-8, or None if the file is UTF-8.

    Raises:
        DataError: The file cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    start = 0
    with _opened(path) as file:
        while True:
            pending = len(decoder.getstate()[0])
            chunk = file.read(1 << 20)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                return start - pending + error.start
            if not chunk:
                return None
            start += len(chunk)


def check_utf8(path: Path) -> None:
    """Raise if a file is not UTF-8.

    Raises:
        DataError: The file is not UTF-8, or cannot be read.
    """
    if (offset := invalid_utf8_at(path)) is not None:
        raise DataError(f"{path}: not UTF-8 at byte {offset}; convert it (iconv -t utf-8), unpack it, or leave it out")


def read_text(source: Source) -> str:
    r"""Return the content of a text file, with line ends converted to `\n`.

    Raises:
        DataError: The file cannot be read, or is not UTF-8.
    """
    try:
        with _opened(source.path) as file, io.TextIOWrapper(file, encoding="utf-8") as text:
            return text.read()
    except UnicodeDecodeError:
        check_utf8(source.path)
        raise


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
        raise DataError(f"{root}: has no source of Python's standard library; use data=files data.path=...")
    return sources


def _files(paths: Iterable[str]) -> list[Source]:
    sources: dict[Path, Source] = {}
    for name in paths:
        path = Path(name).expanduser()
        if not os.path.exists(path):  # Path.exists raises for a name that is too long
            raise DataError(f"data.path={name}: there is no such file or folder; check the path")
        if not path.is_dir() and not path.is_file():
            raise DataError(
                f"data.path={name}: is not a regular file, and reading it might never end; choose a file or a folder"
            )
        below = files_below(path) if path.is_dir() else [Source(path, path.name)]
        if not below:
            raise DataError(f"data.path={name}: has no file that is not hidden; put text there")
        for source in below:
            sources.setdefault(source.path.resolve(), source)
    return list(sources.values())


def files_below(root: Path, skipped: frozenset[str] = frozenset()) -> list[Source]:
    """Return the files below a folder, sorted by path, without hidden files and the folders in `skipped`."""
    paths = []
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    # This drops dangling links, sockets and pipes; reading a pipe would block.
    sources = [Source(path, path.relative_to(root).as_posix()) for path in paths if path.is_file()]
    return sorted(sources, key=lambda source: source.name)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        _raise_unreadable(error, path)


def _raise_unreadable(error: OSError, path: Path | None = None) -> NoReturn:
    raise DataError(
        f"{path or error.filename}: cannot be read ({error.strerror}); make it readable or leave it out"
    ) from error
