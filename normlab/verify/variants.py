"""Every value of a norm's or placement's options, one option at a time."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from normlab.base.errors import ConfigError
from normlab.base.options import check, override_text
from normlab.catalogue.norms.base import NormConfig

LARGE_EPS = 0.3
"""An eps large enough that its position in a formula changes the result."""
NAME_FIELDS = ("name", "preset", "at")


def label_of(options: Any) -> str:
    """Return the name and the options that differ from their defaults: `rmsnorm eps_mode=clamp at.final.eps=1e-08`."""
    default = type(options)(name=options.name)
    label = options.name
    for field in option_fields(options):
        value = getattr(options, field.name)
        if value != getattr(default, field.name):
            label += f" {field.name}={override_text(value)}"
    if isinstance(options, NormConfig):
        for key, value in options.at.items():
            label += f" at.{key}={override_text(value)}"
    return label


def option_fields(options: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(options) if field.name not in NAME_FIELDS]


def other_values(options: Any, field: dataclasses.Field[Any], width: int) -> Iterator[Any]:
    """Yield the options with each other valid value of one field (eps=0 if required)."""
    for value in _candidates(field, getattr(options, field.name)):
        changed = dataclasses.replace(options, **{field.name: value})
        # Some options are valid only without an eps.
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
    configs = [norm]
    for field in option_fields(norm):
        configs += other_values(norm, field, width)
    # With a large eps, its position in the formula shows in the result.
    if hasattr(norm, "eps"):
        large = [dataclasses.replace(variant, eps=LARGE_EPS) for variant in configs]  # pyright: ignore[reportCallIssue]
        configs += [variant for variant in large if is_valid(variant, width)]
    return list({label_of(variant): variant for variant in configs}.values())


def _candidates(field: dataclasses.Field[Any], current: Any) -> list[Any]:
    """Return other values of an option: all choices, both truths, or a few numbers, and None if it may be unset."""
    choices, kind = field.metadata.get("choices"), str(field.type)
    if choices:
        return [choice for choice in choices if choice != current]
    if isinstance(current, bool) or "bool" in kind:
        return [value for value in (True, False) if value is not current]
    candidates: list[Any] = []
    if "int" in kind:
        candidates = [int(field.metadata.get("at_least") or 1), 2, 3, 4, 8]
    elif "float" in kind:
        candidates = [0.0, 0.3, 0.7, 3.0]
    if candidates and "None" in kind and current is not None:
        candidates.append(None)
    return [value for value in candidates if value != current]
