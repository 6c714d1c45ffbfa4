"""Catalogue entries of the norms and placements that loaded plugins register."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from normlab import catalogue
from normlab.norms.base import NORMS
from normlab.placements.base import PLACEMENTS
from normlab.plugins import registered_by_plugins

Entry = dict[str, Any]

_DECLARED = (
    "formula", "formulas", "opens", "closes", "inside", "incompatible_inits", "source", "note",
    "oracle", "oracle_kind", "parameters", "starts", "unit_length", "blind_to", "equals", "pitfalls", "causal", "init",
)  # fmt: skip
"""Class attributes of a norm or placement that become keys of its entry."""


def plugin_norms() -> list[Entry]:
    """Return an entry for each norm of a plugin, with the keys of `catalogue.norms`."""
    norms = [(name, NORMS[name]) for kind, name in registered_by_plugins() if kind == "norm"]
    return [_entry(norm, name) | {"starts": norm.all_starts()} for name, norm in norms]


def plugin_placements() -> list[Entry]:
    """Return an entry for each placement of a plugin, with the keys of `catalogue.placements`."""
    names = [name for kind, name in registered_by_plugins() if kind == "placement"]
    return [_entry(PLACEMENTS[name], name) | {"causal": catalogue.CAUSAL} for name in names]


def _entry(part: Any, name: str) -> Entry:
    """The declarations, options and documentation of a norm's class or of a placement."""
    cls = part if isinstance(part, type) else type(part)
    about = catalogue.options_of(inspect.getsource(inspect.getmodule(cls) or cls), cls.__name__)
    options = [
        {"option": field.name, "default": _default(field), "about": about.get(field.name, ""), **_limits(field)}
        for field in dataclasses.fields(cls)
        if field.name not in ("name", "preset")
    ]
    documentation = inspect.getdoc(cls) or ""
    # A placement of the algebra declares some attributes on its row, and the others on its class.
    row = getattr(part, "row", part)
    declared = {
        key: getattr(row if hasattr(row, key) else part, key)
        for key in _DECLARED
        if hasattr(row, key) or hasattr(part, key)
    }
    return declared | {
        "name": name,
        "about": documentation.partition("\n")[0],
        "options": options,
        "documentation": documentation,
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _limits(field: dataclasses.Field[Any]) -> Entry:
    return {key: limit for key, limit in field.metadata.items() if limit not in (None, ()) and key != "identity"}
