"""What a mutant is, and what it is shown to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from normlab.verify.check import Check

Checks = Callable[[], Iterator[Check]]


@dataclass(frozen=True, slots=True)
class Mutant:
    """An entry with one thing wrong."""

    entry: str
    text: str
    """What is wrong: the line as it is now, or the fields of a row. A key of EQUIVALENT."""
    apply: Callable[[], None]
    """Breaks the entry, in the process that calls it."""


AS_IT_IS = "nothing is wrong"
"""The text of what should not be seen."""
