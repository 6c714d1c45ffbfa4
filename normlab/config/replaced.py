"""Overrides that a later one of the same option replaces; imports nothing heavy, since `normlab list` reads it."""

from collections.abc import Iterator, Sequence

from normlab.config.arms import PREFIX


def replaced_overrides(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each override that a later one of the same option replaces, and the last one of that option."""
    typed: dict[str, list[str]] = {}
    for text in overrides:
        if text.startswith(PREFIX):
            continue  # two lists of arms are an error
        typed.setdefault(text.lstrip("+").partition("=")[0], []).append(text)
    for *earlier, last in typed.values():
        yield from ((text, last) for text in dict.fromkeys(earlier) if text != last)
