#!/usr/bin/env python3
"""Write `normlab/catalogue/entries.json` from the declarations of norms, placements, options and presets.

Usage: scripts/prove/write_catalogue.py

A preset is a YAML file in `conf/` whose first line is a comment that describes it.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from normlab.base.paths import config_dir
from normlab.catalogue.entries import CAUSAL, FILE, KINDS, Entry, describe, options_of
from normlab.catalogue.norms.base import NormConfig
from normlab.catalogue.placements.init_rules import INIT_RULES, InitRule
from normlab.catalogue.placements.table import ROWS
from normlab.config.compose import norm_presets
from normlab.config.override_errors import GROUPS
from normlab.config.schema import RunConfig
from normlab.config.sweep_options import SweepOptions


def _rule(name: str, rule: InitRule, known: list[Entry]) -> Entry:
    """Return the entry of an init rule, whose docstring is its formula."""
    formula = " ".join((rule.std.__doc__ or "").split())
    sources = {placement["name"]: placement["init_source"] for placement in known if placement["init"] == name}
    wrong_for = [
        placement["name"]
        for placement in known
        if {name, "other"} & set(placement.get("incompatible_inits") or ()) and placement["name"] not in sources
    ]
    return {
        "name": name, "title": rule.title, "formula": formula.rstrip("."), "source": rule.source,
        "placements": list(sources), "placement_sources": sources, "wrong_for": wrong_for,
    }  # fmt: skip


def _presets(group: str) -> list[Entry]:
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


def _defaults() -> list[Entry]:
    """Return the norm, placement, corpus and optimiser that a run has without an override, from conf/train.yaml."""
    train = yaml.safe_load((config_dir() / "train.yaml").read_text(encoding="utf-8"))
    chosen: dict[str, str] = {}
    for item in train["defaults"]:
        if isinstance(item, dict):
            chosen |= item
    return [{"name": chosen[group], "group": group} for group in KINDS]


def declared_entries() -> dict[str, list[Entry]]:

    presets, texts = norm_presets(), {entry["name"]: entry for entry in _presets("norm")}
    norms: list[Entry] = []
    for name, kind in sorted(GROUPS["norm"].items()):
        norms.append(describe(kind, name))
        norms[-1]["initial_values"] = _initial_values(kind(name=name))
        norms += [texts[preset.preset] | _properties(preset) for preset in presets if preset.name == name]
    known, rows = GROUPS["placement"], [row.name for row in ROWS]
    placements = [describe(known[name], name) | {"causal": CAUSAL} for name in rows + sorted(known.keys() - rows)]
    options = [
        {"option": "norm.at.SITE", "default": None, "about": _help_of_sites()},
        *options_of(RunConfig), *options_of(SweepOptions, "sweep."),
    ]  # fmt: skip
    return {
        "norms": norms, "placements": placements, "models": _presets("model"),
        "recipes": _recipes(), "stats": _presets("stats"),
        "data": [describe(kind, name) for name, kind in GROUPS["data"].items()],
        "optim": [describe(kind, name) for name, kind in GROUPS["optim"].items()],
        "init": [_rule(name, rule, placements) for name, rule in INIT_RULES.items()],
        "defaults": _defaults(),
        "options": [{"name": option.pop("option"), **option} for option in options if option["option"] not in GROUPS],
    }  # fmt: skip


def _help_of_sites() -> str:
    return next(field.metadata["help"] for field in dataclasses.fields(NormConfig) if field.name == "at")


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


def as_json(kinds: dict[str, list[Entry]]) -> str:
    """Return the content of the file: one line for each entry."""
    lists: list[str] = []
    for kind, entries in kinds.items():
        lines = ",\n".join(map(json.dumps, entries))
        lists.append(f'"{kind}": [\n{lines}\n]')
    return "{" + ",\n".join(lists) + "}\n"


if __name__ == "__main__":
    FILE.write_text(as_json(declared_entries()), encoding="utf-8")
