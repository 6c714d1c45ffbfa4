"""Parts of sentences: names in a list."""

from collections.abc import Sequence

MAX_NAMED = 5


def name_some(names: Sequence[str]) -> str:
    """Return at most `MAX_NAMED` names, separated by semicolons, and the number of the others."""
    more = [f"{len(names) - MAX_NAMED + 1} more"] if len(names) > MAX_NAMED else []
    return "; ".join([*names[: MAX_NAMED - len(more)], *more])
