"""The interface between a corpus and the source of its text; `FilesOrigin` here, the hub's in `hub.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.config.corpora import DataConfig, FilesData
from normlab.data.documents import read_documents
from normlab.data.sources import find_sources, source_sha256
from normlab.errors import DataError


@dataclass(frozen=True, slots=True)
class Text:
    """The documents of a corpus and their provenance."""

    documents: Iterable[str]
    """In order, without empty ones. Can be iterated several times, as long as the scratch folder exists."""
    sha256: str
    """Hash of the source of the text."""
    source: dict[str, Any] | None = None
    """For the record of a run: the dataset and its commit, if the text is from the hub."""


class Origin:
    """A source of text."""

    key: dict[str, Any]
    """All that determines the text and is known before reading it, as plain JSON values."""

    def connect(self) -> None:
        """Check, within seconds, that the text can be read; called once, before `read`.

        Raises:
            DataError: The text cannot be read.
        """

    def read(self, scratch: Path, characters: int | None) -> Text:
        """Read at most `characters` characters of text; `scratch` is a folder for temporary files."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Compare the text with `key` again.

        Raises:
            DataError: The text changed while it was read.
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
        """Read the files in order."""
        return Text(read_documents(self._sources, self._column, scratch, characters), self._sha256)

    def check_unchanged(self) -> None:
        """Hash the files again."""
        if source_sha256(find_sources(self._config)) != self._sha256:
            raise DataError(f"{self._config.override}: the text changed while it was read; try again")
