"""Text of the Hugging Face hub.

A dataset is streamed: it is read once, as far as it is wanted, onto the disk, and no copy of it is kept beside
the tokens. Where the hub does not answer, one that `datasets` has in its own cache is read from there.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from normlab.corpora import HubData, NamedData
from normlab.data.documents import First, Spool, nulls_read, quiet
from normlab.data.hub_access import NoAnswer, answer, endpoint, import_hub, less_patient
from normlab.data.origins import Origin, Text
from normlab.data.sources import files_below, invalid_utf8_at, source_sha256
from normlab.errors import DataError, nearest

ELSEWHERE = "data=stdlib is text that is always there, data=files data.path=... is your own"


class HubOrigin(Origin):
    """A dataset of the hub, or a folder that is laid out like one."""

    def __init__(self, config: HubData | NamedData) -> None:
        words = config if isinstance(config, HubData) else HubData(**type(config).hub)
        self._dataset, self._subset, self._revision = words.name, words.subset, words.revision
        self._split, self._column = words.split, words.column
        self._article = config.article if isinstance(config, NamedData) else ""
        self._said = config.said
        self._folder = Path(words.name).expanduser() if Path(words.name).expanduser().is_dir() else None
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
        self._offline = ""

    def connect(self) -> None:
        """Ask the hub for the dataset; where there is no answer, look for it in the cache of `datasets`.

        Raises:
            DataError: There is no such dataset or revision, no right to read it, or neither hub nor cache.
        """
        import_hub(self._said)  # for a folder too, which `datasets` reads
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
            # Nothing but the commit: the list of its files can be long.
            self._commit = answer(
                lambda seconds: HfApi().dataset_info(
                    self._dataset, revision=self._revision, timeout=seconds, expand=["sha"]
                ).sha
            )  # fmt: skip
        except RevisionNotFoundError as error:
            raise DataError(f"data.revision={self._revision}: no commit, branch or tag at {address}") from error
        except GatedRepoError as error:  # a kind of RepositoryNotFoundError
            self._explain(error)
        except (RepositoryNotFoundError, HFValidationError) as error:
            raise DataError(
                f"{self._said}: no such dataset at {address}, and no such folder here; give its name as org/name, or "
                "log in if it is private (hf auth login, or HF_TOKEN)"
            ) from error
        except NoAnswer as error:
            if not self._may_be_cached():
                raise DataError(
                    f"{self._said}: {error}, and {self._dataset} is in no cache here; try again with a network, or "
                    f"set HF_ENDPOINT to a mirror; {ELSEWHERE}"
                ) from error
            self._offline = str(error)
        except HfHubHTTPError as error:
            self._explain(error)

    def read(self, scratch: Path, characters: int | None) -> Text:
        """Read the dataset, as far as it is wanted, into a file in `scratch`.

        Raises:
            DataError: No such subset, split or column, a row that is no text, or a hub that went away.
        """
        if not self._folder:
            # It may take minutes, and nothing else says so.
            where = "the cache of `datasets`" if self._offline else endpoint()
            print(f"normlab: reading {self._dataset} from {where}, this once", file=sys.stderr)
        scratch.mkdir(parents=True, exist_ok=True)
        with quiet(offline=bool(self._folder or self._offline)), nulls_read(), less_patient():
            documents: Iterable[str] = self._documents(scratch)
            if self._article:
                documents = articles(documents, self._article)
            spool = Spool(scratch / "documents", documents if characters is None else First(documents, characters))
        source = {"dataset": self._dataset, "subset": self._subset, "split": self._split, "commit": self._commit}
        return Text(spool, spool.sha256, source)

    def check_unchanged(self) -> None:
        """Hash a folder again."""
        if self._folder_sha256() != self.key["source_sha256"]:
            raise DataError(f"{self._said}: the text changed while it was read; try again")

    def _folder_sha256(self) -> str | None:
        return source_sha256(files_below(self._folder)) if self._folder else None

    def _may_be_cached(self) -> bool:
        """Whether `datasets` has the dataset; a look at its folder, as its import takes what is left of 5 s."""
        from huggingface_hub import constants

        cache = os.environ.get("HF_DATASETS_CACHE") or os.path.join(constants.HF_HOME, "datasets")
        # A folder for a subset, in it one for a version, in it one for a commit.
        return any(Path(cache).expanduser().glob(f"{glob.escape(cached_name(self._dataset))}/*/*/*"))

    def _documents(self, scratch: Path) -> Iterator[str]:
        """The texts of all rows of the splits, in order."""
        splits = self._load(scratch)
        for split in self._split.split("+"):
            if split not in splits:
                self._refuse("split", split, [str(name) for name in splits])
        number = 0
        for split in self._split.split("+"):
            rows = splits[split]
            if rows.column_names is not None:
                self._check_column(rows.column_names)
                rows = rows.select_columns([self._column])  # else it would decode pictures
            for row in self._guarded(rows):
                number += 1
                self._check_column(row)
                text = row[self._column]
                if not isinstance(text, str):
                    raise DataError(
                        f"{self._said}: row {number} of column {self._column!r} is {text!r:.40}, not text; "
                        "set data.column to another"
                    )
                yield text

    def _load(self, scratch: Path) -> Any:
        """The splits by name, as `datasets` has them."""
        import datasets

        try:
            if self._offline:
                return datasets.load_dataset(self._dataset, self._subset)
            return datasets.load_dataset(
                str(self._folder or self._dataset), self._subset, revision=self._commit, streaming=True,
                cache_dir=str(scratch / "datasets"),
            )  # fmt: skip
        except Exception as error:
            if self._offline and isinstance(error, ConnectionError | FileNotFoundError):
                raise DataError(
                    f"{self._said}: {self._offline}, and {self._dataset} is in no cache here; {ELSEWHERE}"
                ) from error
            self._explain(error)

    def _guarded(self, rows: Iterable[Any]) -> Iterator[Any]:
        try:
            yield from rows
        except Exception as error:
            self._explain(error)

    def _explain(self, error: Exception) -> NoReturn:
        """Say what is wrong with a dataset that is there and cannot be read."""
        import datasets

        if isinstance(error, ValueError) and ("BuilderConfig" in str(error) or "Config name is missing" in str(error)):
            names: list[str] = []
            with contextlib.suppress(Exception):
                names = datasets.get_dataset_config_names(str(self._folder or self._dataset), revision=self._commit)
            if names:
                self._refuse("subset", self._subset, names)
        seen, causes = error, [error]
        while (seen := seen.__cause__ or seen.__context__) and seen not in causes:  # pyright: ignore[reportAssignmentType]
            causes.append(seen)  # pyright: ignore[reportArgumentType]
        status = next((r.status_code for c in causes if (r := getattr(c, "response", None)) is not None), None)
        reason = f"{type(causes[-1]).__name__}: {' '.join(str(causes[-1]).split()):.200}"
        if status in (401, 403) or "gated" in str(error):
            raise DataError(
                f"{self._said}: {endpoint()} gives it only to those who may read it; log in (hf auth login, or "
                f"HF_TOKEN), and accept its terms at {endpoint()}/datasets/{self._dataset}"
            ) from error
        if self._folder:
            self._explain_folder(error)
        if self._offline:
            raise DataError(f"{self._said}: cannot be read ({reason}); mend it, or use data=files") from error
        raise DataError(
            f"{self._said}: reading from {endpoint()} failed ({reason}); nothing was kept, try again; {ELSEWHERE}"
        ) from error

    def _explain_folder(self, error: Exception) -> NoReturn:
        """The file, where `datasets` was at one, and what is wrong with it."""
        from datasets.data_files import EmptyDatasetError
        from datasets.exceptions import DataFilesNotFoundError

        assert self._folder is not None
        if isinstance(error, DataFilesNotFoundError | EmptyDatasetError):
            raise DataError(f"{self._said}: holds no data; put JSONL or Parquet there, or use data=files") from error
        if isinstance(error, StopIteration):  # what it says of files without a row
            empty = ", ".join(source.name for source in files_below(self._folder) if not source.path.stat().st_size)
            raise DataError(
                f"{self._said}: has no rows{empty and f' (empty: {empty})'}; put some there, or use data=files"
            ) from error
        # Its second attempt at a file that it cannot read fails in less telling words than its first.
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else " ".join(str(error).split())
        file = _file_in_hand(error)
        if file is None and isinstance(error, UnicodeDecodeError):  # met once no file is open any more
            texts = (source.path for source in files_below(self._folder) if source.path.suffix in (".json", ".jsonl"))
            file = next((path for path in texts if invalid_utf8_at(path) is not None), None)
        raise DataError(
            f"{self._said}: {f'{file} ' if file else ''}cannot be read ({reason or type(error).__name__:.200}); "
            "mend it, or use data=files"
        ) from error

    def _refuse(self, what: str, word: str | None, names: list[str]) -> NoReturn:
        if word is None:
            raise DataError(f"{self._said}: has several subsets; choose one with data.subset: {', '.join(names)}")
        raise DataError(
            f"data.{what}={word}: {self._dataset} has no such {what}{nearest(word, names)}; it has {', '.join(names)}"
        )

    def _check_column(self, names: Iterable[str]) -> None:
        if self._column not in names:
            raise DataError(
                f"{self._said}: no column {self._column!r}{nearest(self._column, names)}; it has "
                f"{', '.join(names) or 'none'}; set data.column"
            )


def _file_in_hand(error: Exception) -> str | None:
    """The file that `datasets` was reading; its errors do not tell, the readers' own variables do."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("datasets.packaged_modules."):
            file = frame.f_locals.get("file")
            if isinstance(file, str | os.PathLike):
                return os.fspath(file)
    return None


def cached_name(dataset: str) -> str:
    """What a dataset's folder is called in the cache of `datasets`: TinyStories becomes tiny_stories."""
    *owner, name = dataset.split("/")
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    name = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", name)
    return "___".join([*owner, name.lower()])


def articles(lines: Iterable[str], first: str) -> Iterator[str]:
    """Rows that are lines, joined into documents.

    Args:
        lines: With their line breaks.
        first: Regular expression of a document's first line, the whole of it.
    """
    begins = re.compile(first)
    article: list[str] = []
    for line in lines:
        if begins.fullmatch(line) and article:
            yield "".join(article)
            article = []
        article.append(line)
    yield "".join(article)
