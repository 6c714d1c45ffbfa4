"""Errors that a user can mend. Anything else that is raised is a mistake of ours."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class NormlabError(Exception):
    """What was wrong, what was seen, what to do: one line, shown without a traceback, exit code 2."""


class ConfigError(NormlabError):
    """A word, a value or a combination of them that no run can be made of."""


class MemoryRanOut(ConfigError):
    """A run that the machine has no memory for, as it turned out."""


class DataError(NormlabError):
    """A corpus that cannot be read, or cannot fill one context."""


class StoreError(NormlabError):
    """A run's record or checkpoint that cannot be read, or is in another process's hands."""


class StatisticsError(NormlabError):
    """A statistic that should have been measured, and was not."""


def nearest(word: str, options: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the option closest to `word`, or nothing where none is close."""
    close = difflib.get_close_matches(word, list(options), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def unknown(kind: str, word: str, options: Iterable[str]) -> str:
    """The one sentence for a name that is not among its options: the word, the choices, the nearest."""
    options = sorted(options)
    return f"unknown {kind} {word!r}: choose one of {', '.join(options)}{nearest(word, options)}"


def one_line(message: object) -> str:
    """A message as it is shown: on one line, without what a terminal takes for an order, long words shortened."""
    line = " ".join(str(message).split())
    line = re.sub(r"\S{400,}", lambda long: f"{long[0][:60]}...{long[0][-20:]}", line)
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
