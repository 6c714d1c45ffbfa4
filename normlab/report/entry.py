"""What `normlab list norms NAME` shows: one entry of the catalogue whole, for people."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

from normlab.errors import ConfigError, unknown
from normlab.report.catalogue import ENTRIES, ROWS
from normlab.report.table import table

Entry = dict[str, Any]

HEADINGS = {
    "formula": "formula",
    "unit": "unit",
    "read": "read of",
    "measured": "measured",
    "reduces": "of a step",
    "question": "asks",
    "opens": "embeddings",
    "closes": "before the head",
    "inside": "inside",
    "parameters": "learns",
    "starts": "starts at",
    "unit_length": "unit length",
    "causal": "causal",
    "blind_to": "blind to",
    "equals": "equals",
    "oracle": "held against",
    "init": "init rule",
    "placements": "of placements",
    "wrong_for": "wrong for",
    "preset_of": "preset of",
    "sets": "sets",
    "note": "the name",
    "source": "source",
}
"""What is said in a line, by the entry's key."""
INDENT = 19


def entry_text(kind: str, name: str, width: int) -> str:
    """One entry: what it computes, what is known of it, its options, and what others got wrong in it.

    Args:
        kind: norms, placements, models, data, optim, init or stats.
        name: The entry's. Under one of another kind, where that is shown; under another that the field has for some
            of them, a table of those.
        width: Columns.

    Raises:
        ConfigError: There is none of that name, and none that it may mean.
    """
    rows = {entry["name"]: (entry, row) for entry, row in zip(ENTRIES[kind](), ROWS[kind](), strict=True)}
    if name not in rows and (elsewhere := _kinds_of(name)):
        return "\n".join([f"{name!r} is none of the {kind}; see", *(f"  normlab list {of} {name}" for of in elsewhere)])
    if name not in rows and (meant := [row for entry, row in rows.values() if _may_be(entry, name)]):
        return f"{name!r} is none of the {kind}; it may mean:\n\n{table(meant, width)}"
    entry = one_entry(kind, name)
    return "\n".join(_lines(_told(kind, entry), max(width, 56)))


def one_entry(kind: str, name: str) -> Entry:
    """Everything that is known of one entry.

    Raises:
        ConfigError: There is none of that name.
    """
    entries = {entry["name"]: entry for entry in ENTRIES[kind]()}
    if name not in entries:
        raise ConfigError(f"list {kind}: " + unknown(kind.removesuffix("s"), name, entries))
    return entries[name]


def _kinds_of(name: str) -> list[str]:
    """The kinds that have an entry of this very name."""
    return [kind for kind, entries in ENTRIES.items() if any(entry["name"] == name for entry in entries())]


def _may_be(entry: Entry, name: str) -> bool:
    """Whether an entry may be what is called so: by a word of its name, or by what is said of it."""
    letters = re.sub(r"[\W_]", "", name.lower())
    stem = re.sub("(norm|ln)$", "", letters)
    said = " ".join(entry.get(key) or "" for key in ("note", "source", "about"))
    # Of fewer letters too much would be.
    return len(stem) > 2 and (_holds(entry["name"], stem) or _holds(said, letters))


def _holds(text: str, letters: str) -> bool:
    """Whether a word of a text begins with these letters, however they are spelt: `Post-Norm`, `post_norm`."""
    return re.search(r"(?<![^\W_])" + r"[\W_]*".join(letters), text.lower()) is not None


def _told(kind: str, entry: Entry) -> Entry:
    """The entry, with what its parts mean in words."""
    told = dict(entry)
    if kind == "norms":
        told["causal"] = "in training too" if entry["causal"] else "not in training: it sees later tokens"
        told["oracle"] = f"{entry['oracle']} ({entry['oracle_kind']})" if "oracle" in entry else ""
        told["parameters"] = f"{entry['parameters']} numbers"
        told["blind_to"] = ", ".join(entry.get("blind_to") or ())
    if kind == "placements":
        told["parameters"] = f"{entry['parameters']} numbers beside matrices and norms"
        for switch, end in (("embedding_norm", "opens"), ("final_norm", "closes")):
            told.setdefault(end, "x = N(x)" if entry.get(switch) else "")
    for key in ("placements", "wrong_for"):
        told[key] = ", ".join(entry.get(key) or ())
    for key in ("starts", "unit_length"):
        if entry.get(key):
            told[key] = "; ".join(f"{name} {value}" for name, value in entry[key].items())
    if sets := entry.get("sets"):
        told["sets"] = ", ".join(f"{word}={value}" for word, value in sets.items())
    return told


def _lines(entry: Entry, width: int) -> Iterator[str]:
    yield entry["name"]
    for key, heading in HEADINGS.items():
        if text := entry.get(key):
            yield from _folded(f"  {heading:{INDENT - 2}}{text}", width, INDENT)
        if key == "formula":
            for word, formula in (entry.get("formulas") or {}).items():
                yield from _folded(f"{'':{INDENT}}{word}: {formula}", width, INDENT + 2)
    for rule, reason in (entry.get("incompatible_inits") or {}).items():
        named = "another rule" if rule == "other" else f"init={rule}"
        yield from _folded(f"  {'not with':{INDENT - 2}}{named}: {reason}", width, INDENT)
    if text := entry.get("documentation") or entry.get("about"):
        yield ""
        yield from _paragraphs(text, width)
    if entry.get("options"):
        yield "\n  options"
        for option in entry["options"]:
            yield from _folded(f"    {_option(option)}", width, 6)
    if entry.get("pitfalls"):
        yield "\n  pitfalls"
        for pitfall in entry["pitfalls"]:
            yield from _folded(f"    - {pitfall}", width, 6)


def _paragraphs(text: str, width: int) -> Iterator[str]:
    """Documentation, each paragraph and each item of a list folded anew."""
    joined: list[str] = []
    for line in text.splitlines():
        if joined and joined[-1] and line.strip() and not line.startswith("- "):
            joined[-1] += " " + line.strip()
        else:
            joined.append(line.strip())
    for paragraph in joined:
        yield from _folded(f"  {paragraph}", width, 4 if paragraph.startswith("- ") else 2) or [""]


def _option(option: Entry) -> str:
    value = option["default"]
    default = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    choices = option.get("choices")
    offered = f" ({', '.join(choices)})" if choices else ""
    return f"{option['option']}={default}{offered}: {option['about']}"


def _folded(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)
