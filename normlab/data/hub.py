"""Text of the Hugging Face hub.

A dataset is streamed once, as far as needed, onto the disk; no copy is kept beside the tokens. If the hub does not
answer, a dataset in the cache of `datasets` is read from there.
"""

from __future__ import annotations

import glob
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from normlab.config.corpora import HubData, NamedData
from normlab.data.documents import Spool, first_characters, nulls_accepted, patched, quiet
from normlab.data.hub_access import NoAnswer, endpoint, import_hub, query_hub
from normlab.data.origins import Origin, Text
from normlab.data.sources import files_below, invalid_utf8_at, source_sha256
from normlab.errors import DataError, did_you_mean

OFFLINE_CHOICES = "data=stdlib needs no network, data=files data.path=... reads your own text"


class HubOrigin(Origin):
    """A dataset of the hub, or a folder with the layout of one."""

    def __init__(self, config: HubData | NamedData) -> None:
        options = config if isinstance(config, HubData) else HubData(**type(config).hub)
        self._dataset, self._subset, self._revision = options.name, options.subset, options.revision
        self._split, self._column = options.split, options.column
        self._article = config.article if isinstance(config, NamedData) else ""
        self._override = config.override
        self._folder = Path(options.name).expanduser() if Path(options.name).expanduser().is_dir() else None
        if self._folder and self._revision is not None:
            raise DataError(f"data.revision={self._revision}: has no effect on a folder; leave it out")
        self.key = {
            "dataset": self._dataset,
            "subset": self._subset,
            "split": self._split,
            "revision": self._revision,
            "column": self._column,
            "article": self._article,
            "source_sha256": self._folder_sha256(),
        }
        self._commit: str | None = None
        self._no_answer = ""  # why the hub cannot be read, if the dataset is in the local cache

    def connect(self) -> None:
        """Look the dataset up on the hub or, if the hub does not answer, in the cache of `datasets`.

        Raises:
            DataError: The dataset or its revision does not exist, access is denied, or neither hub nor cache has it.
        """
        import_hub(self._override)  # for a folder too, because `datasets` imports it
        if self._folder:
            return
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        address = f"{constants.ENDPOINT}/datasets/{self._dataset}"
        try:
            # Only the commit is requested, because the list of files can be long.
            self._commit = query_hub(
                lambda seconds: HfApi().dataset_info(
                    self._dataset, revision=self._revision, timeout=seconds, expand=["sha"]
                ).sha
            )  # fmt: skip
        except RevisionNotFoundError as error:
            raise DataError(f"data.revision={self._revision}: no commit, branch or tag at {address}") from error
        except GatedRepoError as error:  # a subclass of RepositoryNotFoundError
            self._raise(error)
        except (RepositoryNotFoundError, HFValidationError) as error:
            raise DataError(
                f"{self._override}: no such dataset at {address}, and no such folder here; set data.name=org/name, or "
                "log in if the dataset is private (hf auth login, or HF_TOKEN)"
            ) from error
        except NoAnswer as error:
            if not self._may_be_cached():
                raise DataError(
                    f"{self._override}: {error}, and {self._dataset} is not in the local cache; connect to a network, "
                    f"or set HF_ENDPOINT to a mirror; {OFFLINE_CHOICES}"
                ) from error
            self._no_answer = str(error)
        except HfHubHTTPError as error:
            self._raise(error)

    def read(self, scratch: Path, characters: int | None) -> Text:
        """Read at most `characters` characters of the dataset into a file in `scratch`.

        Raises:
            DataError: The subset, the split or the column does not exist, a row is not text, or the hub failed.
        """
        from datasets import config

        if not self._folder:
            # Reading may take minutes without any other output.
            place = "the cache of `datasets`" if self._no_answer else endpoint()
            print(f"normlab: reading {self._dataset} from {place} (only once)", file=sys.stderr)
        scratch.mkdir(parents=True, exist_ok=True)
        # By default, `datasets` retries a broken stream for half an hour. Before each of its retries, `huggingface_hub`
        # has already retried six times, over 23 seconds.
        retries = {"STREAMING_READ_MAX_RETRIES": 2, "STREAMING_OPEN_MAX_RETRIES": 2}
        offline = bool(self._folder or self._no_answer)
        with quiet(offline=offline), nulls_accepted(), patched(config, **retries):
            documents = self._documents(scratch)
            if self._article:
                documents = join_articles(documents, self._article)
            if characters is not None:
                documents = first_characters(documents, characters)
            spool = Spool(scratch / "documents", documents)
        source = {"dataset": self._dataset, "subset": self._subset, "split": self._split, "commit": self._commit}
        return Text(spool, spool.sha256, source)

    def check_unchanged(self) -> None:
        """Hash a folder again; the commit of a dataset on the hub is fixed."""
        if self._folder_sha256() != self.key["source_sha256"]:
            raise DataError(f"{self._override}: the text changed while it was read; try again")

    def _folder_sha256(self) -> str | None:
        return source_sha256(files_below(self._folder)) if self._folder else None

    def _may_be_cached(self) -> bool:
        """Return whether the cache of `datasets` has a folder of the dataset; importing `datasets` takes too long."""
        from huggingface_hub import constants

        cache = os.environ.get("HF_DATASETS_CACHE") or os.path.join(constants.HF_HOME, "datasets")
        # The levels below are the subset, the version and the commit.
        return any(Path(cache).expanduser().glob(f"{glob.escape(cached_name(self._dataset))}/*/*/*"))

    def _documents(self, scratch: Path) -> Iterator[str]:
        """Yield the text of every row of the splits, in order."""
        splits = self._load(scratch)
        names = self._split.split("+")
        for name in names:
            if name not in splits:
                choices = [str(split) for split in splits]
                raise DataError(
                    f"data.split={name}: {self._dataset} has no such split{did_you_mean(name, choices)}; it has "
                    f"{', '.join(choices)}"
                )
        number = 0
        for name in names:
            rows = splits[name]
            if rows.column_names is not None:
                self._check_column(rows.column_names)
                rows = rows.select_columns([self._column])  # other columns, such as images, are then not decoded
            for row in self._iterate(rows):
                number += 1
                self._check_column(row)
                text = row[self._column]
                if not isinstance(text, str):
                    raise DataError(
                        f"{self._override}: row {number} of column {self._column!r} is {text!r:.40}, not text; "
                        "set data.column to another column"
                    )
                yield text

    def _load(self, scratch: Path) -> Any:
        """Return the splits of the dataset by name."""
        import datasets

        try:
            if self._no_answer:
                return datasets.load_dataset(self._dataset, self._subset)
            return datasets.load_dataset(
                str(self._folder or self._dataset), self._subset, revision=self._commit, streaming=True,
                cache_dir=str(scratch / "datasets"),
            )  # fmt: skip
        except Exception as error:
            self._raise(error)

    def _iterate(self, rows: Iterable[Any]) -> Iterator[Any]:
        try:
            yield from rows
        except Exception as error:
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        """Raise a DataError for an error of the hub's libraries."""
        causes = _causes(error)
        message, root = " ".join(str(error).split()), causes[-1]
        if isinstance(error, ValueError) and ("BuilderConfig" in message or "Config name is missing" in message):
            reason = message.partition(" Example of usage")[0]
            raise DataError(f"{self._override}: {reason}; set data.subset") from error
        status = next((r.status_code for cause in causes if (r := getattr(cause, "response", None)) is not None), None)
        if status in (401, 403) or "gated" in message:
            raise DataError(
                f"{self._override}: {endpoint()} denies access; log in (hf auth login, or HF_TOKEN), and accept the "
                f"terms at {endpoint()}/datasets/{self._dataset}"
            ) from error
        if self._folder:
            self._raise_for_folder(self._folder, error)
        if self._no_answer and isinstance(error, ConnectionError | FileNotFoundError):
            raise DataError(
                f"{self._override}: {self._no_answer}, and {self._dataset} is not in the local cache; {OFFLINE_CHOICES}"
            ) from error
        reason = f"{type(root).__name__}: {' '.join(str(root).split()):.200}"
        if self._no_answer:
            raise DataError(f"{self._override}: cannot be read ({reason}); fix it, or use data=files") from error
        raise DataError(
            f"{self._override}: reading from {endpoint()} failed ({reason}); nothing was kept, try again; "
            f"{OFFLINE_CHOICES}"
        ) from error

    def _raise_for_folder(self, folder: Path, error: Exception) -> NoReturn:
        """Raise a DataError that names the file of the folder and the reason, if `datasets` reports them."""
        file = _file_being_read(error)
        # On a file that it cannot read, `datasets` tries a second reader, whose error says less.
        if isinstance(error, UnicodeDecodeError):
            reason = "not UTF-8"
            if file is None:  # the error came after the file was closed
                texts = (source.path for source in files_below(folder) if source.path.suffix in (".json", ".jsonl"))
                file = next((path for path in texts if invalid_utf8_at(path) is not None), None)
        elif isinstance(error, StopIteration):  # its error for files without a row
            reason = "no rows"
        else:
            reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{self._override}: {f'{file} ' if file else ''}cannot be read ({reason:.200}); fix it, or use data=files"
        ) from error

    def _check_column(self, names: Iterable[str]) -> None:
        if self._column not in names:
            raise DataError(
                f"{self._override}: no column {self._column!r}{did_you_mean(self._column, names)}; it has "
                f"{', '.join(names) or 'none'}; set data.column"
            )


def _causes(error: Exception) -> list[BaseException]:
    """Return an error and the chain of its causes, the root cause last."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    return causes


def _file_being_read(error: Exception) -> str | os.PathLike[str] | None:
    """Return the file that `datasets` was reading: its errors do not name the file, but its frames hold it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("datasets.packaged_modules."):
            file = frame.f_locals.get("file")
            if isinstance(file, str | os.PathLike):
                return file
    return None


def cached_name(dataset: str) -> str:
    """Return the name of a dataset's folder in the cache of `datasets`: TinyStories is tiny_stories."""
    *owner, name = dataset.split("/")
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    name = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", name)
    return "___".join([*owner, name.lower()])


def join_articles(lines: Iterable[str], first_line: str) -> Iterator[str]:
    """Join rows that are lines, with their line breaks, into documents.

    Args:
        lines: The lines.
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
