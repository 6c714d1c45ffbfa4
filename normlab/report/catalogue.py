"""What `normlab list norms`, and the other kinds of `ROWS`, shows: the catalogue as rows, and one entry whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from normlab import catalogue
from normlab.report.plugin_entries import plugin_norms, plugin_placements

Row = dict[str, Any]


def _all_norms() -> list[Row]:
    return [*catalogue.norms(), *plugin_norms()]


def _all_placements() -> list[Row]:
    return [*catalogue.placements(), *plugin_placements()]


def _norms() -> list[Row]:
    entries = _all_norms()
    formulas = {entry["name"]: entry["formula"] for entry in entries}
    return [
        {
            "norm": entry["name"],
            "formula": _setting(entry)
            if entry["formula"] == formulas.get(entry.get("preset_of"))
            else entry["formula"],
            "learns": entry["parameters"],
            "causal": "yes" if entry["causal"] else "no",
            "equals": entry.get("equals"),
            "source": entry.get("source") or entry["about"],
        }
        for entry in entries
    ]


def _placements() -> list[Row]:
    return [
        {
            "placement": entry["name"],
            "formula": entry["formula"],
            "learns": entry["parameters"],
            "equals": entry["equals"],
            "init": entry["init"],
            "source": entry["source"],
            "the name": entry["note"],
        }
        for entry in _all_placements()
    ]


def _models() -> list[Row]:
    shown = ("depth", "width", "heads", "context", "positions", "mlp")
    return [
        {"model": entry["name"], **{word: entry["sets"][word] for word in shown}, "about": entry["about"]}
        for entry in catalogue.models()
    ]


def _data() -> list[Row]:
    return [{"data": entry["name"], "about": entry["about"]} for entry in catalogue.data()]


def _optim() -> list[Row]:
    return [
        {"optim": entry["name"], "formula": entry["formula"], "source": entry["source"]} for entry in catalogue.optim()
    ]


def _init() -> list[Row]:
    return [
        {
            "init": entry["name"],
            "formula": entry["formula"],
            "placements": ", ".join(entry["placements"]),
            "source": entry["source"],
        }
        for entry in catalogue.init()
    ]


def _stats() -> list[Row]:
    shown = ("tier", "of", "formula", "unit", "question")
    return [{"statistic": entry["name"], **{word: entry[word] for word in shown}} for entry in _statistics()]


def _statistics() -> list[Row]:
    from normlab.stats.options import StatsConfig  # noqa: F401  (with it every statistic is known)
    from normlab.stats.statistic import MERGES, OF, TIERS, sorted_statistics

    words = ("name", "tier", "of", "formula", "unit", "merge", "question", "source")
    return [
        {word: getattr(one, word) for word in words}
        | {"read": OF[one.of], "reduces": MERGES[one.merge], "measured": TIERS[one.tier]}
        for one in sorted_statistics()
    ]


def _setting(entry: Row) -> str:
    sets = ", ".join(f"{word}={value}" for word, value in entry["sets"].items())
    return f"{entry['preset_of']} with {sets}"


ROWS: dict[str, Callable[[], list[Row]]] = {
    "norms": _norms,
    "placements": _placements,
    "models": _models,
    "data": _data,
    "optim": _optim,
    "init": _init,
    "stats": _stats,
}
"""Rows for a table, by the word after `normlab list`."""

ENTRIES: dict[str, Callable[[], list[Row]]] = {
    "norms": _all_norms,
    "placements": _all_placements,
    "models": catalogue.models,
    "data": catalogue.data,
    "optim": catalogue.optim,
    "init": catalogue.init,
    "stats": _statistics,
}
"""Everything that is known of each, for `--json`."""
