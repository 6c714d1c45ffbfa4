"""A table for people: it fits its width, and says what it left out to do so.

Settings that all runs share are said once, above. What happened to a run that did not finish is a sentence
below. A single run stands upright, a line for each of its values.
"""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Sequence

from normlab.report.cells import Row, cell, corpus_cell, differing_corpora, is_number, old_baselines, title

_SHARED = ("state", "norm", "placement", "depth", "width", "seed", "lr", "corpus", "device", "precision")
"""What is said once where it is the same for all runs."""
_LEAST_TELLING = (
    *(
        "update, last",
        "seeds",
        "attn/stream, last",
        "mlp/stream, last",
        "last/first",
        "loss",
        "grad profile",
        "stream profile",
    ),
    *("memory", "spikes", "tokens/s", "best val", "less baseline at shared lr", "p (Holm) at shared lr", "edge lr"),
    *("val loss at shared lr", "usable lr", "S"),
    *(
        "seconds",
        "precision",
        "tokens_per_s",
        "device",
        "train_loss",
        "best_val_loss",
        "last_val_loss",
        "corpus",
        "width",
    ),
    *("vs_bigram", "steps", "step", "seed", "lr", "init", "grad, last"),
    *("depth", "corpora", "created", "placement", "norm"),
)
"""What is left out, in turn, where the rest does not fit. `corpora` is the corpus where there are several."""
_GAP = 2
_NARROWEST = 56
_LEAST_TEXT = 24
_LEAST_FOLDED = 8

Columns = dict[str, list[str]]
"""The cells by key, top to bottom."""


def table(rows: Sequence[Row], width: int) -> str:
    """Rows as lines of at most `width` columns (but 56), numbers to the right, long texts folded."""
    width = max(width, _NARROWEST)
    if len(rows) == 1:
        return _upright(rows[0], width)
    columns = _columns(rows)
    shared = _take_shared(columns) if "run" in columns else {}
    hidden = _fit(columns, width)
    named = zip(_names(rows), rows, strict=True)
    below = [f"{name}: {cell('note', row['note'])}" for name, row in named if row.get("note")]
    below += [old_baselines(rows), differing_corpora(rows)]
    if hidden:
        left_out = ", ".join(map(_title, hidden))
        below.append(f"not shown: {left_out} (a wider window shows more, json everything)")
    above = "in common: " + ", ".join(f"{_title(key)} {value}" for key, value in shared.items())
    parts = [_wrapped([above] if shared else [], width), _grid(columns, width), _wrapped(below, width)]
    return "\n\n".join(filter(None, parts))


def _upright(row: Row, width: int) -> str:
    texts = {title(key): cell(key, value) for key, value in row.items()}
    indent = max(map(len, texts)) + _GAP
    lines = [name.ljust(indent) + text for name, text in texts.items() if text]
    return _wrapped(lines, width, indent)


def _columns(rows: Sequence[Row]) -> Columns:
    """The columns as the rows have them, less what nobody reads in a table."""
    columns = {key: [cell(key, row[key]) for row in rows] for key in rows[0]}
    if "run" in columns:
        columns["run"] = _names(rows)
    if "step" in columns and "steps" in columns:
        pairs = zip(columns["step"], columns.pop("steps"), strict=True)
        columns["step"] = [f"{step}/{steps}" if step and steps else step for step, steps in pairs]
    if differing_corpora(rows):
        columns["corpora"] = [corpus_cell(row) for row in rows]
        columns.pop("corpus")
    for key in ("id", "corpus_sha256", "baselines", "note"):
        columns.pop(key, None)
    # A column in which no row has anything to say would only take room.
    return {key: cells for key, cells in columns.items() if any(cells)}


def _names(rows: Sequence[Row]) -> list[str]:
    """What each run is called, with its id where others are called the same."""
    names = [cell("run", row.get("run")) for row in rows]
    count = Counter(names)
    return [
        name if count[name] == 1 or not row.get("id") else f"{name} ({cell('id', row['id'])})"
        for name, row in zip(names, rows, strict=True)
    ]


def _take_shared(columns: Columns) -> dict[str, str]:
    """Take out the settings on which all runs that name them agree, and return them."""
    shared = {}
    for key in _SHARED:
        known = set(columns.get(key, ())) - {""}
        if len(known) == 1:
            shared[key] = known.pop()
            del columns[key]
    return shared


def _fit(columns: Columns, width: int) -> list[str]:
    """Take out columns, the least telling first, until the rest fits; return their keys."""
    hidden = []
    first = next(iter(columns))
    for key in _LEAST_TELLING:
        if _total(_widths(columns, width, least=_least(width))) <= width:
            break
        # The first column says which row it is.
        if key != first and columns.pop(key, None):
            hidden.append(key)
    return hidden


def _widths(columns: Columns, width: int, least: int) -> dict[str, int]:
    """Each column's width; texts wider than `least` yield until all fit, first those with spaces to fold at.

    What stands first is whole, since it is a word to be typed; only a run may be called anything.
    """
    first = next(iter(columns))
    widths = {key: max(map(_cells, [_title(key), *cells])) for key, cells in columns.items()}
    texts = {key: min(widths[key], width) for key in columns if not is_number(key) and (key != first or key == "run")}
    words = {key: max(map(_cells, " ".join([_title(key), *columns[key]]).split())) for key in texts}
    widths |= texts
    while _total(widths) > width:
        wide = [key for key in texts if widths[key] > least]
        if not wide:
            break
        widest = max([key for key in wide if widths[key] > words[key]] or wide, key=widths.__getitem__)
        widths[widest] -= 1
    return widths


def _grid(columns: Columns, width: int) -> str:
    """The columns side by side. Texts fold where they must; numbers never do."""
    widths = _widths(columns, width, least=_least(width))
    if _total(widths) > width:
        widths = _widths(columns, width, least=_LEAST_FOLDED)
    lines: list[str] = []
    for row in [tuple(map(_title, columns)), *zip(*columns.values(), strict=True)]:
        folded = [_folded(text, widths[key]) for key, text in zip(columns, row, strict=True)]
        for texts in itertools.zip_longest(*folded, fillvalue=""):
            padded = [_padded(text, widths[key], is_number(key)) for key, text in zip(columns, texts, strict=True)]
            lines.append((" " * _GAP).join(padded).rstrip())
    return "\n".join([lines[0], "-" * max(map(_cells, lines)), *lines[1:]])


def _least(width: int) -> int:
    """What a text may be folded to before columns are left out instead."""
    return max(_LEAST_TEXT, width // 3)


def _total(widths: dict[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _padded(text: str, width: int, right: bool) -> str:
    gap = " " * (width - _cells(text))
    return gap + text if right else text + gap


def _folded(text: str, width: int) -> list[str]:
    # textwrap counts characters, and a wide one takes two places.
    wide = _cells(text) > len(text)
    return textwrap.wrap(text, width // 2 if wide else width, break_on_hyphens=False) or [""]


def _cells(text: str) -> int:
    """The places that a text takes on the screen."""
    from rich.cells import cell_len

    return cell_len(text)


def _title(key: str) -> str:
    return "corpus" if key == "corpora" else title(key)


def _wrapped(sentences: Sequence[str], width: int, indent: int = 2) -> str:
    """Each sentence on lines of its own, those after the first indented; names keep their hyphens."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_on_hyphens=False)
    return "\n".join(line for sentence in sentences for line in wrapper.wrap(sentence))
