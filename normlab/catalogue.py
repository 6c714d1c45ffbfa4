"""The catalogue for `normlab list`, tab completion and `normlab explain`: each entry by its own declarations.

Importing the declarations takes seconds, of norms and some placements even torch. So `python -m normlab.catalogue`
writes the entries to `catalogue.json`, which is read here; a test compares the file with the declarations. A preset is
a YAML file in `conf/` whose first line is a comment that describes it.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from normlab.options import LIMITS, option_fields
from normlab.paths import config_dir

FILE = Path(__file__).with_suffix(".json")

Entry = dict[str, Any]

CAUSAL = "if the norm is"
"""Whether a placement is causal: a placement never mixes tokens, as `normlab verify` checks."""
_DECLARED = (
    "formula", "formulas", "weights_formula", "embedding_formula", "head_weights_formula", "head_formula", "inside",
    "incompatible_inits", "source", "note",
    "verified_by", "reference_kind", "parameters", "initial_values", "unit_length",
    "invariant_to", "equals", "pitfalls", "causal", "init", "embedding_norm", "final_norm", "hub",
    "batch_statistics",
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
stats = partial(entries, "stats")
"""Every preset of statistics, with the options that it sets."""
options = partial(entries, "options")
"""Every option of a run or a sweep outside norm, placement, data and optim, by its dotted name."""


def describe(part: Any, name: str) -> Entry:
    """Return the declarations, options and documentation of a class of options, or of a placement."""
    from normlab.placements.base import SWITCHES

    kind = part if isinstance(part, type) else type(part)
    # A placement of the algebra declares some attributes on its row, and the others on its class.
    owners = {key: owner for key in _DECLARED for owner in (part, getattr(part, "row", part)) if hasattr(owner, key)}
    entry = {key: getattr(owner, key) for key, owner in owners.items()}
    if hasattr(kind, "all_initial_values"):
        entry["initial_values"] = kind.all_initial_values()
    documentation = "" if hasattr(part, "row") else inspect.getdoc(kind) or ""
    hidden = SWITCHES if not getattr(part, "has_switches", True) else ()
    options = [option for option in _options(kind) if option["option"] not in hidden]
    return entry | {
        "name": name, "about": documentation.partition("\n")[0], "options": options, "documentation": documentation,
    }  # fmt: skip


def _options(kind: Any, prefix: str = "") -> list[Entry]:
    return [
        {"option": name, "default": _default(field), "about": _help(kind, field)}
        | {key: limit for key, limit in field.metadata.items() if key in LIMITS and limit not in (None, ())}
        for name, field in option_fields(kind, prefix)
        if field.name != "preset" and (field.name != "name" or field.metadata.get("help"))
    ]


def _help(kind: Any, field: dataclasses.Field[Any]) -> str:
    """Return the help of an option: that of its field, or of the first base class that has one."""
    declared = (vars(base).get("__dataclass_fields__", {}).get(field.name, field) for base in kind.__mro__)
    return next((text for each in (field, *declared) if (text := each.metadata.get("help"))), "")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _rule(name: str, documentation: str, known: list[Entry]) -> Entry:
    """Return the entry of an init rule.

    Its docstring is the formula, then `Source:` and the source.
    """
    formula, _, source = " ".join(documentation.split()).partition(" Source: ")
    defaults = [placement["name"] for placement in known if placement["init"] == name]
    wrong_for = [
        placement["name"]
        for placement in known
        if {name, "other"} & set(placement.get("incompatible_inits") or ()) and placement["name"] not in defaults
    ]
    return {
        "name": name, "formula": formula.rstrip("."), "source": source.rstrip("."), "placements": defaults,
        "wrong_for": wrong_for,
    }  # fmt: skip


def _presets(group: str) -> list[Entry]:
    import yaml

    entries: list[Entry] = []
    for path in sorted((config_dir() / group).glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        sets = yaml.load(text, yaml.BaseLoader)  # keeps the numbers as they are written
        extended = sets.pop("defaults", None)
        sets.pop("preset", None)
        entries.append({"name": path.stem, "about": text.partition("\n")[0].lstrip("# "), "sets": sets})
        entries[-1] |= {"preset_of": extended[0]} if extended else {}
    return entries


def _recipes() -> list[Entry]:
    """Return each recipe with its comment, and the presets and options that it sets, as on the command line."""
    import yaml

    entries: list[Entry] = []
    for path in sorted((config_dir() / "recipe").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        sets = yaml.load(text, yaml.BaseLoader)
        groups = [pair for each in sets.pop("defaults") if isinstance(each, dict) for pair in each.items()]
        comment = [line.lstrip("# ") for line in text.splitlines() if re.match(r"# (?!@|normlab )", line)]
        chosen = [f"{group.removeprefix('override /')}={preset}" for group, preset in groups]
        entries.append({"name": path.stem, "about": " ".join(comment), "sets": [*chosen, *_overrides(sets)]})
    return entries


def _overrides(sets: Any, prefix: str = "") -> Iterator[str]:
    for name, value in sets.items():
        yield from _overrides(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}={value}"]


def declared_entries() -> dict[str, list[Entry]]:
    from normlab.config.compose import norm_presets
    from normlab.config.override_errors import GROUPS
    from normlab.config.schema import RunConfig
    from normlab.config.sweep_options import SweepOptions
    from normlab.placements.init_rules import INIT_RULES
    from normlab.placements.table import ROWS

    presets, texts = norm_presets(), {entry["name"]: entry for entry in _presets("norm")}
    norms: list[Entry] = []
    for name, kind in sorted(GROUPS["norm"].items()):
        norms.append(describe(kind, name))
        norms[-1]["initial_values"] = _initial_values(kind(name=name))
        norms += [texts[preset.preset] | _properties(preset) for preset in presets if preset.name == name]
    known, rows = GROUPS["placement"], [row.name for row in ROWS]
    placements = [describe(known[name], name) | {"causal": CAUSAL} for name in rows + sorted(known.keys() - rows)]
    options = _options(RunConfig) + _options(SweepOptions, "sweep.")
    return {
        "norms": norms, "placements": placements, "models": _presets("model"),
        "recipes": _recipes(), "stats": _presets("stats"),
        "data": [describe(kind, name) for name, kind in GROUPS["data"].items()],
        "optim": [describe(kind, name) for name, kind in GROUPS["optim"].items()],
        "init": [_rule(name, inspect.getdoc(rule) or "", placements) for name, rule in INIT_RULES.items()],
        "options": [{"name": option.pop("option"), **option} for option in options if option["option"] not in GROUPS],
    }  # fmt: skip


def _properties(norm: Any) -> Entry:
    """Return the formula, the parameter count and other properties of a preset of a norm."""
    options = {f"{name}={str(value).lower()}" for name, value in dataclasses.asdict(norm).items()}
    matching = sorted((key for key in norm.formulas if options >= set(key.split(", "))), key=lambda key: key.count(","))
    small, large = (sum(each.numel() for each in norm.build(width).parameters()) for width in (96, 192))
    vectors, numbers = (large - small) // 96, 2 * small - large
    terms = {0: [], 1: ["D"]}.get(vectors, [f"{vectors} * D"]) + ([str(numbers)] if numbers or not vectors else [])
    return {
        "formula": norm.formulas[matching[-1]] if matching else norm.formula, "parameters": " + ".join(terms),
        "initial_values": _initial_values(norm), "causal": norm.causal, "pitfalls": norm.pitfalls,
    }  # fmt: skip


def _initial_values(norm: Any) -> dict[str, str]:
    """Return the initial values of the parameters and buffers that a norm with these options has."""
    existing = norm.build(96).state_dict()
    return {name: value for name, value in norm.all_initial_values().items() if name in existing}


if __name__ == "__main__":
    lists = {
        kind: "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]"
        for kind, entries in declared_entries().items()
    }
    FILE.write_text("{" + ",\n".join(f'"{kind}": {text}' for kind, text in lists.items()) + "}\n", encoding="utf-8")
