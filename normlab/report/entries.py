"""`normlab list`: the entries of the catalogue and of plugins, as the rows of a table or one entry as text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from normlab import catalogue
from normlab.errors import ConfigError, unknown
from normlab.norms.base import NORMS
from normlab.placements.base import PLACEMENTS
from normlab.plugins import registered_by_plugins
from normlab.report.tables import Row

Entry = dict[str, Any]


def _norms() -> list[Entry]:
    names = [name for kind, name in registered_by_plugins() if kind == "norm"]
    return catalogue.norms() + [catalogue.describe(NORMS[name], name) for name in names]


def _placements() -> list[Entry]:
    names = [name for kind, name in registered_by_plugins() if kind == "placement"]
    plugins = [catalogue.describe(PLACEMENTS[name], name) | {"causal": catalogue.CAUSAL} for name in names]
    return catalogue.placements() + plugins


def _statistics() -> list[Entry]:
    from normlab.stats.registry import STATISTICS
    from normlab.stats.statistic import MERGES, OF, TIERS

    keys = ("name", "tier", "of", "formula", "unit", "merge", "question", "source")
    return [
        {key: getattr(statistic, key) for key in keys}
        | {"read": OF[statistic.of], "reduces": MERGES[statistic.merge], "measured": TIERS[statistic.tier]}
        for statistic in STATISTICS.values()
    ]


ENTRIES: dict[str, Callable[[], list[Entry]]] = {
    "norms": _norms,
    "placements": _placements,
    "models": catalogue.models,
    "data": catalogue.data,
    "optim": catalogue.optim,
    "init": catalogue.init,
    "stats": _statistics,
    "options": catalogue.options,
}
"""The complete entries of each kind, for `--json`; the kind is the word after `normlab list`."""

_COLUMNS: dict[str, dict[str, str | Callable[[Entry], Any]]] = {
    "norms": {
        "norm": "name", "formula": "formula", "parameters": "parameters",
        "causal": lambda entry: "yes" if entry["causal"] else "no", "equals": "equals",
        "source": lambda entry: entry.get("source") or entry["about"],
    },
    "placements": {
        "placement": "name", "formula": "formula", "parameters": "parameters", "equals": "equals", "init": "init",
        "source": "source", "note": "note",
    },
    "models": {
        "model": "name",
        **{
            option: lambda entry, option=option: entry["sets"][option]
            for option in ("depth", "width", "heads", "context", "positions", "mlp")
        },
        "about": "about",
    },
    "data": {"data": "name", "about": "about"},
    "optim": {"optim": "name", "formula": "formula", "source": "source"},
    "init": {
        "init": "name", "formula": "formula", "placements": lambda entry: ", ".join(entry["placements"]),
        "source": "source",
    },
    "options": {"option": "name", "default": lambda entry: _text_of(entry["default"]), "about": "about"},
    "stats": {"statistic": "name", **{key: key for key in ("tier", "of", "formula", "unit", "question")}},
}  # fmt: skip
"""The columns of each kind's table: the title, and the key of the entry or a function of it."""


def table_rows(kind: str, entries: list[Entry]) -> list[Row]:
    """Return a row of each entry for a table of one kind."""
    return [
        {title: value(entry) if callable(value) else entry.get(value) for title, value in _COLUMNS[kind].items()}
        for entry in entries
    ]


# One entry

HEADINGS = {
    "formula": "formula", "unit": "unit", "read": "measured on", "measured": "when", "reduces": "per step",
    "question": "question", "embedding_formula": "embeddings", "head_formula": "before the LM head", "inside": "inside",
    "parameters": "parameters", "initial_values": "initial value", "unit_length": "unit length", "causal": "causal",
    "invariant_to": "invariant to", "equals": "equals", "verified_by": "verified by", "init": "init rule",
    "placements": "placements", "wrong_for": "wrong for", "preset_of": "preset of", "sets": "sets",
    "note": "note", "source": "source",
}  # fmt: skip
"""The heading of each key that is one line of an entry's text."""
INDENT = 19


def entry_text(kind: str, name: str, width: int) -> str:
    """Return an entry as text: formula, properties, documentation, options and pitfalls.

    Args:
        kind: norms, placements, models, data, optim, init or stats.
        name: The entry's name.
        width: Columns of the terminal.

    Raises:
        ConfigError: The name is unknown.
    """
    return "\n".join(_lines(_with_texts(kind, one_entry(kind, name)), max(width, 56)))


def one_entry(kind: str, name: str) -> Entry:
    """Return one entry of the catalogue.

    Raises:
        ConfigError: The name is unknown.
    """
    entries = {entry["name"]: entry for entry in ENTRIES[kind]()}
    if name not in entries:
        raise ConfigError(f"list {kind}: " + unknown(kind.removesuffix("s"), name, entries))
    return entries[name]


def _with_texts(kind: str, entry: Entry) -> Entry:
    """Return the entry with its structured values as text."""
    texts = dict(entry)
    if kind == "norms":
        texts["causal"] = "in training and evaluation" if entry["causal"] else "not in training: it uses later tokens"
        texts["verified_by"] = f"{entry['verified_by']} ({entry['reference_kind']})" if "verified_by" in entry else ""
    if kind == "placements":
        texts["parameters"] = f"{entry['parameters']}, apart from matrices and norms"
        for has_norm, key in (("embedding_norm", "embedding_formula"), ("final_norm", "head_formula")):
            texts.setdefault(key, "x = N(x)" if entry.get(has_norm) else "")
    for key in ("invariant_to", "placements", "wrong_for"):
        texts[key] = ", ".join(entry.get(key) or ())
    for key in ("initial_values", "unit_length"):
        texts[key] = "; ".join(f"{name}: {value}" for name, value in (entry.get(key) or {}).items())
    texts["sets"] = ", ".join(f"{option}={value}" for option, value in (entry.get("sets") or {}).items())
    return texts


def _lines(entry: Entry, width: int) -> Iterator[str]:
    yield entry["name"]
    for key, heading in HEADINGS.items():
        if text := entry.get(key):
            yield from _fold(f"  {heading:{INDENT - 2}}{text}", width, INDENT)
        if key == "formula":
            for name, formula in (entry.get("formulas") or {}).items():
                yield from _fold(f"{'':{INDENT}}{name}: {formula}", width, INDENT + 2)
    for rule, reason in (entry.get("incompatible_inits") or {}).items():
        rule_text = "another rule" if rule == "other" else f"init={rule}"
        yield from _fold(f"  {'not with':{INDENT - 2}}{rule_text}: {reason}", width, INDENT)
    if text := entry.get("documentation") or entry.get("about"):
        yield ""
        yield from _paragraphs(text, width)
    if entry.get("options"):
        yield "\n  options"
        for option in entry["options"]:
            yield from _fold(f"    {_option_text(option)}", width, 6)
    if entry.get("pitfalls"):
        yield "\n  pitfalls"
        for pitfall in entry["pitfalls"]:
            yield from _fold(f"    - {pitfall}", width, 6)


def _paragraphs(text: str, width: int) -> Iterator[str]:
    """Fold each paragraph and each list item of a documentation to the width."""
    joined: list[str] = []
    for line in text.splitlines():
        if joined and joined[-1] and line.strip() and not line.startswith("- "):
            joined[-1] += " " + line.strip()
        else:
            joined.append(line.strip())
    for paragraph in joined:
        yield from _fold(f"  {paragraph}", width, 4 if paragraph.startswith("- ") else 2) or [""]


def _option_text(option: Entry) -> str:
    choices = f" ({', '.join(option['choices'])})" if option.get("choices") else ""
    return f"{option['option']}={_text_of(option['default'])}{choices}: {option['about']}"


def _text_of(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _fold(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)
