"""The norms and placements of the plugins that are loaded, as entries of the catalogue."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from normlab import catalogue
from normlab.norms.base import NORMS
from normlab.placements.base import PLACEMENTS
from normlab.source import registered_by_plugins

Entry = dict[str, Any]

LABELS = ("name", "preset")
"""Fields of a config that are no options."""
DECLARED = (
    "formula", "formulas", "opens", "closes", "inside", "incompatible_inits", "source", "note",
    "oracle", "oracle_kind", "parameters", "starts", "unit_length", "blind_to", "equals", "pitfalls", "causal", "init",
)  # fmt: skip
"""Class attributes of a norm or placement that become keys of its entry."""


def plugin_norms() -> list[Entry]:
    """Return an entry for each norm that a plugin registers, with the keys of `catalogue.norms`."""
    return [_entry(NORMS[name], name) | {"starts": NORMS[name].all_starts()} for name in _names("norm")]


def plugin_placements() -> list[Entry]:
    """Return an entry for each placement that a plugin registers, with the keys of `catalogue.placements`."""
    return [_entry(PLACEMENTS[name], name) | {"causal": catalogue.CAUSAL} for name in _names("placement")]


def _names(kind: str) -> list[str]:
    return [name for of, name in registered_by_plugins() if of == kind]


def _entry(thing: Any, name: str) -> Entry:
    """What a norm's class, or a placement, declares, with its options and its documentation."""
    kind = thing if isinstance(thing, type) else type(thing)
    about = catalogue.options_of(inspect.getsource(inspect.getmodule(kind) or kind), kind.__name__)
    options = [
        {"option": field.name, "default": _default(field), "about": about.get(field.name, ""), **_limits(field)}
        for field in dataclasses.fields(kind)
        if field.name not in LABELS
    ]
    documentation = inspect.getdoc(kind) or ""
    # A row of the algebra declares what its class does not.
    owners = {key: getattr(thing, "row", thing) for key in DECLARED}
    owners = {key: owner if hasattr(owner, key) else thing for key, owner in owners.items()}
    declared = {key: getattr(owner, key) for key, owner in owners.items() if hasattr(owner, key)}
    return declared | {
        "name": name, "about": documentation.partition("\n")[0], "options": options, "documentation": documentation,
    }  # fmt: skip


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _limits(field: dataclasses.Field[Any]) -> Entry:
    """The limits of an option that are set."""
    return {key: limit for key, limit in field.metadata.items() if limit not in (None, ()) and key != "identity"}
