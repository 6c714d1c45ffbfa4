"""Documents of a corpus: their counts, their file on disk, and the split into training and validation text.

The validation text is a set of complete documents if the corpus has enough of them, else the end of each document. Both
rules depend only on the text, not on the order or names of files or on random numbers.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from normlab.base.errors import DataError

SPLIT_VERSION = 1
"""Version of the split rules; part of the key of a cached corpus, raised when the rules change."""

MIN_DOCUMENTS = 20
"""Fewest distinct documents from which complete documents are held out."""

MAX_OVERSHOOT = 1.5
"""Largest ratio of the held-out fraction of the characters to `val_fraction`."""

BYTE_ORDER_MARK = "\ufeff"
"""Removed from every text, also from its middle, where files were concatenated. Unicode 3.2 deprecates all other uses
of this character."""


class SourceRow(NamedTuple):
    """What a file or a dataset has for one document, before anything is left out."""

    place: str
    """The file and the line, or the number of the row, for messages."""
    text: Any
    """None without a text; anything but text is an error."""
    joined: int = 1
    """Rows of the dataset that were joined to this one, with itself."""


@dataclass(slots=True)
class TextCounts:
    """What was read of the files of a corpus, or of its dataset; part of the record of a run."""

    rows: int = 0
    """Files or rows read: each became a document, was left out (counted below), or was joined with others to an
    article."""
    documents: int = 0
    empty: int = 0
    """Texts of no characters, which are left out."""
    null: int = 0
    """Rows without a text, which are left out."""

    def documents_of(self, rows: Iterable[SourceRow], column: str = "text") -> Iterator[str]:
        """Yield the texts of rows that are not empty; every text of a corpus passes through this function.

        Raises:
            DataError: A row is not text, or its text has half of a surrogate pair.
        """
        for place, text, joined in rows:
            self.rows += joined
            if text is None:
                self.null += 1
                continue
            if not isinstance(text, str):
                raise DataError(
                    f"{place}: column {column!r} is {text!r:.40}, not text; write it as text, or set data.column to "
                    "another column"
                )
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{place}: column {column!r} has half of a surrogate pair ({error}); write the complete character"
                ) from error
            text = text.replace(BYTE_ORDER_MARK, "")
            if text:
                self.documents += 1
                yield text
            else:
                self.empty += 1


class Spool:
    """Documents in a new file on disk, written once and read any number of times; the caller deletes the file."""

    def __init__(self, path: Path, documents: Iterable[str]) -> None:
        self._path = path
        with path.open("wb") as file:
            for text in documents:
                content = text.encode()
                file.write(len(content).to_bytes(8, "little") + content)

    def __iter__(self) -> Iterator[str]:
        with self._path.open("rb") as file:
            while length := file.read(8):
                yield file.read(int.from_bytes(length, "little")).decode()


def first_characters(documents: Iterable[str], characters: int) -> Iterator[str]:
    """Yield documents up to a total number of characters; the last document is cut."""
    for text in documents:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def held_out_documents(digests: Sequence[bytes], lengths: Sequence[int], val_fraction: float) -> set[bytes]:
    """Return the digests of the held-out documents; empty to hold out the ends of documents.

    Documents are added in the order of their SHA-256 until they have `val_fraction` of all characters. A document that
    would raise the fraction above 1.5 x `val_fraction` is skipped. Equal documents stay together, so that no validation
    document is also a training document. The set is empty if the corpus has fewer than 20 distinct documents, or if
    the documents that fit have less than `val_fraction` of the characters. `digests` and `lengths` are the SHA-256 of
    the UTF-8 of each document, and its number of characters.
    """
    characters: dict[bytes, int] = defaultdict(int)
    for digest, length in zip(digests, lengths, strict=True):
        characters[digest] += length
    if len(characters) < MIN_DOCUMENTS:
        return set()
    target, total = val_fraction * sum(lengths), 0
    held_out: set[bytes] = set()
    # By hash: the choice is random to the text, and the same in whatever order the files are listed.
    for digest in sorted(characters):
        if total + characters[digest] <= MAX_OVERSHOOT * target:
            total += characters[digest]
            held_out.add(digest)
            if total >= target:
                return held_out
    return set()


def tail_start(text: str, val_fraction: float) -> int:
    """Return the index of the first held-out character of a document, `len(text)` if none.

    The tail is the last `val_fraction` of the characters, rounded down. The tail starts at the beginning of a line,
    unless that would make it less than half as long.
    """
    cut = len(text) - int(val_fraction * len(text))
    line_break = text.find("\n", max(cut - 1, 0), (cut + len(text)) // 2)
    if line_break < 0:
        return cut
    return line_break + 1
