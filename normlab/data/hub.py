"""Text of the Hugging Face hub.

A dataset is streamed once, as far as needed, and only its tokens are stored. If the hub does not answer, the dataset is
read from the cache of `datasets`. `datasets` is imported inside functions, because the import takes seconds and a
cached corpus does not need it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from normlab.config.corpora import HubData, NamedData
from normlab.data.corpus_files import files_below, outputs_below, source_sha256
from normlab.data.documents import BYTE_ORDER_MARK, SourceCounts
from normlab.data.hub_access import NoAnswer, endpoint, hub_error, import_hub, query_hub, reason_of
from normlab.errors import DataError, did_you_mean, notify

OFFLINE_CHOICES = "without a network, use data=stdlib, or data=files data.path=... for your own text"

BLANK_BEFORE_NULL = re.compile(rb"(?<!\s)\s+(?:\xef\xbb\xbf\s*)?(?=null)")
"""All white space before a null; a file made by concatenation may contain byte order marks."""
NULL_AT_START = re.compile(rb"(\s*(?:\xef\xbb\xbf)?\s*)null")
_NEWLINES_TO_TABS = bytes.maketrans(b"\r\n", b"\t\t")


class HubText:
    """The documents of a dataset of the hub, or of a folder with the layout of one.

    Args:
        config: The dataset.

    Raises:
        DataError: `revision` is set for a folder, or a file of the folder cannot be read.
    """

    def __init__(self, config: HubData | NamedData) -> None:
        options = config if isinstance(config, HubData) else HubData(**type(config).hub)
        self._options, self._override = options, config.override
        self._article = config.article if isinstance(config, NamedData) else ""
        folder = Path(options.name).expanduser()
        self._folder = folder if folder.is_dir() else None
        if self._folder and options.revision is not None:
            raise DataError(f"data.revision={options.revision}: has no effect on a folder; leave it out")
        if self._folder and (outputs := outputs_below(self._folder)):
            raise DataError(f"{self._override}: has {outputs[0]}, which normlab wrote; choose a folder without results")
        self.key: dict[str, Any] = {
            "dataset": options.name,
            "subset": options.subset,
            "split": options.split,
            "revision": options.revision,
            "column": options.column,
            "skip": options.skip,
            "article": self._article,
            "source_sha256": source_sha256(files_below(self._folder)) if self._folder else None,
        }
        """All inputs that determine the text and are known before it is read, as plain JSON values."""
        self.left_out: list[str] = []
        """Empty; the output of normlab is left out only for data=files."""
        self.counts = [SourceCounts(options.name, "dataset", None)]
        """What was read of the dataset."""
        self._commit: str | None = None
        self._no_answer = ""  # if the hub cannot be read: the reason; then the local cache is read

    @property
    def provenance(self) -> dict[str, str | None]:
        """The dataset and its commit, for the record of a run."""
        options = self._options
        return {"dataset": options.name, "subset": options.subset, "split": options.split, "commit": self._commit}

    def connect(self) -> None:
        """Look the dataset up on the hub or, if the hub does not answer, in the cache of `datasets`.

        Raises:
            DataError: The dataset or its revision does not exist, access is denied, or neither hub nor cache has it.
        """
        import_hub(self._override)  # also for a folder, because `datasets` imports `huggingface_hub`
        if self._folder:
            return
        from huggingface_hub import HfApi

        name, revision = self._options.name, self._options.revision
        try:
            # Only the commit is requested, because the list of files can be long.
            self._commit = query_hub(
                lambda seconds: HfApi().dataset_info(name, revision=revision, timeout=seconds, expand=["sha"]).sha
            )
        except DataError:
            raise
        except Exception as error:
            if not (isinstance(error, NoAnswer) and self._may_be_cached()):
                raise self._error(error) from error
            self._no_answer = str(error)

    def documents(self, scratch: Path) -> Generator[str]:
        """Yield the documents in order; `scratch` is a folder for temporary files.

        Raises:
            DataError: The subset, the split or the column does not exist, a row is not text, or the hub failed.
        """
        import pyarrow.json
        from datasets import config, utils
        from datasets.packaged_modules.json import json as json_files
        from huggingface_hub import utils as hub_utils

        if not self._folder:
            # Reading may take minutes and prints nothing else.
            place = "the cache of `datasets`" if self._no_answer else endpoint()
            notify(f"reading {self._options.name} from {place} (only once)")
        for library in (utils, hub_utils):
            library.disable_progress_bars()
            library.logging.set_verbosity(logging.CRITICAL)
        settings = {
            # When the hub is not needed, this also keeps `load_dataset` from reporting each use to the hub.
            "HF_HUB_OFFLINE": bool(self._folder or self._no_answer),
            # By default, `datasets` retries a broken stream for half an hour. Before each of its retries,
            # `huggingface_hub` has already retried six times, over 23 seconds.
            "STREAMING_READ_MAX_RETRIES": 2,
            "STREAMING_OPEN_MAX_RETRIES": 2,
        }
        read_json = _accept_nulls(pyarrow.json.read_json)
        # pyarrow rejects two keys of one name, but `datasets` reads a JSON list by pandas, which keeps the last one.
        loads = partial(json.loads, object_pairs_hook=self._to_dict, strict=False)  # `datasets` accepts raw tabs too

        def read_list(file: TextIO, **options: Any) -> Any:
            loads(content := file.read())
            return read_pandas(io.StringIO(content), **options)

        read_pandas = json_files.pandas_read_json
        with (
            _patched(config, **settings),
            _patched(pyarrow.json, read_json=read_json),
            _patched(json_files, ujson_loads=loads, pandas_read_json=read_list),
        ):
            try:
                (counts,), options = self.counts, self._options
                texts = counts.texts(self._rows(scratch), options.column, options.skip, self._override)
                yield from counts.documents_of(join_articles(texts, self._article) if self._article else texts)
            except DataError:
                raise
            except Exception as error:  # `datasets` raises errors of many libraries
                raise self._error(error) from error

    def _may_be_cached(self) -> bool:
        """Return whether the cache of `datasets` has the dataset, without the slow import."""
        from huggingface_hub import constants

        cache = Path(os.environ.get("HF_DATASETS_CACHE") or os.path.join(constants.HF_HOME, "datasets")).expanduser()
        # For example, the folder of org/TinyStories is org___tiny_stories.
        name = self._options.name.replace("/", "").replace("_", "").lower()
        folders = [folder for folder in cache.glob("*") if folder.name.replace("_", "").lower() == name]
        # The levels below the folder are subset, version and commit.
        return any(any(folder.glob("*/*/*")) for folder in folders)

    def _rows(self, scratch: Path) -> Iterator[Any]:
        """Yield the column of every row of the splits, in order."""
        options, column = self._options, self._options.column
        splits, is_unique, name_in_row = self._load(scratch), False, column
        names = options.split.split("+")
        for name in names:
            if name not in splits:
                choices = [str(split) for split in splits]
                raise DataError(
                    f"data.split={name}: {options.name} has no such split{did_you_mean(name, choices)}; it has "
                    f"{', '.join(choices)}"
                )
        for name in names:
            rows = splits[name]
            if column in (rows.column_names or ()):
                rows = rows.select_columns([column])  # so that other columns, such as images, are not decoded
            for row in rows:
                if f"{column}.1" in row and not is_unique:  # pandas gives this name to the second one in a CSV file
                    if rows.info.builder_name == "csv" and self._repeats_column(scratch, name, len(row)):
                        raise DataError(
                            f"{self._override}: has more than one column {column!r}; remove all but one, or rename them"
                        )
                    is_unique = True
                if name_in_row not in row:
                    marked = (key for key in row if key.replace(BYTE_ORDER_MARK, "") == column)
                    name_in_row = next(marked, column)
                if name_in_row not in row:
                    raise DataError(
                        f"{self._override}: no column {column!r}{did_you_mean(column, row)}; it has "
                        f"{', '.join(row) or 'none'}; set data.column"
                    )
                yield row[name_in_row]

    def _load(self, scratch: Path, **options: Any) -> Any:
        """Return the splits of the dataset, with `options` of its format."""
        import datasets

        name, subset = self._options.name, self._options.subset
        if self._no_answer:
            return datasets.load_dataset(name, subset)
        return datasets.load_dataset(
            str(self._folder or name), subset, revision=self._commit, streaming=True, cache_dir=str(scratch), **options
        )

    def _repeats_column(self, scratch: Path, split: str, columns: int) -> bool:
        """Return whether the header of a CSV file of a split has the column more than once."""
        # With names of our own, pandas reads the header as a row, and leaves the names in it as they are.
        headers = self._load(scratch, names=[str(number) for number in range(columns)], nrows=1)[split]
        return any([*header.values()].count(self._options.column) > 1 for header in headers)

    def _to_dict(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return a JSON object; raise DataError if it has the column twice."""
        column = self._options.column
        if sum(name == column for name, _ in pairs) > 1:
            raise DataError(f"{self._override}: a row has more than one {column!r}; remove all but one, or rename them")
        return dict(pairs)

    def _error(self, error: Exception) -> DataError:
        """Convert an error of the hub's libraries to a DataError with what to do."""
        message = " ".join(str(error).split())
        if isinstance(error, ValueError) and ("BuilderConfig" in message or "Config name is missing" in message):
            return DataError(f"{self._override}: {message.partition(' Example of usage')[0]}; set data.subset")
        if self._folder:
            return DataError(
                f"{self._override}: cannot be read ({reason_of(error)}); fix it, or use data=files to find the file"
            )
        if self._no_answer:
            return DataError(
                f"{self._override}: {self._no_answer}, and the local cache cannot be read ({reason_of(error)}); "
                f"{OFFLINE_CHOICES}"
            )
        return hub_error(error, self._override, f"datasets/{self._options.name}", OFFLINE_CHOICES)


def join_articles(lines: Iterable[str], first_line: str) -> Iterator[str]:
    """Join the lines of a dataset whose rows are lines, and yield the documents.

    Args:
        lines: The lines, with their line breaks.
        first_line: Regular expression of the first line of a document.
    """
    pattern = re.compile(first_line)
    article: list[str] = []
    for line in lines:
        if pattern.fullmatch(line) and article:
            yield "".join(article)
            article = []
        article.append(line)
    yield "".join(article)


@contextmanager
def _patched(target: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of a module, and restore them at the end of the block."""
    original = {name: getattr(target, name) for name in attributes}
    for name, value in attributes.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in original.items():
            setattr(target, name, value)


def _accept_nulls(original: Any) -> Any:
    """Wrap `pyarrow.json.read_json` so that a JSONL line `null` does not crash the process.

    pyarrow 26.0.1 crashes with a segmentation fault if one of its blocks begins with such a line. Blocks begin after
    line breaks, so the wrapper replaces every line break before a null by a tab: JSON treats both alike between tokens,
    and allows neither in strings. A null at the start becomes an object without columns. The caller then reports the
    row by its number.
    """

    def read_json(file: BinaryIO, *args: Any, **kwargs: Any) -> Any:
        content = BLANK_BEFORE_NULL.sub(lambda blank: blank[0].translate(_NEWLINES_TO_TABS), file.read())
        if first := NULL_AT_START.match(content):
            content = first[1] + b"{}" + content[first.end() :]
        return original(io.BytesIO(content), *args, **kwargs)

    return read_json
