"""Every way in which an entry's options can be set, one option at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from normlab.errors import ConfigError
from normlab.norms.base import NormConfig
from normlab.options import check

LARGE_EPS = 0.3
"""An eps that shows where it stands."""
LABELS = ("name", "preset")


def called(options: Any) -> str:
    """An entry with the options that differ from their defaults, as words: `rmsnorm eps_mode=clamp`."""
    words = [
        f"{field.name}={getattr(options, field.name)}"
        for field in dataclasses.fields(options)
        if field.name not in LABELS and getattr(options, field.name) != _default(field)
    ]
    return " ".join([options.name, *words])


def others(options: Any, field: dataclasses.Field[Any], width: int) -> Iterator[Any]:
    """The options with another value in one field, for each value that is allowed there; with eps=0 if it must be."""
    for value in _values(field, getattr(options, field.name)):
        other = dataclasses.replace(options, **{field.name: value})
        if getattr(options, "eps", 0) != 0 and not allowed(other, width):
            other = dataclasses.replace(other, eps=0.0)
        if allowed(other, width):
            yield other


def allowed(options: Any, width: int) -> bool:
    """Whether an entry can be had with these options."""
    try:
        check(options)
        options.validate()
        if isinstance(options, NormConfig):
            options.check_width(width)
    except ConfigError:
        return False
    return True


def variants(norm: NormConfig, width: int) -> list[NormConfig]:
    """The norm as it is, with each option changed by itself, and all of these with an eps that is large."""
    fields = [field for field in dataclasses.fields(norm) if field.name not in LABELS]
    found = [norm, *(other for field in fields for other in others(norm, field, width))]
    if any(field.name == "eps" for field in fields):
        large = [dataclasses.replace(each, eps=LARGE_EPS) for each in found]  # pyright: ignore[reportCallIssue]
        found += [each for each in large if allowed(each, width)]
    return list({called(each): each for each in found}.values())


def _values(field: dataclasses.Field[Any], now: Any) -> list[Any]:
    choices, kind = field.metadata.get("choices"), str(field.type)
    if choices:
        return [choice for choice in choices if choice != now]
    unset = [None] if "None" in kind and now is not None else []
    if isinstance(now, bool) or "bool" in kind:
        return [value for value in (True, False) if value is not now]
    if "int" in kind:
        low = int(field.metadata.get("at_least") or 1)
        return [value for value in (low, 2, 3, 4, 8) if value != now] + unset
    if "float" in kind:
        return [value for value in (0.0, 0.3, 0.7, 3.0) if value != now] + unset
    return []


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
