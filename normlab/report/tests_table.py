"""The table of `normlab summarize --test`: the rows of a test, with its definitions below."""

from collections.abc import Sequence

from normlab.analysis.factor_tests.base import FactorTest
from normlab.report.tables import TableRow, add_notes, render


def render_tests(test: FactorTest, rows: Sequence[TableRow], format: str, *, has_definitions: bool = True) -> str:
    """Render the rows of a test in one of `tables.FORMATS`; JSON and CSV have every value."""
    if format in ("json", "csv") or not rows:
        return render(rows, format)
    columns = test.columns(rows)
    texts: list[TableRow] = []
    for row in rows:
        texts.append({column.title: column.text(row) for column in columns})
    # The settings in which cells differ are those of the table, and every row has them.
    notes = [*test.notes(rows), *rows[0]["resolved_differences"]]
    text = render(texts, format, fixed=("where", "contrast"))
    return add_notes(text, notes, format, has_definitions=has_definitions)
