"""The text of files and of what comes with Python: documents in order, and one hash of their content.

A file is one document, and so is a topic of Python's language reference.
"""

import hashlib
import importlib
import os
import sysconfig
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from normlab.base.errors import DataError
from normlab.base.parsing import check_link, open_to_read
from normlab.catalogue.corpora import TABLE_SUFFIXES, TEXT_SUFFIXES, DataConfig, FilesData
from normlab.data.documents import SourceRow, TextCounts

EXCLUDED_FOLDERS = frozenset(
    ("test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "_bundled", "lib-dynload")
)
"""Folders below the standard library with tests or installed packages."""

BUILD_SPECIFIC = ("config-", "_sysconfigdata")
"""Prefixes of the names of files that differ between builds of one Python version."""

OUTPUTS = {"runs": ("run.json", "lock"), "sweeps": ("plan.json", "lock"), "studies": ("report.json",)}
"""Files by which a folder of a run, a sweep or a study is recognised, by the name of its parent."""


REFERENCE_MODULE = "pydoc_data.topics"
"""The module with the text of Python's language reference: the topics of `help()`."""


@dataclass(frozen=True, slots=True)
class Source:
    path: Path
    name: str
    """Path relative to the folder in `data.path`, with `/`; the hash of the corpus depends on the names in order."""


def find_sources(config: DataConfig) -> list[Source]:
    """Return the files of a corpus, in order.

    `stdlib`: every `*.py` of the standard library in UTF-8, sorted by path, without tests, installed packages and files
    that differ between builds of one Python version. `files`: the files of `path` in the order of the list; the files
    in a folder and its subfolders are sorted by path, without hidden ones and the results of normlab. A file that is
    listed twice is used once.

    Raises:
        DataError: A path does not exist, a folder has no file, or the suffix of a file is none of text.
    """
    if not isinstance(config, FilesData):
        return _stdlib()
    sources = _listed(config.path)
    for source in sources:
        _check_suffix(source)
    return sources


def files_below(root: Path, skipped: frozenset[str] = frozenset()) -> list[Source]:
    """Return the files below a folder, sorted by path, without hidden and `skipped` ones and the results of normlab."""
    paths: list[Path] = []
    for name, folders, files in os.walk(root, onerror=_raise_unreadable):
        folder = Path(name)
        # `os.walk` enters the folders that are left in its list.
        entered: list[str] = []
        for folder_name in folders:
            is_hidden = folder_name.startswith(".")
            if not is_hidden and folder_name not in skipped and not _is_output(folder / folder_name):
                entered.append(folder_name)
        folders[:] = entered
        paths += [folder / file_name for file_name in files if not file_name.startswith(".")]
    # Drop dangling links, sockets and pipes; reading a pipe would block.
    sources = [Source(path, path.relative_to(root).as_posix()) for path in paths if path.is_file()]
    return sorted(sources, key=lambda source: source.name)


def files_of_folder(root: Path) -> list[Source]:
    """Return the files below a folder of the user, which may be a stranger's; as `files_below`.

    Raises:
        DataError: One is a link that leads out of the folder, or there is such a link to a folder, whose files are not
            covered by the hash.
    """
    sources = files_below(root)
    linked_folders: list[Path] = []
    for top, names, _ in os.walk(root):
        for name in names:
            path = Path(top, name)
            if not name.startswith(".") and os.path.islink(path):  # Path.is_symlink raises in a folder without access
                linked_folders.append(path)
    for path in [*(source.path for source in sources), *linked_folders]:
        try:
            check_link(path, root)
        except ValueError as error:
            raise DataError(f"{path}: {error}, or leave it out") from error
    return sources


def source_sha256(sources: Iterable[Source]) -> str:
    """Return the SHA-256, in hex, of the names and bytes of files, in order.

    Raises:
        DataError: A file cannot be read.
    """
    total = hashlib.sha256()
    for source in sources:
        try:
            content = _sha256(source.path)
        except (OSError, ValueError) as error:
            raise _unreadable(error, source.path) from error
        # Both hashes have a fixed length, so two different lists of files cannot give the same bytes.
        total.update(hashlib.sha256(os.fsencode(source.name)).digest() + content)
    return total.hexdigest()


def _sha256(path: Path) -> bytes:
    if _is_empty(path):
        return hashlib.sha256().digest()
    with open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").digest()


def _is_empty(path: Path) -> bool:
    """Return whether a file has a size of 0.

    Files of the kernel do too, but have bytes: some without an end (/proc/self/pagemap), some not yet (/proc/kmsg).
    """
    return path.stat().st_size == 0


class FilesText:
    """The documents of files and folders, or of the standard library.

    Raises:
        DataError: The suffix of a file is none of text, or a file cannot be read.
    """

    def __init__(self, config: DataConfig) -> None:
        self._sources = find_sources(config)
        self.key: dict[str, Any] = {"source_sha256": source_sha256(self._sources)}
        """All inputs that determine the text, as plain JSON values."""
        self.counts = TextCounts()

    def documents(self, scratch: Path) -> Generator[str]:
        """Yield the documents of the files in order; `scratch` is unused.

        Raises:
            DataError: A file is not UTF-8, has a NUL character, or cannot be read.
        """
        for source in self._sources:
            try:
                yield from self.counts.documents_of([SourceRow(str(source.path), _text_of(source.path))])
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{source.path}: not UTF-8 ({error}); convert the file (iconv -t utf-8), unpack it if it is "
                    "compressed, or leave it out"
                ) from error
            except OSError as error:
                raise _unreadable(error, source.path) from error


class ReferenceText:
    """The documents of the language reference, sorted by the name of the topic; they depend on Python's version.

    Raises:
        DataError: This Python has no language reference.
    """

    def __init__(self) -> None:
        try:
            self._topics: dict[str, str] = importlib.import_module(REFERENCE_MODULE).topics
        except ImportError as error:
            raise DataError(
                f"data=reference: this Python lacks the module {REFERENCE_MODULE}; install the full standard library, "
                "or use data=stdlib"
            ) from error
        self.key: dict[str, Any] = {"source_sha256": self._sha256()}
        """All inputs that determine the text, as plain JSON values."""
        self.counts = TextCounts()

    def documents(self, scratch: Path) -> Generator[str]:
        """Yield the text of each topic in order; `scratch` is unused."""
        yield from self.counts.documents_of(SourceRow(name, self._topics[name]) for name in sorted(self._topics))

    def _sha256(self) -> str:
        total = hashlib.sha256()
        for name in sorted(self._topics):
            for text in (name, self._topics[name]):
                total.update(hashlib.sha256(text.encode()).digest())
        return total.hexdigest()


def _stdlib() -> list[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    sources: list[Source] = []
    for source in files_below(root, EXCLUDED_FOLDERS):
        is_module = source.path.suffix == ".py" and not source.name.startswith(BUILD_SPECIFIC)
        if is_module and _is_utf8(source.path):
            sources.append(source)
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
            if os.path.lexists(path):
                raise DataError(
                    f"data.path={name}: is a device, a pipe, a socket or a broken link; choose a file or a folder"
                )
            raise DataError(f"data.path={name}: no such file or folder; check the path")
        below = [Source(path, path.name)]
        if path.is_dir():
            below = files_of_folder(path)
        if not below:
            raise DataError(
                f"data.path={name}: has no files, or only hidden files and folders of results; add text files"
            )
        # By the file that a link leads to: a text that is listed twice would count twice.
        for source in below:
            sources.setdefault(source.path.resolve(), source)
    return list(sources.values())


def _check_suffix(source: Source) -> None:
    suffix = source.path.suffix.lower()
    if source.name.endswith("~"):  # the copy that an editor keeps of a text
        suffix = "~"
    if suffix in TABLE_SUFFIXES:
        raise DataError(
            f"{source.path}: {suffix} is a format of tables, not of text; write its text into a .txt file, or, to "
            "train on it, put such files into a folder and set data=hub data.name=FOLDER"
        )
    if suffix not in TEXT_SUFFIXES:
        raise DataError(
            f"{source.path}: {suffix} is the suffix of no known format; leave it out, unpack it, or rename it (.txt)"
        )


def _is_output(folder: Path) -> bool:
    """Return whether normlab wrote a folder: that of a run, a sweep or a study."""
    parent = os.path.basename(os.path.dirname(os.path.abspath(folder)))
    return any((folder / name).is_file() for name in OUTPUTS.get(parent, ()))


def _text_of(path: Path) -> str:
    r"""Return the text of a file; line ends become `\n`, as in Python's text mode."""
    if _is_empty(path):
        return ""
    text = path.read_text(encoding="utf-8")
    if "\0" in text:
        raise DataError(
            f"{path}: has a NUL character, as binary files and UTF-16 have; convert the file to UTF-8, or leave it out"
        )
    return text


def _raise_unreadable(error: OSError) -> NoReturn:
    """Raise the error of `os.walk` about a folder."""
    raise _unreadable(error, Path(error.filename)) from error


def _unreadable(error: OSError | ValueError, path: Path) -> DataError:
    # The system names the file only if it cannot be opened, and not if reading it fails.
    reason: object = error
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    return DataError(f"{path}: cannot be read ({reason}); make it readable or leave it out")
