"""The table of `normlab summarize`: the cells of a sweep.

JSON and CSV have every value, not rounded. A text has few columns (`cell_columns`), each with its definition below.
"""

from collections.abc import Iterable, Sequence

from normlab.analysis.cells import Cell
from normlab.analysis.columns import Column, Definition
from normlab.analysis.comparability import MAX_VALUES
from normlab.analysis.contrasts import POOLED, pool_notes
from normlab.analysis.factors import level_title, option_name
from normlab.analysis.intervals import LEVEL, Design
from normlab.analysis.settings import format_setting
from normlab.analysis.table import CellsTable
from normlab.base.errors import ConfigError, counted, unknown
from normlab.report.cell_columns import columns_of, design_of_cell, design_of_test
from normlab.report.tables import TableRow, add_notes, render


def render_cells(table: CellsTable, format: str, columns: Sequence[str] = (), *, has_definitions: bool = True) -> str:
    """Render the cells in one of `tables.FORMATS`, with the factors and some columns, such as `val_loss`.

    JSON and CSV have every value, and every column by default. A table of lines may leave out the definitions.

    Raises:
        ConfigError: A column is unknown.
        NormlabError: The format is unknown.
    """
    if format in ("json", "csv"):
        return render(_chosen_values(json_rows(table), table.by, columns), format)
    rows = table_rows(table, columns)
    shown = list(rows[0]) if rows else []
    lines = notes(table, shown)
    # A paper has the names of the factors, and not those of the options.
    if format == "latex":
        rows = [_with_titles(row, cell) for row, cell in zip(rows, table.cells, strict=True)]
    return add_notes(render(rows, format, fixed=table.by), lines, format, has_definitions=has_definitions)


def _chosen_values(rows: Sequence[TableRow], by: Sequence[str], columns: Sequence[str]) -> Sequence[TableRow]:
    """Return the rows with the factors and the chosen columns only; with all if no columns are chosen."""
    if not columns:
        return rows
    known = rows[0] if rows else ()
    keys = dict.fromkeys([*by, *_choose(columns, known)])
    chosen: list[TableRow] = []
    for row in rows:
        chosen.append({key: row[key] for key in keys})
    return chosen


def _with_titles(row: TableRow, cell: Cell) -> TableRow:
    """Return a row with the names and levels of factors as in text: `depth`, `DeepNorm`."""
    titled: TableRow = {}
    for option, value in cell.levels.items():
        titled[option_name(option)] = level_title(option, value)
    for key, text in row.items():
        if key not in cell.by:
            titled[key] = text
    return titled


def _choose(columns: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return the columns with these names, in which spaces, underscores and case do not matter."""
    by_name = {_plain(key): key for key in known}
    chosen: list[str] = []
    for name in columns:
        if _plain(name) not in by_name:
            raise ConfigError("--columns: " + unknown("column", name, list(by_name.values())))
        chosen.append(by_name[_plain(name)])
    return chosen


def _plain(name: str) -> str:
    return name.lower().replace(" ", "_")


def json_rows(table: CellsTable) -> list[TableRow]:
    """Return the values of each cell: levels, counts, losses in nats/token, costs, comparisons and warnings."""
    columns = columns_of(table, is_text=False)
    rows: list[TableRow] = []
    for cell in table.cells:
        row: TableRow = dict(cell.levels)
        for column in columns:
            row[column.key] = column.value(cell)
        rows.append(row)
    return rows


def table_rows(table: CellsTable, columns: Sequence[str] = ()) -> list[TableRow]:
    """Return the rows of the table as text: the factors, and some columns, by default those that are not empty.

    Raises:
        ConfigError: A column is unknown.
    """
    text_columns: Sequence[Column[Cell]] = ()
    if table.cells:
        text_columns = columns_of(table, is_text=True)
    texts: dict[str, list[str]] = {}
    shown: list[str] = []
    for column in text_columns:
        texts[column.title] = list(map(column.text, table.cells))
        if column.is_default and any(texts[column.title]):
            shown.append(column.title)
    if columns:
        # Every row has the factors, so that they may be named, too.
        chosen = _choose(columns, [*texts, *table.by])
        shown = [title for title in chosen if title not in table.by]
    rows: list[TableRow] = []
    for index, cell in enumerate(table.cells):
        row: TableRow = {}
        for option, value in cell.levels.items():
            row[option] = format_setting(value)
        for title in shown:
            row[title] = texts[title][index]
        rows.append(row)
    return rows


# Definitions


def notes(table: CellsTable, shown: Iterable[str] | None = None) -> list[str]:
    """Return the notes below the shown columns, by default those of `table_rows`."""
    cells = table.cells
    if shown is None:
        shown = (table_rows(table) or [{}])[0]
    shown = list(shown)
    lines = [
        f"losses: nats/token, mean ± half of its {LEVEL:.0%} interval over n seeds (Student's t); both losses if n=2",
        *_design_notes(cells),
        *table.resolved_differences,
    ]
    if "best lr" in shown or "val loss" in shown:
        lines += _selection_notes(cells)
    if "vs baseline" in shown and any(cell.baseline for cell in cells):
        lines += _comparison_notes(cells)
    for column in columns_of(table, is_text=True):
        if column.note and column.title in shown and any(map(column.text, cells)):
            lines.append(Definition(column.note))
    return lines


def _selection_notes(cells: Sequence[Cell]) -> list[str]:
    """Return the note that the best learning rate is selected, if a cell has several."""
    sizes = [len(cell.losses) for cell in cells if cell.losses]
    smallest, largest = min(sizes, default=0), max(sizes, default=0)
    if largest < 2:
        return []
    count = f"{smallest}-{largest}"
    if smallest == largest:
        count = f"{smallest}"
    return [
        f"best lr: the best of {count} learning rates, selected on this same loss, so the loss is optimistic; a "
        "rate at which a seed diverged is selected only if a seed diverged at every rate"
    ]


def _comparison_notes(cells: Sequence[Cell]) -> list[str]:
    """Return what the comparisons with the baseline are."""
    methods: list[str] = []
    pooled: list[str] = []
    tests = 0
    for cell in cells:
        if cell.comparison is None:
            continue
        # All comparisons are of one family, so that each has the number of them all.
        tests = cell.comparison.tests
        if cell.comparison.test is not None:
            methods.append(cell.comparison.test.test)
            if methods[-1].startswith(POOLED):
                pooled.append(cell.label)
    method = "of a paired t test"
    if pooled:
        which = "; ".join(pooled)
        if len(pooled) > MAX_VALUES:
            which = f"{len(pooled)} of {counted(len(methods), 'comparison')}"
        method = f"of a pooled t test for {which}, else of a paired t test"
        if len(pooled) == len(methods):
            method = "of a pooled t test"
    return [
        Definition(
            "vs baseline: loss minus the loss of the baseline, paired by seed and data order; negative is better"
        ),
        Definition(
            f"p (Holm): two-sided, {method}, or of an exact signed-rank test if a run of a pair diverged (a diverged "
            f"run ranks worst); corrected by Holm's method for {counted(tests, 'comparison')}, of all cells with their "
            "baselines"
        ),
        *pool_notes(methods),
    ]


def _design_notes(cells: Sequence[Cell]) -> list[str]:
    """Return notes on the variance that the intervals include: initial weights, data order."""
    designs: list[Design] = []
    for cell in cells:
        design = design_of_cell(cell)
        if design:
            designs.append(design)
    fixed = {design.fixed for design in designs}
    notes: list[str] = []
    for option, factor in (("data.seed", "data order"), ("seed", "initial weights")):
        if option in fixed:
            notes.append(f"{factor} fixed ({option}): its variance is not in the intervals")
    # The intervals of comparisons may be crossed too.
    for cell in cells:
        design = design_of_test(cell)
        if design:
            designs.append(design)
    crossed = [design for design in designs if design.crossed]
    if crossed:
        crossing = (
            "n=a x b: a seeds crossed with b data seeds, two random effects: variance of the mean "
            "(MS_a + MS_b - MS_ab) / (ab), t with min(a, b) - 1 degrees of freedom"
        )
        notes.append(Definition(crossing))
    if not all(design.complete for design in crossed):
        incomplete = "n=k of a x b: an incomplete crossing: the variances of both factors are added (conservative)"
        notes.append(Definition(incomplete))
    return notes
