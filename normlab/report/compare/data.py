"""The data of the comparison page as JSON values. The page's scripts draw them and compute nothing.

The figures are in `figures`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from normlab.analysis.cells import Cell, runs_of
from normlab.analysis.comparability import intact_runs
from normlab.analysis.conditions import select_where
from normlab.analysis.factors import varying_options
from normlab.analysis.rate_range import HIGHEST, SENSITIVITY
from normlab.analysis.settings import format_setting, setting, settings_of
from normlab.analysis.table import CellsTable, build_table, cell_options
from normlab.base.errors import counted, printable
from normlab.report.cells_table import notes, table_rows
from normlab.report.channels import choose_channels
from normlab.report.compare.figures import PageFigures, name_of
from normlab.report.compare.summary_text import Fact, summary_facts
from normlab.report.figure_axes import short_number
from normlab.report.figure_points import SERIES, ReadCache
from normlab.report.runs_table import COLUMNS, row_of
from normlab.report.tables import TableRow
from normlab.store.format import RUNNING
from normlab.store.query import NOT_STARTED, Selection
from normlab.store.record import RunEntry, RunRecord

_COLUMNS_AFTER_OPTIONS = (
    "state", "val_loss", "best_val_loss", "train_loss", "step", "tokens_per_s", "flops_per_s",
    "mfu", "seconds", "id", "note",
)  # fmt: skip
"""The columns of the table of runs after the options in which the runs differ."""
_COLUMN_OF = {column.key: column for column in COLUMNS}
STILL_RUNNING = "still running: the numbers may be some steps old"


def page_data(
    selection: Selection,
    by: Sequence[str] | None,
    where: Sequence[str],
    channels: Mapping[str, Any] | None = None,
) -> TableRow:
    """Return the data of the page of the runs that meet the conditions, by some factors; `by` as in `cell_options`.

    Raises:
        ConfigError: An option of `by`, a condition or a channel is invalid.
    """
    cache = ReadCache()
    # Of all runs, since a damaged run can meet no condition, and has a warning nevertheless.
    among, warnings = intact_runs(selection.records)
    records = select_where(selection.records, where)
    runs = [record for record in records if isinstance(record, RunRecord)]
    options = cell_options(by, runs)
    table = build_table(runs, options, warnings=warnings, among=among)
    chosen = choose_channels(table.factors, records, **channels or {})
    in_cells = {run.folder.path for run in runs_of(table.cells)}
    missing: list[str] = []
    for record in records:
        if record.folder.path not in in_cells:
            missing.append(record.state)
    facts = summary_facts(table.cells, missing)
    names = varying_options(runs)
    page_figures = PageFigures(table, chosen, names, cache)
    figures = page_figures.values()
    texts = table_rows(table)
    cell_columns = list(texts[0]) if texts else []
    return {
        "title": _title(selection, len(records)),
        "about": _about(records, runs, table),
        "summary": [fact.sentence for fact in facts],
        "facts": [fact._asdict() for fact in [*facts, _cost(table.cells)]],
        "warnings": table.warnings,
        "by": options,
        "figures": figures,
        "lines": list(map(list, page_figures.styles)),
        "series": SERIES,
        "cell_table": {"columns": cell_columns, "rows": [list(row.values()) for row in texts]},
        "run_table": _run_table(records, names, cache),
        "notes": _notes(table, facts, texts),
        "problems": _problems(cache, table.warnings),
    }


def _notes(table: CellsTable, facts: Sequence[Fact], texts: Sequence[TableRow]) -> list[str]:
    """Return the definitions of the columns of the cells, and of the numbers of learning rates in the summary."""
    lines: list[str] = []
    if texts:
        lines += notes(table, texts[0])
    if any(fact.table for fact in facts):
        lines += SENSITIVITY.text, HIGHEST.text
    return lines


def _title(selection: Selection, kept: int) -> str:
    """Return the sweep's name or the number of runs, and how many conditions select."""
    total = len(selection.records)
    count = counted(total, "run")
    if kept < total:
        count = f"{kept} of {count}"
    if not selection.name:
        return count
    if kept == total:
        return selection.name
    return f"{selection.name}: {count}"


def _about(records: Sequence[RunEntry], runs: Sequence[RunRecord], table: CellsTable) -> str:
    """Return the number of runs, the definition of a cell, and the corpora and devices."""
    about = counted(len(records), "run")
    if table.cells:
        names = " x ".join(factor.name for factor in table.factors)
        about += f" in {counted(len(table.cells), 'cell')}: {names}"
    parts = [about.rstrip()]
    for key in ("corpus", "device", "precision"):
        values = {str(settings_of(run)[key]) for run in runs}
        if values:
            parts.append(", ".join(sorted(values)))
    return " · ".join(parts)


def _cost(cells: Sequence[Cell]) -> Fact:
    """Return the number of runs, their tokens, FLOPs and time; the runs of a pack share its time."""
    runs = runs_of(cells)
    tokens = math.fsum(run.status.tokens for run in runs)
    flops = math.fsum(run.run.flops_per_token * run.status.tokens for run in runs)
    # The runs of a pack train in the same time.
    minutes = math.fsum(run.status.seconds / run.status.pack_size for run in runs) / 60
    time = f"{minutes:.3g} minutes"
    if minutes >= 60:
        time = f"{minutes / 60:.3g} hours"
    compute = f"{flops:.2e}".replace("e+0", "e").replace("e+", "e")
    text = f"{counted(len(runs), 'run')}, {short_number(tokens)} tokens, {compute} FLOPs, {time} of training."
    return Fact(text, "cost")


# Tables


def _run_table(records: Sequence[RunEntry], options: Sequence[str], cache: ReadCache) -> TableRow:
    rows: list[TableRow] = []
    for record in records:
        row = row_of(record)
        # The problems of the runs are also warnings of the page.
        problems = cache.problems_of(record)
        if record.state != NOT_STARTED:
            problems += filter(None, [record.problem, record.folder.metrics_problem()])
        notes = [row["note"], record.problem]
        if record.state == RUNNING:
            notes.append(STILL_RUNNING)
        row["note"] = "; ".join(dict.fromkeys(filter(None, [*notes, *problems])))
        values = [name_of(record, options)]
        for option in options:
            values.append(format_setting(setting(record, option)))
        for key in _COLUMNS_AFTER_OPTIONS:
            text = _COLUMN_OF[key].text_of(row[key])
            values.append(printable(text))
        rows.append({"id": record.run_id, "state": row["state"], "values": values})
    titles = [_COLUMN_OF[key].title for key in _COLUMNS_AFTER_OPTIONS]
    return {"columns": ["run", *options, *titles], "rows": rows}


def _problems(cache: ReadCache, warnings: Sequence[str]) -> list[str]:
    """Return a line for each run with problems that are in no warning."""
    problems: list[str] = []
    for run, lines in cache.problems.items():
        new: list[str] = []
        for line in dict.fromkeys(lines):
            if not any(line in warning for warning in warnings):
                new.append(line)
        if new:
            # The run is named once; "is of run X, not of run Y" stays whole.
            text = re.sub(rf"(?<!not) of run {re.escape(run)}\b", "", "; ".join(new))
            problems.append(f"run {run}: {text}")
    return problems
