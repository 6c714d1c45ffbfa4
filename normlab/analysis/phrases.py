"""Parts of sentences: names in a list, and counts."""

from collections.abc import Sequence

MAX_NAMED = 5


def name_some(names: Sequence[str]) -> str:
    """Return at most `MAX_NAMED` names, separated by semicolons, and the number of the others."""
    more = [f"{len(names) - MAX_NAMED + 1} more"] if len(names) > MAX_NAMED else []
    return "; ".join([*names[: MAX_NAMED - len(more)], *more])


def counted(n: int, noun: str) -> str:
    """Return `1 run` or `3 runs`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
