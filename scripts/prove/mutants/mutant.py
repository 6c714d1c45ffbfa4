"""The mutant, and the checks that it is run against."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from normlab.verify.check import Check

Checks = Callable[[], Iterator[Check]]


@dataclass(frozen=True, slots=True)
class Mutant:
    entry: str
    text: str
    """The mistake: the line before and after, or the fields of a row. A key of EQUIVALENT."""
    apply: Callable[[], None]
    """Puts the mistake into the catalogue of the current process."""


UNCHANGED = "nothing is wrong"
"""The text of a mutant without a mistake, which no check may detect."""
