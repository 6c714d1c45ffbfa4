"""Rows of a report as text: a table for people, Markdown for pages, JSON and CSV for programs."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Sequence

from normlab.errors import NormlabError, unknown
from normlab.report.cells import Row, cell, differing_corpora, is_number, title
from normlab.report.table import table
from normlab.store.schema import encode

FORMATS = ("table", "json", "csv", "markdown")


def render(rows: Sequence[Row], format: str = "table", width: int | None = None) -> str:
    """Rows as text, without a newline at the end.

    JSON and CSV hold every value as it is, NaN and infinity as "nan", "inf" and "-inf"; what a run has not
    said is null or empty. The table and the Markdown round.

    Args:
        rows: Rows of one report, with the same keys.
        format: One of `FORMATS`.
        width: Columns of a table; unless set the terminal's, or 160 where there is none.

    Raises:
        NormlabError: There is no such format.
    """
    if format not in FORMATS:
        raise NormlabError(unknown("format", format, FORMATS))
    if format == "json":
        return json.dumps([encode(row) for row in rows], indent=2, allow_nan=False)
    if not rows:
        return ""
    if format == "csv":
        return _csv(rows)
    if format == "markdown":
        return _markdown(rows)
    return table(rows, width or shutil.get_terminal_size((160, 24)).columns)


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(encode(row) for row in rows)
    return text.getvalue().removesuffix("\n")


def _markdown(rows: Sequence[Row]) -> str:
    keys = list(rows[0])
    lines = [
        _line([title(key) for key in keys]),
        _line(["---:" if is_number(key) else "---" for key in keys]),
        *(_line([_escape(cell(key, row[key])) for key in keys]) for row in rows),
    ]
    if warning := differing_corpora(rows):
        lines += ["", _escape(warning)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escape(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An underscore inside a word is no markup, and names are full of them.
    return re.sub(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)
