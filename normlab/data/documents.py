"""Read the documents of a corpus from its files: JSON and Parquet with Hugging Face `datasets`, text directly.

`datasets` detects archives by their first bytes and would unpack a text that begins like one. Its files go to a new
scratch folder for each corpus, so a changed file is never read from an older copy. From there a few documents at a time
are in memory. `datasets` is imported inside functions: the import takes seconds, and neither text nor a cached corpus
needs it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from normlab.data.sources import Source, check_utf8, read_text
from normlab.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

BLANK_BEFORE_NULL = re.compile(rb"(?<!\s)\s+(?:\xef\xbb\xbf\s*)?(?=null)")
"""All white space before a null; a concatenation of files may contain byte order marks."""
NULL_AT_START = re.compile(rb"(\s*(?:\xef\xbb\xbf)?\s*)null")

_NEWLINES_TO_TABS = bytes.maketrans(b"\r\n", b"\t\t")

BATCH_SIZE = 16
"""Documents in memory at once."""


def first_characters(documents: Iterable[str], characters: int) -> Iterator[str]:
    """Yield documents up to a total number of characters; the last document is cut."""
    for text in documents:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


class Spool:
    """Documents in a file on disk, written once from an iterator and then read any number of times.

    Empty documents are dropped.

    Args:
        path: A new file, which must exist as long as the documents are read.
        documents: The documents; the iterator is consumed.
    """

    def __init__(self, path: Path, documents: Iterable[str]) -> None:
        self._path = path
        content_hash = hashlib.sha256()
        with path.open("wb") as file:
            for text in documents:
                if content := text.encode():
                    record = len(content).to_bytes(8, "little") + content
                    content_hash.update(record)
                    file.write(record)
        self.sha256 = content_hash.hexdigest()
        """Hash, in hex, of all documents and their lengths."""

    def __iter__(self) -> Iterator[str]:
        with self._path.open("rb") as file:
            while length := file.read(8):
                yield file.read(int.from_bytes(length, "little")).decode()


@dataclass(frozen=True, slots=True)
class Rows:
    """The texts of one JSON or Parquet file, without empty ones."""

    source: Source
    rows: Dataset
    column: str

    def __iter__(self) -> Iterator[str]:
        for number, text in enumerate(self._values(), start=1):
            if not isinstance(text, str):
                raise DataError(
                    f"{self.source.path}: row {number} of column {self.column!r} is {text!r:.40}, not text; "
                    "remove such rows, or set data.column to another column"
                )
            if text:
                yield text

    def _values(self) -> Iterator[Any]:
        try:
            for batch in self.rows.select_columns([self.column]).iter(batch_size=BATCH_SIZE):
                yield from batch[self.column]  # pyright: ignore[reportArgumentType, reportCallIssue]
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.source.path}: column {self.column!r} is not UTF-8 ({error.reason}); convert it"
            ) from error


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents in order, without empty ones; can be iterated several times.

    Raises:
        DataError: While iterating, if a row is not text; the message names the file, the row and the value.
    """

    parts: list[Spool | Rows]
    max_characters: int | None = None

    def __iter__(self) -> Iterator[str]:
        documents = itertools.chain.from_iterable(self.parts)
        return documents if self.max_characters is None else first_characters(documents, self.max_characters)


def read_documents(sources: Sequence[Source], column: str, scratch: Path, characters: int | None = None) -> Documents:
    r"""Return the documents of files: one for a text file, one per row of a JSON or Parquet file.

    Line ends of text files become `\n`, as in Python's text mode. Line ends inside JSON strings and Parquet stay.

    Args:
        sources: The files.
        column: The column of JSON and Parquet files that holds the text.
        scratch: A folder, empty or new, which must exist as long as the documents are read.
        characters: Most characters to return; None for all.

    Raises:
        DataError: A file is not UTF-8, cannot be read as its suffix says, or lacks the column.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    parts: list[Spool | Rows] = []
    for is_text, group in itertools.groupby(sources, key=lambda source: source.kind == "text"):
        if is_text:
            parts.append(Spool(scratch / f"text-{len(parts)}", map(read_text, group)))
        else:
            parts += _read_tables(list(group), column, scratch)
    return Documents(parts, characters)


def _read_tables(sources: list[Source], column: str, scratch: Path) -> Iterator[Rows]:
    # The files are loaded one by one, because their columns may differ.
    with tempfile.TemporaryDirectory(prefix="normlab-") as folder, quiet(offline=True), nulls_accepted():
        for number, source in enumerate(sources):
            # A link gives the file a plain name. `datasets` reads brackets and stars in a name as patterns, `::` and
            # `://` as addresses, `$HOME` as a variable, and unpacks a file named .gz.
            link = Path(folder, f"{number:07d}.{source.kind}")
            link.symlink_to(source.path.absolute())
            rows = _load(source, str(link), column, scratch)
            if rows is not None:
                yield Rows(source, rows, column)


def _load(source: Source, link: str, column: str, scratch: Path) -> Dataset | None:
    """Return the rows of a file, or None if it has no rows, which `datasets` reports as an error."""
    import datasets

    try:
        options = _load_options(source, link, column)
        if options is None:
            return None
        rows = datasets.load_dataset(source.kind, data_files=[link], cache_dir=str(scratch), split="train", **options)
    except DataError:
        raise
    except Exception as error:
        cause = error.__cause__ or error  # `datasets` wraps the cause in a generic error
        if isinstance(cause, OSError) and cause.errno not in (None, errno.ENOENT):
            raise cause from error  # the scratch folder cannot be written
        reason = str(cause).partition("\n")[0].replace(link, str(source.path))
        if reason.startswith("Instruction"):  # its error for rows that are all `{}` or null
            reason = "its rows have no columns"
        raise DataError(f"{source.path}: cannot be read as {source.kind} ({reason}); fix it or leave it out") from error
    _check_column(source, column, rows.column_names)
    return rows


def _load_options(source: Source, link: str, column: str) -> dict[str, Any] | None:
    """Return the arguments of `load_dataset` for a file, or None if the file has no rows."""
    import pyarrow.parquet
    from datasets.packaged_modules.json.json import JsonConfig

    if source.kind == "parquet":
        with pyarrow.parquet.ParquetFile(link) as file:
            _check_column(source, column, file.schema_arrow.names)
            # The default batch size is the length of the first row group, which may be 0.
            return {"columns": [column], "batch_size": 1000} if file.metadata.num_rows else None
    check_utf8(source.path)
    if source.path.stat().st_size == 0:
        return None
    with source.path.open("rb") as file:
        if b"\0" in file.read(512):  # `datasets` unpacks a tar file of any name
            raise DataError(f"{source.path}: cannot be read as json (a NUL byte); fix it or leave it out")
    # By default, rows with the columns of some chat formats are converted, by a package that is not installed.
    return {"parse_agent_traces": False} if "parse_agent_traces" in JsonConfig.__dataclass_fields__ else {}


def _check_column(source: Source, column: str, names: list[str]) -> None:
    if column not in names:
        hint = did_you_mean(column, names)
        raise DataError(f"{source.path}: no column {column!r}{hint}; it has {', '.join(names)}; set data.column")


@contextlib.contextmanager
def patched(target: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of a module, and restore them at the end of the block."""
    original = {name: getattr(target, name) for name in attributes}
    for name, value in attributes.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in original.items():
            setattr(target, name, value)


def nulls_accepted() -> AbstractContextManager[None]:
    """Patch `pyarrow.json.read_json` to accept a line of JSONL that is null.

    pyarrow 26.0.1 crashes with a segmentation fault if one of its blocks begins with such a line, and `datasets` reads
    files, folders and streams with it. Blocks begin after line breaks, so this patch replaces every line break before a
    null by a tab: tabs are equal to line breaks between JSON tokens, and equally invalid within strings. A null at the
    start becomes an object without columns. The row is then reported by its number.
    """
    import pyarrow.json

    original = pyarrow.json.read_json

    def read_json(file: BinaryIO, *args: Any, **kwargs: Any) -> Any:
        content = BLANK_BEFORE_NULL.sub(lambda blank: blank[0].translate(_NEWLINES_TO_TABS), file.read())
        if first := NULL_AT_START.match(content):
            content = first[1] + b"{}" + content[first.end() :]
        return original(io.BytesIO(content), *args, **kwargs)

    return patched(pyarrow.json, read_json=read_json)


@contextlib.contextmanager
def quiet(*, offline: bool) -> Iterator[None]:
    """Disable progress bars and logs of the Hugging Face libraries and, if `offline`, the network.

    Without `offline`, `load_dataset` reports each use to the hub.
    """
    import datasets
    from datasets import config
    from datasets.utils import logging
    from huggingface_hub import utils as hub

    verbosity, hub_verbosity = logging.get_verbosity(), hub.logging.get_verbosity()
    libraries = [library for library in (datasets.utils, hub) if not library.are_progress_bars_disabled()]
    for library in libraries:
        library.disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    hub.logging.set_verbosity(logging.CRITICAL)
    try:
        with patched(config, HF_HUB_OFFLINE=offline):
            yield
    finally:
        hub.logging.set_verbosity(hub_verbosity)
        logging.set_verbosity(verbosity)
        for library in libraries:
            library.enable_progress_bars()
