"""Parts of sentences: names in a list."""

from collections.abc import Sequence

MAX_NAMED = 5


def name_some(names: Sequence[str]) -> str:
    """Return at most `MAX_NAMED` names, separated by semicolons, and the number of the others."""
    if len(names) <= MAX_NAMED:
        return "; ".join(names)
    named = names[: MAX_NAMED - 1]
    return "; ".join([*named, f"{len(names) - len(named)} more"])
