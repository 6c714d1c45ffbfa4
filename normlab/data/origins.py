"""Where a corpus's text comes from, as a corpus sees it: `FilesOrigin` here, the hub's in `hub.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.corpora import DataConfig, FilesData
from normlab.data.documents import First, read_documents
from normlab.data.sources import find_sources, source_sha256
from normlab.errors import DataError


@dataclass(frozen=True, slots=True)
class Text:
    """The documents of a corpus, and what is known once they are there."""

    documents: Iterable[str]
    """In order, without empty ones. Can be gone through more than once, while the scratch folder stands."""
    sha256: str
    """Hash of what they were made from."""
    source: dict[str, Any] | None = None
    """For a record: the dataset and its commit, where the text is the hub's."""


class Origin:
    """Where text comes from."""

    key: dict[str, Any]
    """All that the text depends on and that is known without reading it, as plain JSON values."""

    def connect(self) -> None:
        """Find out, within seconds, whether the text can be had; called once, before it is read.

        Raises:
            DataError: It cannot.
        """

    def read(self, scratch: Path, characters: int | None) -> Text:
        """Read the text, or the first characters of it; `scratch` is a folder of ours, or the name of one."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Compare what was read with the key once more.

        Raises:
            DataError: It changed meanwhile.
        """


class FilesOrigin(Origin):
    """Files and folders, or the standard library."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._column = config.column if isinstance(config, FilesData) else "text"
        self._sources = find_sources(config)
        self._sha256 = source_sha256(self._sources)
        self.key = {"source_sha256": self._sha256, "column": self._column}

    def read(self, scratch: Path, characters: int | None) -> Text:
        """Read the files; their first characters are those of the first ones."""
        documents = read_documents(self._sources, self._column, scratch)
        return Text(documents if characters is None else First(documents, characters), self._sha256)

    def check_unchanged(self) -> None:
        """Hash the files again."""
        if source_sha256(find_sources(self._config)) != self._sha256:
            raise DataError(f"{self._config.said}: the text changed while it was read; try again")
