"""What is held out for validation: whole documents where there are enough of them, else the end of each.

Both rules depend on the text alone: not on the order or the names of files, and on no random number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

RULE = 1
"""Number of this file's rules; part of a cached corpus's key, raised when they change."""

MIN_DOCUMENTS = 20
"""Different documents below which the end of each one is held out instead of some of them whole."""

OVERSHOOT = 1.5
"""Whole documents take at most this many times the share that was asked for."""


def held_out_documents(digests: Sequence[bytes], lengths: Sequence[int], val_fraction: float) -> set[bytes]:
    """Contents that are held out whole, or none where the end of each document should be instead.

    Contents are gone through in the order of their SHA-256 and taken until they make up `val_fraction` of all
    characters; one that would take the share above 1.5 x `val_fraction` is passed over. Equal documents
    are taken or left together, so that no validation document was also trained on.

    Args:
        digests: SHA-256 of each document's UTF-8.
        lengths: Characters of each document.
        val_fraction: Share of all characters to hold out.

    Returns:
        Digests; empty where there are fewer than 20 different documents, or too few that are small enough.
    """
    characters: dict[bytes, int] = defaultdict(int)
    for digest, length in zip(digests, lengths, strict=True):
        characters[digest] += length
    if len(characters) < MIN_DOCUMENTS:
        return set()
    wanted, taken, held_out = val_fraction * sum(lengths), 0, set()
    for digest in sorted(characters):
        if taken + characters[digest] <= OVERSHOOT * wanted:
            taken += characters[digest]
            held_out.add(digest)
            if taken >= wanted:
                return held_out
    return set()


def tail_start(text: str, val_fraction: float) -> int:
    """Where the held-out end of a document starts.

    The last `val_fraction` of the characters, rounded down, less the rest of the line that it starts in;
    where that line takes more than half of it, the cut goes through the line.

    Returns:
        Index of the first character that is held out; `len(text)` where none is.
    """
    cut = len(text) - int(val_fraction * len(text))
    line_break = text.find("\n", max(cut - 1, 0), (cut + len(text)) // 2)
    return cut if line_break < 0 else line_break + 1
