"""Convert dataclasses to JSON, and read them from JSON that may be damaged.

A field that is missing or has the wrong type gets its default, usually None:

    @dataclass(frozen=True, slots=True)
    class Pack:
        sweep: str | None = json_field(text)
        runs: tuple[str, ...] = json_field(texts)

    parse_part(Pack, {"sweep": 3})  # Pack(sweep=None, runs=())
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import field, fields, is_dataclass
from typing import Any, TypeVar

from normlab.store.format import number

T = TypeVar("T")
Setting = str | int | float | bool | None
"""The value of an option."""


def as_setting(value: Any) -> Setting:
    """Return the value of an option: a list or a mapping as JSON."""
    return value if isinstance(value, str | int | float | bool) or value is None else json.dumps(value)


def flatten(tree: Any, prefix: str = "") -> dict[str, Setting]:
    """Return the values of nested mappings by dotted name."""
    flat: dict[str, Setting] = {}
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = as_setting(value)
    return flat


def finite(value: Any) -> float | None:
    """Return a finite number of the record; None for anything else."""
    known = number(value)
    return known if known is not None and math.isfinite(known) else None


def text(value: Any) -> str | None:
    """Return a text of the record; None for anything else."""
    return value if isinstance(value, str) else None


def texts(value: Any) -> tuple[str, ...]:
    """Return a list of the record as texts; empty for anything else."""
    return tuple(map(str, value)) if isinstance(value, list) else ()


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping of the record; empty for anything else."""
    return value if isinstance(value, Mapping) else {}


def mapping_or_none(value: Any) -> Mapping[str, Any] | None:
    """Return a mapping of the record; None for anything else."""
    return value if isinstance(value, Mapping) else None


def json_field(parse: Callable[[Any], Any], *, optional: bool = False) -> Any:
    """Declare a field that holds `parse` of the JSON value with the field's name, or of None without one.

    Args:
        parse: Parses the value.
        optional: Whether `part_to_json` leaves the field out while it has its default.
    """
    return field(default_factory=lambda: parse(None), metadata={"parse": parse, "optional": optional})


def json_part(cls: type[Any], *, optional: bool = False) -> Any:
    """Declare a field that holds another such dataclass."""
    return json_field(lambda tree: parse_part(cls, tree), optional=optional)


def parse_part(cls: type[T], tree: Any) -> T:
    """Return a part of the record from JSON, in which any field may be missing or of another type."""
    declared = fields(cls)  # pyright: ignore[reportArgumentType]
    return cls(**{each.name: each.metadata["parse"](mapping(tree).get(each.name)) for each in declared})


def part_to_json(part: Any) -> dict[str, Any]:
    """Return a part of the record as JSON values, the inverse of `parse_part`."""
    tree: dict[str, Any] = {}
    for each in fields(part):
        value = getattr(part, each.name)
        if each.metadata["optional"] and value == each.metadata["parse"](None):
            continue
        tree[each.name] = (
            part_to_json(value) if is_dataclass(value) else list(value) if isinstance(value, tuple) else value
        )
    return tree
