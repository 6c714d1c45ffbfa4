"""Every value of a norm's or placement's options, one option at a time."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from normlab.base.errors import ConfigError
from normlab.base.options import check
from normlab.catalogue.norms.base import NormConfig

LARGE_EPS = 0.3
"""An eps large enough that its position in a formula changes the result."""
NAME_FIELDS = ("name", "preset")


def label_of(options: Any) -> str:
    """Return the name and the options that differ from their defaults: `rmsnorm eps_mode=clamp`."""
    default = type(options)(name=options.name)
    values = {field.name: getattr(options, field.name) for field in option_fields(options)}
    overrides = [f"{name}={value}" for name, value in values.items() if value != getattr(default, name)]
    return " ".join([options.name, *overrides])


def option_fields(options: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(options) if field.name not in NAME_FIELDS]


def other_values(options: Any, field: dataclasses.Field[Any], width: int) -> Iterator[Any]:
    """Yield the options with each other valid value of one field (eps=0 if required)."""
    for value in _candidates(field, getattr(options, field.name)):
        changed = dataclasses.replace(options, **{field.name: value})
        if getattr(options, "eps", 0) != 0 and not is_valid(changed, width):
            changed = dataclasses.replace(changed, eps=0.0)
        if is_valid(changed, width):
            yield changed


def is_valid(options: Any, width: int) -> bool:
    try:
        check(options)
        options.validate()
        if isinstance(options, NormConfig):
            options.check_width(width)
    except ConfigError:
        return False
    return True


def variants(norm: NormConfig, width: int) -> list[NormConfig]:
    """Return the norm, the norm with one option changed, and each of these with a large eps."""
    configs = [norm, *(changed for field in option_fields(norm) for changed in other_values(norm, field, width))]
    if hasattr(norm, "eps"):
        large = [dataclasses.replace(variant, eps=LARGE_EPS) for variant in configs]  # pyright: ignore[reportCallIssue]
        configs += [variant for variant in large if is_valid(variant, width)]
    return list({label_of(variant): variant for variant in configs}.values())


def _candidates(field: dataclasses.Field[Any], current: Any) -> list[Any]:
    choices, kind = field.metadata.get("choices"), str(field.type)
    if choices:
        return [choice for choice in choices if choice != current]
    unset = [None] if "None" in kind and current is not None else []
    if isinstance(current, bool) or "bool" in kind:
        return [value for value in (True, False) if value is not current]
    if "int" in kind:
        low = int(field.metadata.get("at_least") or 1)
        return [value for value in (low, 2, 3, 4, 8) if value != current] + unset
    if "float" in kind:
        return [value for value in (0.0, 0.3, 0.7, 3.0) if value != current] + unset
    return []
