"""Render the rows of a report: a table for people, Markdown for pages, JSON and CSV for programs."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Sequence

from normlab.errors import NormlabError, unknown
from normlab.report.table import render_table
from normlab.report.table_format import Row, column_title, corpora_note, format_value, is_numeric
from normlab.store.schema import encode

FORMATS = ("table", "json", "csv", "markdown")


def render(rows: Sequence[Row], format: str = "table", width: int | None = None) -> str:
    """Return rows as text, without a newline at the end.

    JSON and CSV hold the exact values, with NaN and infinity as "nan", "inf" and "-inf", and null or an empty field
    for None. The table and the Markdown round.

    Args:
        rows: Rows with the same keys.
        format: One of `FORMATS`.
        width: Columns of a table; by default the terminal's, or 160 where there is none.

    Raises:
        NormlabError: The format is unknown.
    """
    if format not in FORMATS:
        raise NormlabError(unknown("format", format, FORMATS))
    if format == "json":
        return json.dumps([encode(row) for row in rows], indent=2, allow_nan=False)
    if not rows:
        return ""
    if format == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(encode(row) for row in rows)
        return text.getvalue().removesuffix("\n")
    if format == "markdown":
        return _markdown(rows)
    return render_table(rows, width or shutil.get_terminal_size((160, 24)).columns)


def _markdown(rows: Sequence[Row]) -> str:
    keys = list(rows[0])
    table = [
        [column_title(key) for key in keys],
        ["---:" if is_numeric(key) else "---" for key in keys],
        *([_escape(format_value(key, row[key])) for key in keys] for row in rows),
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    if warning := corpora_note(rows):
        lines += ["", _escape(warning)]
    return "\n".join(lines)


def _escape(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An underscore inside a word is not markup, and names are full of them.
    return re.sub(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)
