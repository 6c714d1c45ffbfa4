"""The entries of the catalogue for `normlab list`, tab completion and `normlab explain`, each by its own declarations.

Importing the declarations takes seconds, of norms and some placements even torch. So `scripts/prove/write_catalogue.py`
writes the entries to `entries.json`, which is read here; a test compares the file with the declarations.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from normlab.base.errors import ConfigError, unknown
from normlab.base.options import LIMITS, option_fields
from normlab.base.plugins import registered_by_plugins
from normlab.catalogue.other_names import OTHER_NAMES

FILE = Path(__file__).with_suffix(".json")

Entry = dict[str, Any]

CAUSAL = "if the norm is"
"""Whether a placement is causal: a placement never mixes tokens, as `normlab verify` checks."""
_DECLARED = (
    "title", "formula", "formulas", "weights_formula", "embedding_formula", "head_weights_formula", "head_formula",
    "inside", "incompatible_inits", "source", "note",
    "verified_by", "reference_kind", "parameters", "initial_values", "unit_length",
    "invariant_to", "equals", "laws", "pitfalls", "causal", "init", "init_source", "embedding_norm", "final_norm",
    "hub", "batch_statistics",
)  # fmt: skip
"""Class attributes, or fields of a row of the algebra, that become keys of an entry."""


def entries(kind: str) -> list[Entry]:
    """Return every entry of a kind, from the file."""
    return json.loads(FILE.read_bytes())[kind]


norms = partial(entries, "norms")
"""Every norm, each followed by its presets."""
placements = partial(entries, "placements")
"""Every placement: the rows of the algebra, then those with their own wiring."""
models = partial(entries, "models")
"""Every preset of the model, with the options that it sets."""
recipes = partial(entries, "recipes")
"""Every recipe: presets, and options beside them."""
data = partial(entries, "data")
optim = partial(entries, "optim")
init = partial(entries, "init")
"""Every init rule, with the placements that use it and those that it does not fit."""
defaults = partial(entries, "defaults")
"""The norm, placement, corpus and optimiser that a run has without an override, each with its `group`."""
stats = partial(entries, "stats")
"""Every preset of statistics, with the options that it sets."""
options = partial(entries, "options")
"""Every option of a run or a sweep outside norm, placement, data and optim, by its dotted name."""


KINDS = {"norm": "norms", "placement": "placements", "data": "data", "optim": "optim"}
"""The kinds of entries whose names are values of an option, by the option."""


def titles(option: str) -> dict[str, str]:
    """Return the titles of the values of an option, by value, with those of plugins; values without one are left out.

    A title is the name in papers. Tables and figures print it, and hints know it.
    """
    if option not in KINDS:
        return {}
    titles = dict(_stored_titles(option))
    # Describing all entries takes longer than reading the file, so it waits for a plugin.
    if any(kind == option for kind, _ in registered_by_plugins()):
        for entry in ENTRIES[KINDS[option]]():
            if entry.get("title"):
                titles[entry["name"]] = entry["title"]
    return titles


@cache  # the labels of a table read them again and again
def _stored_titles(option: str) -> dict[str, str]:
    return {entry["name"]: entry["title"] for entry in entries(KINDS[option]) if entry.get("title")}


def describe(part: Any, name: str) -> Entry:
    """Return the declarations, options and documentation of a class of options, or of a placement."""
    from normlab.catalogue.placements.base import SWITCHES

    kind = part if isinstance(part, type) else type(part)
    # A placement of the algebra declares some attributes on its row, and the others on its class.
    row = getattr(part, "row", None)
    entry: Entry = {}
    for key in _DECLARED:
        for owner in (part, row):
            if owner is not None and hasattr(owner, key):
                entry[key] = getattr(owner, key)
    documentation = ""
    if row is None:
        # A subclass is another norm than its base class, and has no title unless it declares one.
        entry["title"] = vars(kind).get("title", "")
        documentation = inspect.getdoc(kind) or ""
    if hasattr(kind, "all_initial_values"):
        entry["initial_values"] = kind.all_initial_values()
    options = options_of(kind)
    if not getattr(part, "has_switches", True):
        options = [option for option in options if option["option"] not in SWITCHES]
    return entry | {
        "name": name, "about": documentation.partition("\n")[0], "options": options, "documentation": documentation,
    }  # fmt: skip


def options_of(kind: Any, prefix: str = "") -> list[Entry]:
    """Return the options of a class of options, each with its default, help and limits."""
    options: list[Entry] = []
    for name, field in option_fields(kind, prefix):
        # The name and the preset are chosen with the entry; only data=hub has a name that is an option, with a help.
        # What a run sets for sites is no option of one norm.
        if field.name in ("preset", "at") or (field.name == "name" and not field.metadata.get("help")):
            continue
        limits = {key: limit for key, limit in field.metadata.items() if key in LIMITS and limit not in (None, ())}
        options.append({"option": name, "default": _default(field), "about": _help(kind, field)} | limits)
    return options


def _help(kind: Any, field: dataclasses.Field[Any]) -> str:
    """Return the help of an option: that of its field, or of the first base class that has one."""
    text = field.metadata.get("help")
    for base in kind.__mro__:
        if text:
            return text
        # A subclass that changes only the default leaves the help out.
        declared = vars(base).get("__dataclass_fields__", {}).get(field.name, field)
        text = declared.metadata.get("help")
    return text or ""


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if field.default is dataclasses.MISSING:
        return None
    return field.default


# With the entries of plugins, and of statistics. Tab completion needs neither, so it does not import the registries.


def _norms() -> list[Entry]:
    from normlab.catalogue.norms.base import NORMS

    names = [name for kind, name in registered_by_plugins() if kind == "norm"]
    return norms() + [describe(NORMS[name], name) for name in names]


def _placements() -> list[Entry]:
    from normlab.catalogue.placements.base import PLACEMENTS

    names = [name for kind, name in registered_by_plugins() if kind == "placement"]
    plugins = [describe(PLACEMENTS[name], name) | {"causal": CAUSAL} for name in names]
    return placements() + plugins


def _statistics() -> list[Entry]:
    from normlab.catalogue.statistics.registry import STATISTICS
    from normlab.catalogue.statistics.statistic import MERGES, OF, TIERS

    keys = ("name", "title", "tier", "of", "formula", "unit", "merge", "question", "source")
    entries: list[Entry] = []
    for statistic in STATISTICS.values():
        entry = {key: getattr(statistic, key) for key in keys}
        # What the keys of the tables mean, in words.
        entry |= {"read": OF[statistic.of], "reduces": MERGES[statistic.merge], "measured": TIERS[statistic.tier]}
        entries.append(entry)
    return entries


ENTRIES: dict[str, Callable[[], list[Entry]]] = {
    "norms": _norms,
    "placements": _placements,
    "models": models,
    "recipes": recipes,
    "data": data,
    "optim": optim,
    "init": init,
    "stats": _statistics,
    "options": options,
}
"""The complete entries of each kind, for `--json`; the kind is the word after `normlab list`."""


def one_entry(kind: str, name: str) -> Entry:
    """Return one entry of the catalogue.

    Raises:
        ConfigError: The name is unknown.
    """
    entries = {entry["name"]: entry for entry in ENTRIES[kind]()}
    if name not in entries:
        group = name.partition(".")[0]
        if kind == "options" and "." in name and group in KINDS:
            raise ConfigError(
                f"list options {name}: is an option of {group}; normlab list {KINDS[group]} NAME prints those of one"
            )
        elsewhere = OTHER_NAMES if kind in ("norms", "placements") else None
        # Of all kinds, while `titles` has those whose names are values of an option.
        known_titles = {known: entry["title"] for known, entry in entries.items() if entry.get("title")}
        raise ConfigError(f"list {kind}: " + unknown(kind.removesuffix("s"), name, entries, elsewhere, known_titles))
    return entries[name]
