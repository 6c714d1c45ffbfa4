"""The data of the comparison page: everything that its scripts draw, as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from normlab.report.by import Options, Report, build_report, check_by
from normlab.report.by_text import notes, table_rows
from normlab.report.cells import rank_cells, read_results
from normlab.report.compare import curves, layer_profiles
from normlab.report.compare.comparable import comparability_warnings, default_cell_options, varying_options
from normlab.report.compare.rates import learning_rate_points, matrix
from normlab.report.compare.run_metrics import SPIKE_RULES, Metrics, read_metrics
from normlab.report.compare.summary_text import best_cell, summary_sentences
from normlab.report.intervals import LEVEL
from normlab.report.settings import check_options, format_setting, options_of, select_where, setting, short_names
from normlab.report.summary import COLUMNS, row_of
from normlab.stats.spikes import RULES
from normlab.store.query import NO_RUN_STATES, Selection, count_not_started
from normlab.store.record import RunRecord
from normlab.store.schema import DAMAGED, DIVERGED, RUNNING

Row = dict[str, Any]

MAX_SPIKES = 200
"""The most spikes of a run and a series that get a mark, the first ones; their number is always complete."""
STILL_RUNNING = "is still running; its numbers are those so far"


def page_data(selection: Selection, by: Sequence[str] | None, where: Sequence[str]) -> Row:
    """Return the data of the page.

    Args:
        selection: The runs.
        by: The options that define cells. None: those in which the runs differ.
        where: Conditions that runs must meet.

    Raises:
        ConfigError: An option of `by` or a condition is invalid.
    """
    if by is not None:
        check_by(by)
    records = select_where(selection.records, where)
    started = [record for record in records if record.state not in NO_RUN_STATES]
    results, warnings = read_results(started)
    if waiting := count_not_started(records):
        warnings.insert(0, f"{waiting} of {len(records)} runs {'has' if waiting == 1 else 'have'} not started")
    options = list(by) if by is not None else default_cell_options(results)
    if by is not None and results:
        check_options(options, [result.record for result in results], "--by")
    report = build_report(results, options, Options(), warnings) if results else Report(options, [], warnings, [])

    index = {record.folder.path: position for position, record in enumerate(records)}
    cell_of = {run.record.folder.path: position for position, cell in enumerate(report.cells) for run in cell.runs}
    differing = varying_options(results)
    runs = [
        _run(record, len(records), differing) | {"index": position, "cell": cell_of.get(record.folder.path)}
        for position, record in enumerate(records)
    ]
    profiles, problems = layer_profiles.layer_profiles(records, report.cells, [run["warmup"] for run in runs])
    for position, problem in problems:
        runs[position]["note"] = _join_notes(runs[position]["note"], problem)
        runs[position]["problems"] += [] if problem == layer_profiles.NO_STATISTICS else [problem]
    missing = [_missing_state(record) for record in records if record.folder.path not in cell_of]
    texts = table_rows(report) if report.rows else []
    order = rank_cells(report.cells)
    run_options = sorted(options_of(records))
    return {
        "title": _title(selection, len(records)),
        "options": {option: _option_values(records, option) for option in run_options},
        "short_names": short_names(run_options),
        "by": options,
        "level": LEVEL,
        "summary": summary_sentences(report.cells, missing, options),
        "best": best_cell(report.cells),
        "order": [*order, *(position for position in range(len(report.cells)) if position not in order)],
        "banners": comparability_warnings(results),
        "warnings": report.warnings,
        "notes": notes(report) if report.rows else [],
        "cells": [
            {
                **row,
                "index": position,
                "label": cell.name,
                "runs": [index[run.record.folder.path] for run in cell.runs],
                "at_best": [index[run.record.folder.path] for run in cell.runs_at(cell.best_lr)],
                "text": text,
            }
            for position, (row, cell, text) in enumerate(zip(report.rows, report.cells, texts, strict=True))
        ],
        "cell_columns": list(texts[0]) if texts else [],
        "runs": runs,
        "differing": differing,
        "matrix": matrix(results, index),
        "rates": learning_rate_points(report.cells, index),
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
    """Return the sweep's name or the number of runs; with conditions, how many of all runs meet them."""
    total = len(selection.records)
    count = f"{kept} of {total} runs" if kept < total else "1 run" if total == 1 else f"{total} runs"
    if not selection.name:
        return count
    return selection.name if kept == total else f"{selection.name}: {count}"


def _missing_state(record: RunRecord) -> str:
    """Return why a run is in no cell."""
    return record.state if record.state in (*NO_RUN_STATES, DAMAGED) else "no settings on record"


def _run(record: RunRecord, runs: int, differing: Sequence[str]) -> Row:
    """Return the row of `summarize` for one of `runs` runs, with its curves."""
    most = curves.points_per_curve(runs)
    metrics = read_metrics(record.folder)
    row = row_of(record, lambda: metrics.rows)
    problems = [problem for problem in (record.problem, metrics.problem) if problem]
    notes = [STILL_RUNNING] if record.state == RUNNING else []
    return {
        **{key: row[key] for key in COLUMNS},
        "note": _join_notes(row["note"], *(note for note in notes + problems if note not in row["note"])),
        "problems": problems,
        "settings": {option: format_setting(setting(record, option)) for option in differing},
        "warmup": _whole_number(record.config.optim.warmup_steps),
        "tokens_per_step": _tokens_per_step(record),
        "diverged_at": _diverged_at(record, row),
        "spikes": {series: metrics.spikes.get(series, [])[:MAX_SPIKES] for series in SPIKE_RULES},
        "spike_counts": {series: len(metrics.spikes.get(series, [])) for series in SPIKE_RULES},
        "loss": curves.curve(metrics.steps, metrics.loss, most),
        "grad_norm": curves.curve(metrics.steps, metrics.grad_norm, most),
        "evals": {
            "steps": [evaluation.step for evaluation in metrics.evaluations],
            "values": [evaluation.loss for evaluation in metrics.evaluations],
        },
        "paces": _times(metrics, curves.times_per_run(runs)),
    }


def _diverged_at(record: RunRecord, row: Row) -> int | None:
    """Return the step at which a run diverged, or None."""
    if row["state"] != DIVERGED:
        return None
    step = record.status.diverged.step
    return _whole_number(row["step"] if step is None else step)


def _times(metrics: Metrics, most: int) -> Row:
    """Return at most `most` time stamps, evenly spaced, with the first and the last."""
    count = len(metrics.times)
    kept = [metrics.times[at] for at in np.linspace(0, count - 1, min(count, most)).round().astype(int)]
    return {"steps": [step for step, _ in kept], "seconds": [seconds for _, seconds in kept]}


def _tokens_per_step(record: RunRecord) -> int | None:
    """Return the tokens of one update over all its micro-batches."""
    batch, context = _whole_number(record.config.train.batch_size), _whole_number(record.config.model.context)
    return None if batch is None or context is None else batch * context


def _whole_number(value: float | None) -> int | None:
    """Return a number of a record that is whole and 0 or more, else None."""
    return int(value) if value is not None and value >= 0 and value % 1 == 0 else None


def _join_notes(*notes: str) -> str:
    return "; ".join(filter(None, notes))
