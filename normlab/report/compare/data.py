"""The data of the comparison page as JSON values, which the page's scripts draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from normlab.errors import StoreError
from normlab.report.cells import Cell, rank_cells
from normlab.report.cells_table import BEST, CellsTable, build_table, cell_options, losses_at
from normlab.report.cells_text import loss_text, notes, table_rows
from normlab.report.compare import curves, layer_profiles
from normlab.report.compare.summary_text import best_cell, summary_sentences
from normlab.report.factors import MAIN_OPTIONS, varying_options
from normlab.report.intervals import LEVEL
from normlab.report.results import (
    RunResult,
    comparability_warnings,
    read_results,
)
from normlab.report.runs_table import COLUMNS, row_of, unreadable_lines_note
from normlab.report.settings import format_setting, options_of, select_where, setting, short_names
from normlab.report.tables import Row, counted, evenly_spaced, format_value
from normlab.stats.spikes import RULES, count_spikes
from normlab.store.format import DAMAGED, DIVERGED, RUNNING, number
from normlab.store.query import NO_RUN_STATES, Selection
from normlab.store.reading import Rows
from normlab.store.record import RunRecord
from normlab.store.series import evaluations_of, series_of

RunIndex = Mapping[Path, int]
"""The page's index of a run, by its folder."""

TEXT_KEYS = (
    "val_loss", "best_val_loss", "last_val_loss", "train_loss", "step", "steps", "tokens_per_s",
)  # fmt: skip
"""The numeric columns of the table of runs."""
SPIKE_RULES = {"loss": "loss_olmo_core", "grad_norm": "grad_norm_olmo_core"}
"""The spike rule of each series."""
MAX_STEP = 2**32 - 1
"""The largest step that fits the page's uint32 arrays."""
MAX_SPIKES = 200
"""Most spikes of a run and a series that are marked, from the first on; the count includes all."""
STILL_RUNNING = "still running: the numbers are of its latest step"


def page_data(selection: Selection, by: Sequence[str] | None, where: Sequence[str]) -> Row:
    """Return the data of the page.

    Args:
        selection: The runs.
        by: The options that define cells; None for the options in which the runs differ.
        where: Conditions that the runs must meet.

    Raises:
        ConfigError: An option of `by` or a condition is invalid.
    """
    results, warnings = read_results(selection.records)  # warns of every damaged run, which can meet no condition
    records = select_where(selection.records, where)
    selected = set(records)
    results = [result for result in results if result.record in selected]
    options = cell_options(by, results)
    table = build_table(results, options, warnings=warnings) if results else CellsTable(options, [], warnings, [])

    index = {record.folder.path: position for position, record in enumerate(records)}
    cell_of = {run.record.folder.path: position for position, cell in enumerate(table.cells) for run in cell.runs}
    differing = varying_options(results)
    runs = [
        _run(record, len(records), differing) | {"index": position, "cell": cell_of.get(record.folder.path)}
        for position, record in enumerate(records)
    ]
    profiles, problems = layer_profiles.layer_profiles(records, table.cells, [run["warmup"] for run in runs])
    for position, problem in problems:
        runs[position]["note"] = "; ".join(filter(None, [runs[position]["note"], problem]))
        runs[position]["problems"] += [] if problem == layer_profiles.NO_STATISTICS else [problem]
    states = (*NO_RUN_STATES, DAMAGED)
    missing = [
        record.state if record.state in states else "no settings on record"
        for record in records
        if record.folder.path not in cell_of
    ]
    texts = table_rows(table) if table.rows else []
    order = rank_cells(table.cells)
    run_options = sorted(options_of(records))
    return {
        "title": _title(selection, len(records)),
        "options": {option: _option_values(records, option) for option in run_options},
        "short_names": short_names(run_options),
        "by": options,
        "level": LEVEL,
        "summary": summary_sentences(table.cells, missing, options),
        "best": best_cell(table.cells),
        "order": [*order, *(position for position in range(len(table.cells)) if position not in order)],
        "banners": comparability_warnings(results),
        "warnings": table.warnings,
        "notes": notes(table) if table.rows else [],
        "cells": [
            {
                **row,
                "index": position,
                "label": cell.label,
                "runs": [index[run.record.folder.path] for run in cell.runs],
                "at_best": [index[run.record.folder.path] for run in cell.runs_at(cell.best_lr)],
                "text": text,
            }
            for position, (row, cell, text) in enumerate(zip(table.rows, table.cells, texts, strict=True))
        ],
        "cell_columns": list(texts[0]) if texts else [],
        "runs": runs,
        "differing": differing,
        "matrix": _matrix(results, index),
        "rates": [_learning_rate_points(cell, index) for cell in table.cells],
        "profiles": profiles,
        "spike_rules": {
            series: {"formula": rule.formula, "source": rule.source}
            for series, name in SPIKE_RULES.items()
            for rule in RULES
            if rule.name == name
        },
        "sampling": curves.SAMPLING,
    }


def _option_values(records: Sequence[RunRecord], option: str) -> list[Any]:
    """Return the value of an option for each run, or one value if all are equal."""
    values = [setting(record, option) for record in records]
    return values[:1] if all(value == values[0] for value in values) else values


def _title(selection: Selection, kept: int) -> str:
    """Return the sweep's name or the number of runs, and how many conditions select."""
    total = len(selection.records)
    count = f"{kept} of {counted(total, 'run')}" if kept < total else counted(total, "run")
    if not selection.name:
        return count
    return selection.name if kept == total else f"{selection.name}: {count}"


def _run(record: RunRecord, runs: int, differing: Sequence[str]) -> Row:
    """Return a run's row of `summarize` with its curves, for a page of `runs` runs."""
    problems = [record.problem, record.folder.metrics_problem()]
    rows = Rows([], damaged=0, torn=False)
    try:
        rows = record.folder.rows()
    except StoreError as error:
        problems = [record.problem, str(error)]
    trained = series_of([row for row in rows.rows if row.get("kind") == "train"])
    valid = (trained["step"] >= 0) & (trained["step"] <= MAX_STEP) & (np.floor(trained["step"]) == trained["step"])
    order = np.flatnonzero(valid)
    order = order[np.argsort(trained["step"][order], kind="stable")]  # a damaged row may repeat a step
    trained = {name: values[order] for name, values in trained.items()}
    steps, invalid = trained["step"].astype(np.int64), int((~valid).sum())
    problems += [unreadable_lines_note(rows), f"rows of the metrics without a valid step: {invalid}" if invalid else ""]
    problems = list(filter(None, problems))
    spikes: dict[str, list[int]] = {series: [] for series in SPIKE_RULES}
    if len(steps):
        rules = [rule for rule in RULES if rule.name in SPIKE_RULES.values()]
        spikes = {counts.rule.of: steps[counts.spikes].tolist() for counts in count_spikes(trained, rules)}
    others = [row for row in rows.rows if row.get("kind") != "train"]
    measured = evaluations_of(others)
    batch, context = _whole_number(record.config.train.batch_size), _whole_number(record.config.model.context)
    row = row_of(record, lambda: rows)
    notes = [STILL_RUNNING] if record.state == RUNNING else []
    most = curves.points_per_curve(runs)
    return {
        **{key: row[key] for key in COLUMNS},
        "note": "; ".join(filter(None, [row["note"], *(note for note in notes + problems if note not in row["note"])])),
        "text": {key: format_value(key, row[key]) for key in TEXT_KEYS},
        "problems": problems,
        "settings": {option: format_setting(setting(record, option)) for option in differing},
        "warmup": _whole_number(record.config.optim.warmup_steps),
        "tokens_per_step": None if batch is None or context is None else batch * context,
        "diverged_at": _diverged_at(record, row),
        "spikes": {of: at[:MAX_SPIKES] for of, at in spikes.items()},
        "spike_counts": {of: len(at) for of, at in spikes.items()},
        "loss": curves.curve(steps, trained["loss"], most),
        "grad_norm": curves.curve(steps, trained["grad_norm"], most),
        "evals": {"steps": [each.step for each in measured], "values": [each.loss for each in measured]},
        "paces": _times(others, curves.times_per_run(runs)),
    }


def _diverged_at(record: RunRecord, row: Row) -> int | None:
    """Return the step at which a run diverged, or None."""
    if row["state"] != DIVERGED:
        return None
    step = record.status.diverged.step
    return _whole_number(row["step"] if step is None else step)


def _times(rows: Sequence[Row], most: int) -> Row:
    """Return at most `most` steps and the training seconds until each, evenly spaced."""
    pairs = [(number(row.get("step")), number(row.get("seconds"))) for row in rows if row.get("kind") == "pace"]
    times = evenly_spaced([pair for pair in pairs if None not in pair], most)
    return {"steps": [step for step, _ in times], "seconds": [seconds for _, seconds in times]}


def _whole_number(value: float | None) -> int | None:
    """Return the number as an integer if it is a whole number of at least 0, else None."""
    return int(value) if value is not None and value >= 0 and value % 1 == 0 else None


def _learning_rate_points(cell: Cell, index: RunIndex) -> list[Row]:
    """Return, for each learning rate of a cell, the mean loss and the loss of each run.

    If a run diverged, the mean is infinite and `val_loss_of_others` holds the mean of the other runs.
    """
    return [
        {
            **losses_at(cell, lr, BEST),
            "text": loss_text(losses),
            "runs": [{"run": index[run.record.folder.path], "loss": run.loss} for run in cell.runs_at(lr)],
        }
        for lr, losses in cell.losses.items()
    ]


def _matrix(results: Sequence[RunResult], index: RunIndex) -> Row:
    """Return the rows of `summarize --by norm,placement,model.depth`, with their axes."""
    table = build_table(results, MAIN_OPTIONS)
    cells = [
        {
            **row,
            "norm": format_setting(cell.key[0]),
            "placement": format_setting(cell.key[1]),
            "depth": cell.key[2],
            "text": loss_text(cell.final_losses),
            "runs": [index[run.record.folder.path] for run in cell.runs],
        }
        for row, cell in zip(table.rows, table.cells, strict=True)
    ]
    axes = {f"{axis}s": list(dict.fromkeys(cell[axis] for cell in cells)) for axis in ("norm", "placement", "depth")}
    return {**axes, "cells": cells}
