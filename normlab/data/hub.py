"""Text of the Hugging Face hub.

A dataset is streamed once, as far as needed, and only its tokens are stored. `datasets` finds its files and reads
Parquet, Arrow and text. It guesses the types of CSV and JSON, so `tables.py` reads these as text. `HF_ENDPOINT`,
`HF_HOME`, `HF_HUB_OFFLINE` and `HF_TOKEN` keep their meaning. The libraries are imported inside functions, because the
imports take seconds and a cached corpus does not need them.
"""

import dataclasses
import itertools
import logging
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from normlab.base.errors import DataError, did_you_mean, notify
from normlab.base.parsing import leaves, read_front_matter
from normlab.catalogue.corpora import TABLE_SUFFIXES, TEXT_SUFFIXES, HubData, NamedData, files_overrides, no_text_hint
from normlab.data.documents import SourceRow, TextCounts
from normlab.data.files import Source, files_of_folder, source_sha256
from normlab.data.tables import column_error, csv_rows, json_rows

JSON_SUFFIXES: dict[str, str] = dict.fromkeys((".json", ".jsonl", ".ndjson"), ".json")
TEXT_TABLES = {"csv": {"sep", "delimiter", "names", "column_names", "encoding"}, "json": {"encoding"}}
"""Formats that `tables.py` reads, each with the options of `datasets` that it follows."""

WRITE_AS = "JSON Lines or Parquet"
FORMATS = ("csv", "json", "text", "parquet", "arrow")
"""Formats of text whose files name no other files, by the names that `datasets` has for them."""

OF_ALL_FORMATS = {"name", "version", "data_dir", "data_files", "description", "features"}
"""Options of `datasets` that say which files are read, or the types of their columns."""

TIMEOUT_S = 4.0
"""Seconds within which the hub must answer the first request; later ones are repeated by the libraries."""

LOG_IN = "log in (hf auth login, or HF_TOKEN), and accept the terms of the repository"
REMEDIES = {
    "RevisionNotFoundError": "choose another data.revision",
    "GatedRepoError": LOG_IN,
    "RepositoryNotFoundError": "choose another org/name, or log in if it is private (hf auth login, or HF_TOKEN)",
    "HFValidationError": "choose another org/name, or a path that exists",
    "RemoteEntryNotFoundError": "choose a model that has a tokenizer.json",
    "UnicodeDecodeError": "convert the file to UTF-8 (iconv -t utf-8)",
}
"""What to do about an error, by its class."""

TRY_AGAIN = "run the command again; without a network, use data=stdlib, or data=files with data.path"
CHECK_FILE = "check the file, or leave it out"


class HubText:
    """The documents of a dataset of the hub, or of a folder with the layout of one.

    Raises:
        DataError: The name is that of a file, `revision` is set for a folder, its files have several formats, or one of
            them cannot be read.
    """

    def __init__(self, config: HubData | NamedData) -> None:
        self._article = ""
        if isinstance(config, HubData):
            options = config
        else:  # a corpus of normlab that is a dataset of the hub
            options, self._article = HubData(**type(config).hub), config.article
        self._options, self._override = options, config.override
        folder = Path(options.name).expanduser()
        self._folder = folder if folder.is_dir() else None
        if folder.is_file():
            action = "put it alone into a folder, and set data.name=FOLDER"
            suffix = folder.suffix.lower()
            if suffix in TEXT_SUFFIXES:
                action = f"for a file of text, set {files_overrides(options.name)}"
            elif suffix not in TABLE_SUFFIXES:
                action = no_text_hint(suffix)
            raise DataError(f"data.name={options.name}: is a file; {action}")
        if self._folder and options.revision is not None:
            raise DataError(f"data.revision={options.revision}: has no effect on a folder; leave it out")
        self._files: list[Source] = []
        source_hash: str | None = None
        if self._folder:
            self._files = files_of_folder(self._folder)
            # Before the hash, which reads all files.
            _check_formats(options.name, {source.name: source.path.suffix for source in self._files})
            _check_card(self._folder, self._files)
            source_hash = source_sha256(self._files)
        self.key: dict[str, Any] = {
            "dataset": options.name,
            "subset": options.subset,
            "split": options.split,
            "revision": options.revision,
            "column": options.column,
            "article": self._article,
            "source_sha256": source_hash,
        }
        """All inputs that determine the text and are known before it is read, as plain JSON values."""
        self.counts = TextCounts()
        self._commit: str | None = None

    @property
    def provenance(self) -> dict[str, str | None]:
        """The dataset and its commit, for the record of a run."""
        options = self._options
        return {"dataset": options.name, "subset": options.subset, "split": options.split, "commit": self._commit}

    def connect(self) -> None:
        """Look the dataset up on the hub.

        Raises:
            DataError: The hub does not answer, the dataset or its revision does not exist, or access is denied.
        """
        if self._folder:
            return
        with hub_errors(self._override):
            from huggingface_hub import HfApi

            name, revision = self._options.name, self._options.revision
            # Only the commit is requested, because the list of files can be long.
            self._commit = HfApi().dataset_info(name, revision=revision, timeout=TIMEOUT_S, expand=["sha"]).sha

    def documents(self, scratch: Path) -> Generator[str]:
        """Yield the documents in order; `scratch` is a folder for temporary files.

        Raises:
            DataError: The subset, the split or the column does not exist, a row is not text, or the hub failed.
        """
        if not self._folder:
            notify(f"reading {self._options.name} from the hub (only once)")  # this may take minutes
        with hub_errors(self._override, self._remedy):
            rows = self._rows(scratch)
            if self._article:
                rows = join_articles(rows, self._article)
            yield from self.counts.documents_of(rows, self._options.column)

    @property
    def _remedy(self) -> str:
        """What to do about an error without a remedy of its own."""
        return CHECK_FILE if self._folder else TRY_AGAIN

    def _rows(self, scratch: Path) -> Iterator[SourceRow]:
        """Yield the rows of the splits, in order."""
        from datasets import config, load_dataset_builder, utils
        from huggingface_hub import utils as hub_utils

        for library in (utils, hub_utils):
            library.disable_progress_bars()
            library.logging.set_verbosity(logging.CRITICAL)
        config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each use of a folder is a request to the hub
        # By default, `datasets` retries a broken stream for half an hour; each retry is six of the hub's library.
        config.STREAMING_READ_MAX_RETRIES = config.STREAMING_OPEN_MAX_RETRIES = 2
        options = self._options
        builder = load_dataset_builder(
            str(self._folder or options.name), options.subset, revision=self._commit, cache_dir=str(scratch)
        )
        files = builder.config.data_files or {}
        self._check_files(builder, files)
        if builder.name in TEXT_TABLES:
            for split in self._splits(files):
                yield from self._text_rows(builder, files[split])
        else:
            if self._folder and builder.name == "parquet":
                self._check_parquet(builder)
            splits: Any = builder.as_streaming_dataset()
            for split in self._splits(splits):
                # A card may call a column of text one of images: decoding would open the files that it names.
                yield from _column_rows(splits[split].decode(False), options.column)

    def _check_files(self, builder: Any, files: Mapping[Any, Iterable[str]]) -> None:
        """Check that `datasets` reads only what the hash of the folder covers, or what the dataset of the hub holds.

        `_check_card` has checked the patterns in the README.md; these are the files that `datasets` found by them.
        """
        if self._folder and builder.name not in FORMATS:
            raise DataError(f"its files are read as {builder.name}, which is no text; write the text as {WRITE_AS}")
        covered = {os.path.abspath(source.path) for source in self._files}  # as `datasets` has them
        for path in itertools.chain(*files.values()):
            is_inside = path in covered if self._folder else path.startswith(f"{builder.base_path}/")
            if not is_inside:
                raise DataError(
                    f"{path}: is hidden, in a folder that is a link, or outside of the dataset; move it into the "
                    "dataset, and name it there in its README.md"
                )

    def _check_parquet(self, builder: Any) -> None:
        """Reject a file that is not Parquet by its name, which the error of `datasets` lacks."""
        from pyarrow import parquet

        files = builder.config.data_files or {}
        for path in itertools.chain(*files.values()):
            if not path.endswith(".parquet"):  # a compressed file, or an archive
                continue
            with hub_errors(path.removeprefix(f"{builder.base_path}/"), self._remedy):
                parquet.read_metadata(path)

    def _splits(self, choices: Iterable[Any]) -> list[str]:
        """Return the names of the splits to read."""
        names, known = self._options.split.split("+"), [str(choice) for choice in choices]
        for name in names:
            if name not in known:
                hint = did_you_mean(name, known)
                raise DataError(f"no split {name!r}{hint}; it has {', '.join(known)}; set data.split")
        return names

    def _text_rows(self, builder: Any, urls: Iterable[str]) -> Iterator[SourceRow]:
        """Yield the rows of CSV or JSON files, each file and line by its name."""
        import fsspec
        from datasets import StreamingDownloadManager

        options, column = builder.config, self._options.column
        _check_options(options, TEXT_TABLES[builder.name])
        manager = StreamingDownloadManager(base_path=builder.base_path)
        encoding = options.encoding or "utf-8"
        if encoding.lower().replace("_", "-") == "utf-8":
            encoding = "utf-8-sig"  # without a byte-order mark, which would be part of the first name
        for url in urls:
            name = url.removeprefix(f"{builder.base_path}/")
            with hub_errors(name, self._remedy):
                # A compressed file has its content below it; an archive has several files.
                for path in manager.iter_files(manager.download_and_extract(url)):
                    open_file: Any = partial(fsspec.open, path, "rt", encoding=encoding, newline="")
                    if builder.name == "csv":
                        rows = csv_rows(open_file, options.sep, column, options.names or ())
                    else:
                        rows = json_rows(open_file, column)
                    for row in rows:
                        yield row._replace(place=f"{name}: {row.place}")


def _column_rows(dataset: Any, column: str) -> Iterator[SourceRow]:
    """Yield a column of a split that `datasets` reads."""
    if column in (dataset.column_names or ()):
        dataset = dataset.select_columns([column])  # so that other columns, such as images, are not decoded
    for number, row in enumerate(dataset, start=1):
        if column not in row:
            raise column_error(column, list(row))
        yield SourceRow(f"row {number}", row[column])


def _check_options(config: Any, known: set[str]) -> None:
    """Reject options of a README.md that would change how its files are read."""
    defaults = type(config)()
    for field in dataclasses.fields(config):
        if field.name in known or field.name in OF_ALL_FORMATS:
            continue
        value = getattr(config, field.name)
        if value != getattr(defaults, field.name):
            raise DataError(
                f"its README.md sets {field.name}={value!r:.40}, which normlab does not follow; write the files as "
                f"{WRITE_AS}"
            )


@contextmanager
def hub_errors(override: str, remedy_of_others: str = TRY_AGAIN) -> Iterator[None]:
    """Convert an error to a DataError that names the override and says what to do."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{override}: {error}") from error
    except Exception as error:  # `datasets` raises errors of many libraries
        # `datasets` wraps the error of the hub in one of its own, so that the reason may be any of its causes.
        causes: list[BaseException] = []
        cause: BaseException | None = error
        while cause is not None and cause not in causes:
            causes.append(cause)
            cause = cause.__cause__ or cause.__context__
        message = " ".join(str(error).split())
        names = [type(cause).__name__ for cause in causes]
        remedy = next((REMEDIES[name] for name in names if name in REMEDIES), None)
        statuses = {getattr(getattr(cause, "response", None), "status_code", 0) for cause in causes}
        if statuses & {401, 403} or "gated" in message:
            remedy = remedy or LOG_IN
        if "BuilderConfig" in message or "Config name is missing" in message:
            remedy, message = "set data.subset", message.partition(" Example of usage")[0]
        raise DataError(f"{override}: {type(error).__name__}: {message:.200}; {remedy or remedy_of_others}") from error


def _check_card(folder: Path, files: Iterable[Source]) -> None:
    """Check that the README.md of a folder names files of the folder only, before `datasets` looks for them.

    Raises:
        DataError: It names another file or address, or cannot be read; or there is a file that replaces it.
    """
    # `datasets` prefers this file, and hidden files are not covered by the hash of the folder.
    replacement = folder / ".huggingface.yaml"
    if replacement.exists():
        raise DataError(f"{replacement}: says which files are read, and is hidden; move its content to README.md")
    card = next((source.path for source in files if source.name == "README.md"), None)
    if card is None:
        return
    try:
        content = read_front_matter(card)
    except (OSError, ValueError) as error:
        raise DataError(f"{card}: cannot be read ({error}); fix the file, or leave it out") from error
    # Only a list of mappings can name files.
    configs = None
    if isinstance(content, dict):
        configs = content.get("configs")
    if not isinstance(configs, list):
        return
    for config in configs:
        if not isinstance(config, dict):
            continue
        for option in ("data_dir", "data_files"):
            for name in map(str, leaves(config.get(option))):
                if os.path.isabs(name) or ".." in name.split("/") or _ADDRESS.search(name):
                    raise DataError(
                        f"{card}: {option} names {name!r:.80}, which is outside of {folder}; copy the file into the "
                        "folder, and name it by its path there"
                    )


_ADDRESS = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*:|::")
"""The beginning of an address such as `https://` or `hf://`, or the sign between the parts of one of fsspec."""


def _check_formats(folder: str, suffixes: Mapping[str, str]) -> None:
    """Reject a folder with files of several formats, of which `datasets` would read the most frequent one in silence.

    The README.md of a dataset may say which files are read, so a folder that has one is not rejected.
    """
    formats: set[str] = set()
    for suffix in suffixes.values():
        if suffix == ".txt" or suffix in TABLE_SUFFIXES:
            formats.add(JSON_SUFFIXES.get(suffix, suffix))
    if len(formats) > 1 and "README.md" not in suffixes:
        raise DataError(
            f"data.name={folder}: put files of one format into a folder; this one has {', '.join(sorted(formats))}"
        )


def join_articles(lines: Iterable[SourceRow], first_line: str) -> Iterator[SourceRow]:
    """Join lines, with their line breaks, into documents, whose first line matches a regular expression."""
    pattern = re.compile(first_line)
    article: list[SourceRow] = []
    for line in lines:
        if pattern.fullmatch(line.text) and article:
            yield _joined(article)
            article = []
        article.append(line)
    if article:
        yield _joined(article)


def _joined(lines: list[SourceRow]) -> SourceRow:
    return SourceRow(lines[0].place, "".join(line.text for line in lines), len(lines))
