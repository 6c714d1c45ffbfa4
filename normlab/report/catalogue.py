"""Rows and entries of the catalogue for `normlab list norms` and the other kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from normlab import catalogue
from normlab.report.plugin_entries import plugin_norms, plugin_placements

Row = dict[str, Any]


def _norm_entries() -> list[Row]:
    return [*catalogue.norms(), *plugin_norms()]


def _placement_entries() -> list[Row]:
    return [*catalogue.placements(), *plugin_placements()]


def _statistic_entries() -> list[Row]:
    from normlab.stats.registry import STATISTICS
    from normlab.stats.statistic import MERGES, OF, TIERS

    keys = ("name", "tier", "of", "formula", "unit", "merge", "question", "source")
    return [
        {key: getattr(statistic, key) for key in keys}
        | {"read": OF[statistic.of], "reduces": MERGES[statistic.merge], "measured": TIERS[statistic.tier]}
        for statistic in STATISTICS.values()
    ]


ENTRIES: dict[str, Callable[[], list[Row]]] = {
    "norms": _norm_entries,
    "placements": _placement_entries,
    "models": catalogue.models,
    "data": catalogue.data,
    "optim": catalogue.optim,
    "init": catalogue.init,
    "stats": _statistic_entries,
}
"""The complete entries of each kind, for `--json`; the kind is the word after `normlab list`."""


def _norm_rows() -> list[Row]:
    entries = _norm_entries()
    formulas = {entry["name"]: entry["formula"] for entry in entries}
    return [
        {
            "norm": entry["name"],
            "formula": _preset_text(entry)
            if entry["formula"] == formulas.get(entry.get("preset_of"))
            else entry["formula"],
            "learns": entry["parameters"],
            "causal": "yes" if entry["causal"] else "no",
            "equals": entry.get("equals"),
            "source": entry.get("source") or entry["about"],
        }
        for entry in entries
    ]


def _preset_text(entry: Row) -> str:
    return f"{entry['preset_of']} with {', '.join(f'{option}={value}' for option, value in entry['sets'].items())}"


def _rows(kind: str, columns: dict[str, str]) -> list[Row]:
    """Return a row of each entry, with the entry's keys by column title."""
    return [{title: entry[key] for title, key in columns.items()} for entry in ENTRIES[kind]()]


def _model_rows() -> list[Row]:
    options = ("depth", "width", "heads", "context", "positions", "mlp")
    return [
        {"model": entry["name"], **{option: entry["sets"][option] for option in options}, "about": entry["about"]}
        for entry in catalogue.models()
    ]


def _init_rows() -> list[Row]:
    return [
        {
            "init": entry["name"],
            "formula": entry["formula"],
            "placements": ", ".join(entry["placements"]),
            "source": entry["source"],
        }
        for entry in catalogue.init()
    ]


_PLACEMENT_COLUMNS = {
    "placement": "name", "formula": "formula", "learns": "parameters", "equals": "equals", "init": "init",
    "source": "source", "the name": "note",
}  # fmt: skip
_STATISTIC_COLUMNS = {"statistic": "name"} | {key: key for key in ("tier", "of", "formula", "unit", "question")}

ROWS: dict[str, Callable[[], list[Row]]] = {
    "norms": _norm_rows,
    "placements": lambda: _rows("placements", _PLACEMENT_COLUMNS),
    "models": _model_rows,
    "data": lambda: _rows("data", {"data": "name", "about": "about"}),
    "optim": lambda: _rows("optim", {"optim": "name", "formula": "formula", "source": "source"}),
    "init": _init_rows,
    "stats": lambda: _rows("stats", _STATISTIC_COLUMNS),
}
"""The rows of a table of each kind."""
