"""Typed options: dataclass fields with limits, and which of them identify a run.

A config is a tree of `kw_only, slots` dataclasses. `option(...)` gives a field its help, limits and other properties.
"""

import dataclasses
import math
import operator
import struct
from collections.abc import Collection, Iterator
from copy import copy
from functools import cache
from typing import Any

from normlab.base.errors import ConfigError, did_you_mean

_UNSET = object()

_BOUNDS = (
    ("at_least", operator.ge, "must be at least"),
    ("above", operator.gt, "must be greater than"),
    ("at_most", operator.le, "must be at most"),
    ("below", operator.lt, "must be less than"),
)
LIMITS = ("choices", *(limit for limit, _, _ in _BOUNDS), "longest")
"""The keys of a field's metadata that limit its value."""
_SMALLEST, _LARGEST = 1.1754944e-38, 3.4028234e38
"""The range of float32 without the subnormal numbers, which compiled kernels replace by 0."""
LARGEST_INTEGER = 2**63 - 1
"""The largest int64, in which tensors and files hold a whole number."""


def option(
    default: Any = _UNSET,
    help: str = "",
    *,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    longest: int | None = None,
    identity: bool = True,
    is_later: bool = False,
) -> Any:
    """Return a dataclass field with help and limits.

    The value of every float option must be in the range of float32, and within its limits there too, because many of
    them become float32 numbers of a tensor. The value of every int option must be in the range of int64.

    Args:
        default: The default value; a list or a mapping is copied for each config.
        help: What the option means, in its unit; a subclass that changes only the default leaves it out.
        choices: The allowed strings, of the option or of the elements of its list.
        at_least: Inclusive lower limit.
        above: Exclusive lower limit.
        at_most: Inclusive upper limit.
        below: Exclusive upper limit.
        longest: Most characters of a text, or of each text in a list; the text must then be printable and not empty.
        identity: Whether the option can change the numbers of a run. Cadences, names and trackers cannot.
        is_later: Whether older versions lack the option. Its default is then not part of a run's identity, so that the
            ids of runs without it stay as they were.
    """
    metadata: dict[str, Any] = {
        "choices": choices, "at_least": at_least, "above": above, "at_most": at_most, "below": below,
        "longest": longest, "identity": identity, "is_later": is_later, "help": help,
    }  # fmt: skip
    if default is _UNSET:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check(config: Any, prefix: str = "", checked: Collection[str] = ()) -> None:
    """Check every value of a config tree against its own limits, but for fields that are `checked` already."""
    for name, limits in _limits(type(config)).items():
        if name in checked:
            continue
        value = getattr(config, name)
        if value is None or (not limits and isinstance(value, str | bool)):
            continue
        if dataclasses.is_dataclass(value):
            check(value, f"{prefix}{name}.")
        else:
            _check_value(prefix + name, value, limits)


# Readers check the options of thousands of runs.
@cache
def _limits(kind: type[Any]) -> dict[str, dict[str, Any]]:
    """Return the limits of each field of a class of options by their keys of `LIMITS`.

    For messages, the limits of a field that may be None also have the text `or_null`.
    """
    limits: dict[str, dict[str, Any]] = {}
    for field in dataclasses.fields(kind):
        limits_of_field: dict[str, Any] = {}
        for key in LIMITS:
            limit = field.metadata.get(key)
            if limit not in (None, ()):
                limits_of_field[key] = limit
        if limits_of_field and "None" in str(field.type):
            limits_of_field["or_null"] = ", or null"
        limits[field.name] = limits_of_field
    return limits


def _check_value(name: str, value: Any, limits: Any) -> None:
    elements = value if isinstance(value, list) else [value]
    choices = limits.get("choices")
    if choices is not None:
        for choice in elements:
            if choice not in choices:
                hint = did_you_mean(str(choice), choices)
                raise ConfigError(f"{name}={choice}{hint}: choose one of {', '.join(choices)}")
    if isinstance(value, list) and any(item is None or isinstance(item, list | dict) for item in value):
        raise ConfigError(f"{name}={value}: its elements must be texts or numbers; write {name}=[a,b]")
    longest = limits.get("longest")
    if longest is not None:
        for text in elements:
            if not (text.strip() and text.isprintable() and len(text) <= longest):
                raise ConfigError(f"{name}={text!a}: must be a printable text of 1 to {longest} characters")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        largest = limits.get("at_most", LARGEST_INTEGER)
        raise ConfigError(f"{name}={value}: is outside the range of int64; choose at most {largest}")
    if not math.isfinite(value):
        raise ConfigError(f"{name}={value}: must be a finite number")
    if isinstance(value, float) and value and not _SMALLEST <= abs(value) <= _LARGEST:
        raise ConfigError(
            f"{name}={value}: is outside the range of float32; choose a size between {_SMALLEST:.2g} and {_LARGEST:.2g}"
        )
    for limit, holds, rule in _BOUNDS:
        bound = limits.get(limit)
        if bound is None:
            continue
        if not holds(value, bound):
            raise ConfigError(f"{name}={value}: {rule} {bound}{limits.get('or_null', '')}")
        # A float64 number just inside a limit may be rounded onto it, such as 1 - 1e-12 with `below=1`.
        if isinstance(value, float) and not holds(_to_float32(value), _to_float32(bound)):
            raise ConfigError(f"{name}={value}: is {_to_float32(value)} in float32, and {rule} {bound}")


def _to_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def identity_tree(config: Any) -> dict[str, Any]:
    """Return the options that can change a run's numbers, as nested plain values."""
    tree: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not field.metadata.get("identity", True):
            continue
        if field.metadata.get("is_later") and value == default_of(field):
            continue
        if dataclasses.is_dataclass(value):
            value = identity_tree(value)
        tree[field.name] = value
    return tree


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field that has one."""
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


def override_text(value: object) -> str:
    """Return a value as an override has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(override_text, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{override_text(item)}" for key, item in value.items()) + "}"
    return str(value)


def plain_tree(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def option_fields(kind: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yield the dotted name and the field of each option of a config class, in order."""
    for field in dataclasses.fields(kind):
        # The default of a group of options is its class.
        group = field.default_factory
        if dataclasses.is_dataclass(group):
            yield from option_fields(group, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


def flatten_options(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the value of every option of a config tree by its dotted name, in order."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten_options(value, f"{prefix}{field.name}.")
        elif isinstance(value, dict):
            for key, element in value.items():
                flat[f"{prefix}{field.name}.{key}"] = element
        else:
            flat[prefix + field.name] = value
    return flat
