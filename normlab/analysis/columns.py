"""The columns of tables of runs, of cells and of tests: a value with its key, title, format and definition.

A column is data. `report/tables.py` draws it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class Definition(str):
    """A note below a table that explains a word, as `word: what it is`.

    Every table has the other notes: units, and what one must know of these runs.
    """

    __slots__ = ()

    @property
    def word(self) -> str:
        return self.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Column(Generic[Item]):
    """A column of a table with a row for each item: by its key in JSON and CSV, by its title in a text."""

    key: str
    value: Callable[[Item], Any]
    """The value of an item in JSON and CSV."""
    title: str = ""
    """The heading; empty if a text has no such column."""
    format: Callable[[Any], str] = str
    """The text of a value that is not None."""
    note: str = ""
    """The definition below a text, if the column needs one."""
    shown: Callable[[Item], Any] | None = None
    """What `format` receives, if that is not `value`; None is an empty text."""
    is_default: bool = True
    """Whether a text has it without a request, if it is not empty."""
    is_number: bool = False
    """Whether a table aligns it to the right, and drops it if the terminal is too narrow."""
    is_hidden: bool = False
    """Whether a table leaves it out, but not Markdown and LaTeX."""
    is_shared: bool = False
    """Whether a value that all runs share moves to a line above the table."""
    is_kept: bool = False
    """Whether a narrow table keeps it."""

    def text(self, item: Item) -> str:
        read = self.value if self.shown is None else self.shown
        return self.text_of(read(item))

    def text_of(self, value: Any) -> str:
        """Return a value as text; None is an empty text."""
        if value is None:
            return ""
        return self.format(value)


def format_p(p: float) -> str:
    if p < 1e-4:
        return "<0.0001"
    return f"{p:.2g}"
