"""The catalogue for `normlab list`, tab completion and `normlab explain`: each entry by its own declarations.

Importing the norms and some placements needs torch. So `python -m normlab.catalogue` writes their entries to
`catalogue.json`, which is read here; a test compares the file with the declarations. A preset is a YAML file in `conf/`
whose first line is a comment that describes it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

from normlab.options import LIMITS, option_fields
from normlab.paths import config_dir
from normlab.placements.base import SWITCHES

FILE = Path(__file__).with_suffix(".json")

Entry = dict[str, Any]

CAUSAL = "if the norm is"
"""Whether a placement is causal: a placement never mixes tokens, as `normlab verify` checks."""
_DECLARED = (
    "formula", "formulas", "embedding_formula", "head_formula", "inside", "incompatible_inits", "source", "note",
    "verified_by", "reference_kind", "parameters", "initial_values", "unit_length",
    "invariant_to", "equals", "pitfalls", "causal", "init", "embedding_norm", "final_norm", "hub",
    "batch_statistics",
)  # fmt: skip
"""Class attributes, or fields of a row of the algebra, that become keys of an entry."""


def norms() -> list[Entry]:
    """Return every norm, each followed by its presets."""
    return _file()["norms"]


def placements() -> list[Entry]:
    """Return every placement: the rows of the algebra, then those with their own wiring."""
    return _file()["placements"]


def models() -> list[Entry]:
    """Return every preset of the model, with the options that it sets."""
    return _presets("model")


def data() -> list[Entry]:
    """Return every corpus."""
    from normlab.config.corpora import DATA

    return [describe(kind, name) for name, kind in DATA.items()]


def optim() -> list[Entry]:
    """Return every optimiser."""
    from normlab.config.optim import OPTIMIZERS

    return [describe(kind, name) for name, kind in OPTIMIZERS.items()]


def init() -> list[Entry]:
    """Return every init rule, with the placements that use it and those that it does not fit."""
    from normlab.placements.init_rules import INIT_RULES

    known = placements()
    return [_rule(name, inspect.getdoc(rule) or "", known) for name, rule in INIT_RULES.items()]


def stats() -> list[Entry]:
    """Return every preset of statistics, with the options that it sets."""
    return _presets("stats")


def options() -> list[Entry]:
    """Return every option of a run or a sweep outside norm, placement, data and optim, by its dotted name."""
    from normlab.config.schema import RunConfig
    from normlab.config.sweep_options import SweepOptions

    found = _options(RunConfig) + _options(SweepOptions, "sweep.")
    chosen = ("norm", "placement", "data", "optim")
    return [{"name": option.pop("option"), **option} for option in found if option["option"] not in chosen]


def describe(part: Any, name: str) -> Entry:
    """Return the declarations, options and documentation of a class of options, or of a placement."""
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
    """Return the help of an option: that of the class, or of the first base class that has one."""
    for base in kind.__mro__:
        declared = vars(base).get("__dataclass_fields__", {}).get(field.name, field)
        if text := declared.metadata.get("help"):
            return text
    return field.metadata.get("help", "")


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
    return [_preset(path) for path in sorted((config_dir() / group).glob("*.yaml"))]


def _preset(path: Path) -> Entry:
    """Return a preset's name, first comment, options and the class that it extends."""
    lines = path.read_text(encoding="utf-8").splitlines()
    about = lines[0].lstrip("# ") if lines and lines[0].startswith("#") else ""
    entry: Entry = {"name": path.stem, "about": about, "sets": {}}
    for line in lines:
        if line.startswith("  - ") and line.strip() != "- _self_":
            entry["preset_of"] = line.strip()[2:]
        name, colon, value = line.partition(": ")
        if colon and not line.startswith(("#", " ")) and name != "preset":
            entry["sets"][name] = value
    return entry


# The file


def _file() -> dict[str, list[Entry]]:
    return json.loads(FILE.read_bytes())


def declared_entries() -> dict[str, list[Entry]]:
    """Return the content of the file, from the declarations of all norms and placements of the package."""
    from normlab.config.compose import norm_presets
    from normlab.norms.base import NORMS
    from normlab.placements.base import PLACEMENTS
    from normlab.placements.table import ROWS

    presets, texts = norm_presets(), {entry["name"]: entry for entry in _presets("norm")}
    norms: list[Entry] = []
    for name, kind in sorted(NORMS.items()):
        norms.append(describe(kind, name))
        norms[-1]["initial_values"] = _initial_values(kind(name=name))
        norms += [texts[preset.preset] | _properties(preset) for preset in presets if preset.name == name]
    rows = [row.name for row in ROWS]
    names = rows + sorted(PLACEMENTS.keys() - rows)
    return {"norms": norms, "placements": [describe(PLACEMENTS[name], name) | {"causal": CAUSAL} for name in names]}


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
