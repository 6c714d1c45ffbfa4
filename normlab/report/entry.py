"""Render one entry of the catalogue for people: `normlab list norms NAME`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

from normlab.errors import ConfigError, unknown
from normlab.report.catalogue import ENTRIES, ROWS
from normlab.report.table import render_table

Entry = dict[str, Any]

HEADINGS = {
    "formula": "formula",
    "unit": "unit",
    "read": "measured on",
    "measured": "when",
    "reduces": "per step",
    "question": "question",
    "opens": "embeddings",
    "closes": "before the head",
    "inside": "inside",
    "parameters": "learns",
    "starts": "starts at",
    "unit_length": "unit length",
    "causal": "causal",
    "blind_to": "blind to",
    "equals": "equals",
    "oracle": "verified by",
    "init": "init rule",
    "placements": "placements",
    "wrong_for": "wrong for",
    "preset_of": "preset of",
    "sets": "sets",
    "note": "about the name",
    "source": "source",
}
"""The heading of each key of an entry that is rendered in a line."""
INDENT = 19


def entry_text(kind: str, name: str, width: int) -> str:
    """Return an entry as text: formula, properties, documentation, options and pitfalls.

    A name of another kind gives the commands that show it. A name that the literature uses for entries of this kind
    gives a table of them.

    Args:
        kind: norms, placements, models, data, optim, init or stats.
        name: The entry's name.
        width: Columns of the terminal.

    Raises:
        ConfigError: The name is unknown.
    """
    rows = {entry["name"]: (entry, row) for entry, row in zip(ENTRIES[kind](), ROWS[kind](), strict=True)}
    if name not in rows:
        if kinds := [other for other, entries in ENTRIES.items() if any(entry["name"] == name for entry in entries())]:
            return "\n".join(
                [f"{name!r} is not one of the {kind}; see", *(f"  normlab list {k} {name}" for k in kinds)]
            )
        if candidates := [row for entry, row in rows.values() if _may_mean(name, entry)]:
            return f"{name!r} is not one of the {kind}; it may mean:\n\n{render_table(candidates, width)}"
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


def _may_mean(name: str, entry: Entry) -> bool:
    """Whether a name may mean an entry: a word of the entry's name or of its description begins with it."""
    letters = re.sub(r"[\W_]", "", name.lower())
    stem = re.sub("(norm|ln)$", "", letters)
    description = " ".join(entry.get(key) or "" for key in ("note", "source", "about"))
    # Fewer letters match too much.
    return len(stem) > 2 and (_has_word(entry["name"], stem) or _has_word(description, letters))


def _has_word(text: str, letters: str) -> bool:
    """Whether a word of a text begins with these letters, in any spelling: `Post-Norm`, `post_norm`."""
    return re.search(r"(?<![^\W_])" + r"[\W_]*".join(letters), text.lower()) is not None


def _with_texts(kind: str, entry: Entry) -> Entry:
    """The entry with its structured values as text."""
    texts = dict(entry)
    if kind == "norms":
        texts["causal"] = "in training too" if entry["causal"] else "not in training: it uses later tokens"
        texts["oracle"] = f"{entry['oracle']} ({entry['oracle_kind']})" if "oracle" in entry else ""
        texts["parameters"] = f"{entry['parameters']} numbers"
    if kind == "placements":
        texts["parameters"] = f"{entry['parameters']} numbers beside matrices and norms"
        for has_norm, key in (("embedding_norm", "opens"), ("final_norm", "closes")):
            texts.setdefault(key, "x = N(x)" if entry.get(has_norm) else "")
    for key in ("blind_to", "placements", "wrong_for"):
        texts[key] = ", ".join(entry.get(key) or ())
    for key in ("starts", "unit_length"):
        texts[key] = "; ".join(f"{name} {value}" for name, value in (entry.get(key) or {}).items())
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
    """Fold documentation to the width, each paragraph and each item of a list by itself."""
    joined: list[str] = []
    for line in text.splitlines():
        if joined and joined[-1] and line.strip() and not line.startswith("- "):
            joined[-1] += " " + line.strip()
        else:
            joined.append(line.strip())
    for paragraph in joined:
        yield from _fold(f"  {paragraph}", width, 4 if paragraph.startswith("- ") else 2) or [""]


def _option_text(option: Entry) -> str:
    value = option["default"]
    default = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    choices = f" ({', '.join(option['choices'])})" if option.get("choices") else ""
    return f"{option['option']}={default}{choices}: {option['about']}"


def _fold(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)
