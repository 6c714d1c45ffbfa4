"""The documents of a corpus, read from its files: rows with Hugging Face `datasets`, text as it stands.

`datasets` goes by a file's first bytes and would unpack a text that begins like an archive.

What is read lies in a scratch folder that is new for every corpus, so a changed file cannot be answered from an
older copy; from there it is read a few documents at a time, however large the corpus.
`datasets` is imported inside functions: it takes seconds, and neither text nor a corpus in the cache needs it.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from normlab.data.sources import Source, check_utf8, read_text
from normlab.errors import DataError, nearest

if TYPE_CHECKING:
    from datasets import Dataset

BEFORE_NULL = re.compile(rb"(?<!\s)\s+(?:\xef\xbb\xbf\s*)?(?=null)")
"""All that is blank before a null; a file may be put together of some that begin with a byte order mark."""
FIRST_NULL = re.compile(rb"(\s*(?:\xef\xbb\xbf)?\s*)null")

_TABS = bytes.maketrans(b"\r\n", b"\t\t")

BATCH = 16
"""Documents in memory at once."""


@dataclass(frozen=True, slots=True)
class First:
    """The first characters of some documents; the last of them is cut."""

    documents: Iterable[str]
    characters: int

    def __iter__(self) -> Iterator[str]:
        left = self.characters
        for text in self.documents:
            yield text[:left]
            left -= len(text)
            if left <= 0:
                return


class Spool:
    """Documents that can be had only once, such as a stream's, put on the disk to be gone through again.

    Empty ones are left out.

    Args:
        path: A new file of ours; the documents need it as long as they live.
        documents: Gone through to their end.
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
        """Of every document and its length, in hex."""

    def __iter__(self) -> Iterator[str]:
        with self._path.open("rb") as file:
            while length := file.read(8):
                yield file.read(int.from_bytes(length, "little")).decode()


class Documents:
    """The documents in order, without the empty ones. Can be gone through more than once.

    Raises:
        DataError: While iterating, where a row is no text: the file, the row and what it holds.
    """

    def __init__(self, parts: list[Spool | Rows]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self._parts)


@dataclass(frozen=True, slots=True)
class Rows:
    """The texts of one JSON or Parquet file, without the empty ones."""

    source: Source
    rows: Dataset
    column: str

    def __iter__(self) -> Iterator[str]:
        for number, text in enumerate(_values(self.source, self.rows, self.column), start=1):
            if not isinstance(text, str):
                raise DataError(
                    f"{self.source.path}: row {number} of column {self.column!r} is {text!r:.40}, not text; "
                    "leave such rows out, or set data.column to another"
                )
            if text:
                yield text


def read_documents(sources: Sequence[Source], column: str, scratch: Path) -> Documents:
    r"""Read files into documents: a text file is one, a JSON or Parquet file has one a row.

    Line ends of text files become `\n`, as Python's text mode does it; those inside JSON strings and Parquet
    stay as they are.

    Args:
        sources: The files.
        column: The column of JSON and Parquet files that holds the text.
        scratch: An empty or new folder of ours; the documents need it as long as they live.

    Raises:
        DataError: A file is not UTF-8, is not what its name says, or lacks the column.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    parts: list[Spool | Rows] = []
    for is_text, group in itertools.groupby(sources, key=lambda source: source.kind == "text"):
        if is_text:
            parts.append(Spool(scratch / f"text-{len(parts)}", map(read_text, group)))
        else:
            parts += _rows(list(group), column, scratch)
    return Documents(parts)


def _rows(sources: list[Source], column: str, scratch: Path) -> Iterator[Rows]:
    # One by one: their columns may differ.
    with tempfile.TemporaryDirectory(prefix="normlab-") as folder, quiet(offline=True), nulls_read():
        for number, source in enumerate(sources):
            rows = _load(source, _link(source, folder, number), column, scratch)
            if rows is not None:
                yield Rows(source, rows, column)


def _values(source: Source, rows: Dataset, column: str) -> Iterator[Any]:
    try:
        for batch in rows.select_columns([column]).iter(batch_size=BATCH):
            yield from batch[column]  # pyright: ignore[reportArgumentType, reportCallIssue]
    except UnicodeDecodeError as error:
        raise DataError(f"{source.path}: column {column!r} is not UTF-8 ({error.reason}); convert it") from error


def _link(source: Source, folder: str, number: int) -> str:
    """A link to a file under a name that `datasets` takes as it stands.

    It reads brackets and stars as patterns, `::` and `://` as addresses, `$HOME` as a variable, and unpacks
    what is called .gz; a user's file may be called any of it.
    """
    link = Path(folder, f"{number:07d}.{source.kind}")
    link.symlink_to(source.path.absolute())
    return str(link)


def _load(source: Source, link: str, column: str, scratch: Path) -> Dataset | None:
    """The rows of a file; None where there are none, which `datasets` takes for an error."""
    import datasets

    try:
        options = _options(source, link, column)
        if options is None:
            return None
        rows = datasets.load_dataset(source.kind, data_files=[link], cache_dir=str(scratch), split="train", **options)
    except DataError:
        raise
    except Exception as error:
        cause = error.__cause__ or error  # `datasets` wraps what went wrong in a sentence that says nothing
        if isinstance(cause, OSError) and cause.errno not in (None, errno.ENOENT):
            raise cause from error  # the scratch folder's trouble, not the file's
        reason = str(cause).partition("\n")[0].replace(link, str(source.path))
        if reason.startswith("Instruction"):  # what it says of rows that are all `{}` or null
            reason = "its rows have no columns"
        raise DataError(
            f"{source.path}: cannot be read as {source.kind} ({reason}); mend it or leave it out"
        ) from error
    _check_column(source, column, rows.column_names)
    return rows


def _options(source: Source, link: str, column: str) -> dict[str, Any] | None:
    """What `datasets` must be told to read a file as it stands; None where it has no rows."""
    import pyarrow.parquet
    from datasets.packaged_modules.json.json import JsonConfig

    if source.kind == "parquet":
        with pyarrow.parquet.ParquetFile(link) as file:
            _check_column(source, column, file.schema_arrow.names)
            # Unless told, it reads as many rows at once as the first row group has, which may be none.
            return {"columns": [column], "batch_size": 1000} if file.metadata.num_rows else None
    check_utf8(source.path)
    if source.path.stat().st_size == 0:
        return None
    with source.path.open("rb") as file:
        if b"\0" in file.read(512):  # `datasets` would unpack a tar file, whatever its name says
            raise DataError(f"{source.path}: cannot be read as json (a NUL byte); mend it or leave it out")
    # Rows with the columns of some chat formats would else be turned into others, by a package we lack.
    return {"parse_agent_traces": False} if "parse_agent_traces" in JsonConfig.__dataclass_fields__ else {}


def _check_column(source: Source, column: str, names: list[str]) -> None:
    if column not in names:
        raise DataError(
            f"{source.path}: no column {column!r}{nearest(column, names)}; it has {', '.join(names)}; set data.column"
        )


@contextlib.contextmanager
def nulls_read() -> Iterator[None]:
    """Let a line of JSONL that is null be a row like others, to be named by its number.

    pyarrow 26.0.1 dies of one where a block of its begins (`pyarrow.json.read_json`, through which `datasets` reads
    files, folders and streams alike: a segmentation fault). Blocks begin after line breaks. So no line break stays
    before a null, be it a row or inside one that spans lines: a tab means the same between words of JSON, and is as
    wrong within a string. A null that comes first becomes an object without columns, which is as much of a row.
    """
    import pyarrow.json

    read = pyarrow.json.read_json

    def careful(file: BinaryIO, *words: Any, **options: Any) -> Any:
        content = BEFORE_NULL.sub(lambda blank: blank[0].translate(_TABS), file.read())
        if first := FIRST_NULL.match(content):
            content = first[1] + b"{}" + content[first.end() :]
        return read(io.BytesIO(content), *words, **options)

    pyarrow.json.read_json = careful
    try:
        yield
    finally:
        pyarrow.json.read_json = read


@contextlib.contextmanager
def quiet(*, offline: bool) -> Iterator[None]:
    """No progress bars, no log lines; and, `offline`, no network: `load_dataset` reports each use to be counted."""
    import datasets
    from datasets import config
    from datasets.utils import logging
    from huggingface_hub import utils as hub

    was_offline, verbosity, hub_verbosity = config.HF_HUB_OFFLINE, logging.get_verbosity(), hub.logging.get_verbosity()
    bars = [of for of in (datasets.utils, hub) if not of.are_progress_bars_disabled()]
    for of in bars:
        of.disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    hub.logging.set_verbosity(logging.CRITICAL)
    config.HF_HUB_OFFLINE = offline
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = was_offline
        hub.logging.set_verbosity(hub_verbosity)
        logging.set_verbosity(verbosity)
        for of in bars:
            of.enable_progress_bars()
