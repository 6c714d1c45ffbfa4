"""Typed options: a dataclass field that carries its own limits and says whether it is part of a run's identity.

A config is a tree of `kw_only, slots` dataclasses. The docstring under each field is its documentation
(`normlab list` reads it from the source); `option(...)` adds what a type cannot say.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from normlab.errors import ConfigError, nearest

_UNSET = object()
_SWITCH = {"true": "on", "yes": "on", "1": "on", "false": "off", "no": "off", "0": "off"}
"""What is meant by words that other programs take for a switch."""


def option(
    default: Any = _UNSET,
    *,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    longest: int | None = None,
    identity: bool = True,
    absent: Any = _UNSET,
) -> Any:
    """A dataclass field with limits.

    Args:
        default: The value when nobody says otherwise; a list is copied for each config.
        choices: The only strings allowed.
        at_least: Smallest value, itself allowed. `above`, `at_most`, `below` likewise.
        above: Largest value that is too small.
        at_most: Largest value, itself allowed.
        below: Smallest value that is too large.
        longest: Most characters of a text, or of each in a list; it may then be neither empty nor hold what
            cannot be printed.
        identity: Whether it can change the numbers that a run produces. Cadences, names and sinks cannot.
        absent: For a field that was added after runs had been made: the value that means "as before it
            existed". While the field holds it, it is left out of the identity, so old runs keep theirs.
            Declared once and never changed, whatever becomes of the default.
    """
    metadata: dict[str, Any] = {
        "choices": choices, "at_least": at_least, "above": above, "at_most": at_most, "below": below,
        "longest": longest, "identity": identity,
    }  # fmt: skip
    if absent is not _UNSET:
        metadata["absent"] = absent
    if default is _UNSET:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check(config: Any, prefix: str = "") -> None:
    """Hold every value of a config tree against its own limits.

    Raises:
        ConfigError: Naming the word, the value that was seen and what is allowed.
    """
    for field in dataclasses.fields(config):
        value, word = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            check(value, word + ".")
        elif value is not None:
            _check_value(word, value, field.metadata)


def _check_value(word: str, value: Any, limits: Any) -> None:
    choices = limits.get("choices")
    if choices and value not in choices:
        close = nearest(_SWITCH.get(str(value).lower(), str(value)), choices)
        raise ConfigError(f"{word}={value}: choose one of {', '.join(choices)}{close}")
    if (longest := limits.get("longest")) is not None:
        for text in value if isinstance(value, list) else [value]:
            _check_text(word, str(text), longest)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        raise ConfigError(f"{word}={value}: must be a finite number")
    for limit, holds, words in (
        ("at_least", lambda v, m: v >= m, "must be at least"),
        ("above", lambda v, m: v > m, "must be greater than"),
        ("at_most", lambda v, m: v <= m, "must be at most"),
        ("below", lambda v, m: v < m, "must be less than"),
    ):
        bound = limits.get(limit)
        if bound is not None and not holds(value, bound):
            raise ConfigError(f"{word}={value}: {words} {bound}")


def _check_text(word: str, text: str, longest: int) -> None:
    if not text.strip():
        raise ConfigError(f"{word}={text}: is empty; give it some characters, or leave it out")
    if not text.isprintable():
        raise ConfigError(f"{word}={text!a}: holds characters that cannot be shown; leave them out")
    if len(text) > longest:
        raise ConfigError(f"{word}={text}: has {len(text)} characters; use at most {longest}")


def identity_tree(config: Any) -> dict[str, Any]:
    """The part of a config that can change a run's numbers, as plain values for canonical JSON."""
    tree: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not field.metadata.get("identity", True):
            continue
        if "absent" in field.metadata and value == field.metadata["absent"]:
            continue
        tree[field.name] = identity_tree(value) if dataclasses.is_dataclass(value) else value
    return tree


def plain_tree(config: Any) -> dict[str, Any]:
    """The whole config as plain values."""
    return dataclasses.asdict(config)


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf of a config tree by its dotted word, in order."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= leaves(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat


def from_tree(kind: type, tree: Mapping[str, Any]) -> Any:
    """The config of a class from its plain values; a field that is not there holds what it held before it existed.

    Raises:
        ConfigError: The tree has a word that the class does not know, lacks one that changes numbers, or has a
            value of another kind.
    """
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{kind.__name__} is {tree!r:.40}")
    known = {field.name: field for field in dataclasses.fields(kind)}
    if foreign := [word for word in tree if word not in known]:
        raise ConfigError(f"{kind.__name__} has no option {', '.join(foreign)}: written by a newer normlab; update it")
    hints = typing.get_type_hints(kind)
    for name, field in known.items():
        if name in tree:
            if not _is_of(tree[name], hints[name]):
                raise ConfigError(f"{kind.__name__}.{name} is {tree[name]!r:.40}")
        elif field.metadata.get("identity", True) and "absent" not in field.metadata:
            raise ConfigError(f"{kind.__name__} lacks {name}")
    before = {
        name: field.metadata["absent"]
        for name, field in known.items()
        if name not in tree and "absent" in field.metadata
    }
    return kind(**tree, **before)


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value is of a field's type, as far as plain values go; a whole number is a float too."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_of(value, one) for one in typing.get_args(hint))
    plain = typing.get_origin(hint) or hint
    if plain is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if plain is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, plain) if plain in (str, bool, list, dict, types.NoneType) else True
