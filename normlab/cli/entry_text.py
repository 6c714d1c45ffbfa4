"""The entries of the catalogue for `normlab list`: as the rows of a table, or one entry as text."""

import re
import textwrap
from collections.abc import Callable
from typing import Any

from normlab.base.options import override_text
from normlab.catalogue.entries import Entry
from normlab.report.tables import TableRow

_COLUMNS: dict[str, dict[str, str | Callable[[Entry], Any]]] = {
    "norms": {
        "norm": "name", "formula": "formula", "parameters": "parameters",
        "causal": lambda entry: "yes" if entry["causal"] else "no", "same function as": "equals",
        "source": lambda entry: entry.get("source") or entry["about"],
    },
    "placements": {
        "placement": "name", "formula": "formula", "parameters": "parameters", "same function as": "equals",
        "init": "init", "source": "source", "note": "note",
    },
    "models": {
        "model": "name",
        **{
            option: lambda entry, option=option: entry["sets"][option]
            for option in ("depth", "width", "heads", "context", "positions", "mlp")
        },
        "about": "about",
    },
    "recipes": {"recipe": "name", "about": lambda entry: entry["about"].partition(": ")[0]},
    "data": {"data": "name", "about": "about"},
    "optim": {"optim": "name", "formula": "formula", "source": "source"},
    "init": {
        "init": "name", "formula": "formula", "placements": lambda entry: ", ".join(entry["placements"]),
        "source": "source",
    },
    "options": {
        "option": "name", "default": lambda entry: override_text(entry["default"]),
        "about": lambda entry: f"{entry['about']}{_choices(entry)}",
    },
    "stats": {"statistic": "name", **{key: key for key in ("tier", "of", "formula", "unit", "question")}},
}  # fmt: skip
"""The columns of each kind's table: the title, and the key of the entry or a function of it."""


def table_rows(kind: str, entries: list[Entry]) -> list[TableRow]:
    """Return a row for each entry, with the columns of its kind."""
    rows: list[TableRow] = []
    for entry in entries:
        row: TableRow = {}
        for title, value in _COLUMNS[kind].items():
            if callable(value):
                row[title] = value(entry)
            else:
                row[title] = entry.get(value)
        rows.append(row)
    return rows


# One entry

INDENT = 24


def entry_text(entry: Entry, width: int) -> str:
    """Return an entry as text, a line for each property that is not empty, then the documentation."""
    width = max(width, 56)
    lines = [entry["name"]]
    for key, value in entry.items():
        if value in (None, "", [], (), {}) or key in ("name", "about", "documentation"):
            continue
        texts = _texts_of(value)
        title = f"  {key.replace('_', ' '):{INDENT - 2}}"
        if len(texts) == 1:
            lines += _fold(title + texts[0], width, INDENT)
            continue
        # Several texts are a list below the title.
        lines.append(title.rstrip())
        for text in texts:
            lines += _fold(f"    - {text}", width, 6)
    lines.append("")
    about = entry.get("documentation") or entry.get("about") or ""
    # A paragraph ends at a blank line or before an item of a list, and its other line breaks are those of the source.
    for part in re.split(r"\n\n|\n(?=- )", about):
        if part.strip():
            lines += _fold(f"  {' '.join(part.split())}", width, 2)
    return "\n".join(lines).rstrip()


def _texts_of(value: Any) -> list[str]:
    """Return a value of an entry as texts: one for each item of a mapping, option or long text."""
    if isinstance(value, dict):
        return [f"{key}: {text}" for key, text in value.items()]
    if not isinstance(value, list):
        return [override_text(value)]
    if all(isinstance(item, dict) for item in value):
        return [f"{item['option']}={override_text(item['default'])}{_choices(item)}: {item['about']}" for item in value]
    # Short names share a line.
    if max(map(len, value)) < INDENT:
        return [", ".join(value)]
    return value


def _choices(option: Entry) -> str:
    if not option.get("choices"):
        return ""
    return f" ({', '.join(option['choices'])})"


def _fold(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)
