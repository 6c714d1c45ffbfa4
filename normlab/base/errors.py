"""Errors that a user can fix, shown as one line without a traceback. Any other exception is a bug of normlab."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from normlab.base.synonyms import nearest_values

OUT_OF_MEMORY = 12
"""Exit code of a process of normlab when memory ran out (ENOMEM).

The exit code is 2 after a NormlabError and 1 after any other exception.
"""
DISK_REFUSED = 28
"""Exit code of a rank after a DiskError (ENOSPC)."""


_NO_MEMORY = re.compile(
    r"out[ _]of[ _]memory|not enough memory|can(?:'|no)t allocate memory(?! in static TLS)|std::bad_alloc"
    r"|_ALLOC(?:ATION)?_FAILED|failed to (?:CUDA |host )*[mc]?alloc|failed to map segment",
    re.IGNORECASE,
)
"""The messages of failed allocations: of CUDA, its libraries, NCCL, Triton, torch, the C++ library and the system.

Shared memory that a kernel lacks (Triton's "out of resource") is not meant: a smaller batch would not help. Nor is
cuBLAS's "not initialized", which has other causes too. A loader without a static TLS block has memory.
"""


class NormlabError(Exception):
    """Base class; the message names the problem, the value and what to do. Exit code 2."""


class ConfigError(NormlabError):
    """An override, a value or a combination of values from which no run can be built."""


class OutOfMemoryError(ConfigError):
    """A run that ran out of memory while it trained."""


class DataError(NormlabError):
    """A corpus that cannot be read, or that is shorter than one context."""


class StoreError(NormlabError):
    """A run's record or checkpoint that cannot be read, or that another process holds."""


class DiskError(StoreError):
    """A file that the system could not write or read; the same command may succeed when the disk has space again."""


class StatisticsError(NormlabError):
    """A selected statistic that was not measured."""


def is_out_of_memory(error: BaseException | str) -> bool:
    """Return whether an exception or a line of a log reports that memory ran out, on the host or on a GPU."""
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None


def notify(line: str) -> None:
    # One write, so that lines of two threads do not mix.
    print(f"normlab: {printable(line)}\n", end="", file=sys.stderr)


def warn(message: object) -> None:
    print(f"warning: {one_line(message)}\n", end="", file=sys.stderr)


def did_you_mean(name: str, options: Iterable[str], titles: Mapping[str, str] | None = None, most: int = 1) -> str:
    """Return `" (did you mean 'x'?)"` for the options that `name` means or is close to, or "" if there is none.

    `titles` are other names of options, by option. At most `most` options are named.
    """
    nearest = nearest_values(name, options, titles, most)
    return f" (did you mean {' or '.join(map(repr, nearest))}?)" if nearest else ""


def shorten(names: Sequence[str], most: int = 8) -> str:
    """Return names separated by commas; of more than `most` the first ones, and the number of the others."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most:,} more"


def unknown(
    kind: str,
    name: str,
    options: Iterable[str],
    elsewhere: Mapping[str, str] | None = None,
    titles: Mapping[str, str] | None = None,
) -> str:
    """Return the message for an unknown name: the name, the closest choice and all choices.

    For a name that other code uses, the message says what that is here.
    """
    if elsewhere is not None:
        plain_name = re.sub(r"\W|_", "", name).lower()
        if plain_name in elsewhere:
            return f"unknown {kind} {name!r}; in normlab it is {elsewhere[plain_name]}"
    options = sorted(options)
    return f"unknown {kind} {name!r}{did_you_mean(name, options, titles)}: choose one of {', '.join(options)}"


def no_effect(setting: str, other_setting: str) -> ConfigError:
    """Return the error for a setting (`option=value`) that has no effect with another setting."""
    return ConfigError(
        f"{setting}: has no effect with {other_setting}; leave it out, or change {other_setting.partition('=')[0]}"
    )


def counted(n: float, noun: str, form: str = "") -> str:
    """Return `1 run` or `3 runs`; `form` is the format of the number, such as `,` for thousands."""
    number = f"{n:{form}}"
    if number == "1":
        return f"{number} {noun}"
    return f"{number} {noun}s"


def one_line(message: object) -> str:
    """Return a message on one line, with control characters escaped and long words cut."""
    line = " ".join(str(message).split())
    # The two ends of a long word, such as a path, identify it.
    line = re.sub(r"\S{400,}", lambda long: f"{long[0][:60]}...{long[0][-20:]}", line)
    return printable(line)


def printable(text: str, keep: str = "") -> str:
    """Return a text with every character that cannot be shown escaped, but for those in `keep`.

    Such characters are controls of a terminal, marks that reverse the direction of writing, and lone surrogates, which
    no file can hold. Every text that may be someone else's passes through this function before it is shown.
    """
    if text.isprintable():
        return text
    hidden = {char for char in set(text) if not char.isprintable() and char not in keep}
    return text.translate({ord(char): ascii(char)[1:-1] for char in hidden})
