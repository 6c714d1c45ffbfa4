"""The text of Python's language reference, which comes with Python: the topics of `help()`, one document each."""

import hashlib
import importlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

from normlab.base.errors import DataError
from normlab.data.documents import Row, TextCounts

MODULE = "pydoc_data.topics"


class ReferenceText:
    """The documents of the language reference, sorted by the name of the topic; they depend on Python's version.

    Raises:
        DataError: This Python has no language reference.
    """

    def __init__(self) -> None:
        try:
            self._topics: dict[str, str] = importlib.import_module(MODULE).topics
        except ImportError as error:
            raise DataError(
                f"data=reference: this Python lacks the module {MODULE}; install the full standard library, or use "
                "data=stdlib"
            ) from error
        self.key: dict[str, Any] = {"source_sha256": self._sha256()}
        """All inputs that determine the text, as plain JSON values."""
        self.counts = TextCounts()

    def documents(self, scratch: Path) -> Generator[str]:
        """Yield the text of each topic in order; `scratch` is unused."""
        yield from self.counts.documents_of(Row(name, self._topics[name]) for name in sorted(self._topics))

    def _sha256(self) -> str:
        total = hashlib.sha256()
        for name in sorted(self._topics):
            for text in (name, self._topics[name]):
                total.update(hashlib.sha256(text.encode()).digest())
        return total.hexdigest()
