"""Which files a corpus is made of, and one hash of their content. Cheap: nothing here imports `datasets`."""

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

from normlab.corpora import DataConfig, FilesData, StdlibData
from normlab.errors import DataError, unknown

KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""What a file is read as, by the end of its name; anything else is text."""

NOT_THE_LIBRARY = frozenset(
    ("test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "_bundled", "lib-dynload")
)
"""Folders below the standard library that hold tests, or what was installed into it."""

NOT_THE_SAME_EVERYWHERE = ("config-", "_sysconfigdata")
"""How names start that the build of this one interpreter wrote."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a corpus."""

    path: Path
    """Where it is."""
    name: str
    """Its path below the folder that was asked for, with `/`; part of the corpus's hash, as the order is."""

    @property
    def kind(self) -> str:
        """text, json (lines, or one list) or parquet."""
        return KINDS.get(self.path.suffix.lower(), "text")


def find_sources(config: DataConfig) -> list[Source]:
    """The files that a corpus is made of, in order.

    `stdlib`: every `*.py` of the standard library that is UTF-8, by path, without tests, installed packages
    and what differs between two builds of one Python. `files`: the files and folders of `path` in their
    order, folders all the way down, by path, without hidden files; a file that is named twice is taken once.

    Raises:
        DataError: A path does not exist, or holds no file.
    """
    if isinstance(config, StdlibData):
        return _stdlib()
    if isinstance(config, FilesData):
        sources = _files(config.path)
        if config.column != FilesData().column and all(source.kind == "text" for source in sources):
            raise DataError(
                f"data.column={config.column}: has no effect, text has no columns and data.path names no JSONL or "
                "Parquet; leave it out"
            )
        return sources
    raise DataError(unknown("corpus of files", config.name, ("stdlib", "files")))


def source_sha256(sources: Iterable[Source]) -> str:
    """SHA-256, in hex, over the names and bytes of files, in order.

    Raises:
        DataError: A file cannot be read.
    """
    total = hashlib.sha256()
    for source in sources:
        with _opened(source.path) as file:
            content = hashlib.file_digest(file, "sha256").digest()
        # Both parts have a fixed length, so that no two lists of files run together to the same bytes.
        total.update(hashlib.sha256(os.fsencode(source.name)).digest() + content)
    return total.hexdigest()


def invalid_utf8_at(path: Path) -> int | None:
    """Offset in bytes of the first byte of a file that is not UTF-8, or None where all of it is.

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
    """Refuse a file that is not UTF-8.

    Raises:
        DataError: It is not, or cannot be read.
    """
    if (at := invalid_utf8_at(path)) is not None:
        raise DataError(f"{path}: not UTF-8 at byte {at}; convert it (iconv -t utf-8), unpack it, or leave it out")


def read_text(source: Source) -> str:
    r"""All of a text file, whatever it begins with; its line ends become `\n`.

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
        for source in files_below(root, NOT_THE_LIBRARY)
        if source.path.suffix == ".py"
        and not source.name.startswith(NOT_THE_SAME_EVERYWHERE)
        and invalid_utf8_at(source.path) is None
    ]
    if not sources:
        raise DataError(f"{root}: holds no source of Python's standard library; use data=files data.path=...")
    return sources


def _files(paths: Iterable[str]) -> list[Source]:
    sources: dict[Path, Source] = {}
    for word in paths:
        path = Path(word).expanduser()
        if not os.path.exists(path):  # unlike Path.exists, says no to a name that is too long
            raise DataError(f"data.path={word}: there is no such file or folder; name one that there is")
        if not path.is_dir() and not path.is_file():
            raise DataError(
                f"data.path={word}: is no regular file, reading it might never end; name a file or a folder"
            )
        found = files_below(path) if path.is_dir() else [Source(path, path.name)]
        if not found:
            raise DataError(f"data.path={word}: holds no file that is not hidden; put text there")
        for source in found:
            sources.setdefault(source.path.resolve(), source)
    return list(sources.values())


def files_below(root: Path, skipped: frozenset[str] = frozenset()) -> list[Source]:
    """The files below a folder, by their path, without hidden ones and without what lies in `skipped`."""
    found = []
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    # A dangling link, a socket or a pipe is no file; reading a pipe would wait for ever.
    sources = [Source(path, path.relative_to(root).as_posix()) for path in found if path.is_file()]
    return sorted(sources, key=lambda source: source.name)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); make it readable or leave it out") from error


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror}); make it readable or leave it out")
