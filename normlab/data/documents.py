"""Documents of a corpus: their file on disk, and the split into training and validation text.

The validation text is a set of complete documents if the corpus has enough of them, else the end of each document. Both
rules depend only on the text, not on the order or names of files or on random numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

SPLIT_VERSION = 1
"""Version of the split rules; part of the key of a cached corpus, raised when the rules change."""

MIN_DOCUMENTS = 20
"""Fewest distinct documents from which complete documents are held out."""

MAX_OVERSHOOT = 1.5
"""Largest ratio of the held-out fraction of the characters to `val_fraction`."""


class Spool:
    """Documents in a file on disk, written once and read any number of times.

    Empty documents are dropped.

    Args:
        path: A new file; the caller deletes it when the documents are no longer needed.
        documents: The documents; the iterator is consumed.
    """

    def __init__(self, path: Path, documents: Iterable[str]) -> None:
        self._path = path
        with path.open("wb") as file:
            for text in documents:
                if content := text.encode():
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
    the documents that fit have less than `val_fraction` of the characters.

    Args:
        digests: SHA-256 of each document's UTF-8.
        lengths: Characters of each document.
        val_fraction: Fraction of all characters to hold out.
    """
    characters: dict[bytes, int] = defaultdict(int)
    for digest, length in zip(digests, lengths, strict=True):
        characters[digest] += length
    if len(characters) < MIN_DOCUMENTS:
        return set()
    target, total, held_out = val_fraction * sum(lengths), 0, set()
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
    return cut if line_break < 0 else line_break + 1
