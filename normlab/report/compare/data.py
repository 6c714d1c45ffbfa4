"""The data of the comparison page: everything that its scripts draw, as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from normlab.report.by import Options, Report, build_report, check_by, read_results
from normlab.report.by_text import notes, table_rows
from normlab.report.compare import curves, layer_profiles
from normlab.report.compare.comparable import comparability_warnings, default_cell_options, varying_options
from normlab.report.compare.find import NO_RUN_STATES, Selection, not_started
from normlab.report.compare.rates import learning_rate_points, matrix
from normlab.report.compare.run_metrics import SPIKE_RULES, Metrics, read_metrics
from normlab.report.compare.summary_text import best_cell, rank_cells, summary_sentences
from normlab.report.intervals import LEVEL
from normlab.report.settings import check_options, format_setting, get_nested, options_of, setting, short_names
from normlab.report.summary import COLUMNS, row_of
from normlab.report.where import match_runs, parse_conditions
from normlab.stats.spikes import RULES
from normlab.store.query import Entry
from normlab.store.schema import DAMAGED, DIVERGED, RUNNING, number

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
    entries = list(selection.entries)
    if where:
        kept = match_runs([entry.run for entry in entries], parse_conditions(where, "--where"))
        entries = [entry for entry, keep in zip(entries, kept, strict=True) if keep]
    outcomes, warnings = read_results([entry for entry in entries if entry.state not in NO_RUN_STATES])
    warnings = [*not_started([entry.state for entry in entries]), *warnings]
    options = list(by) if by is not None else default_cell_options(outcomes)
    if by is not None and outcomes:
        check_options(options, [outcome.entry.run for outcome in outcomes], "--by")
    report = build_report(outcomes, options, Options(), warnings) if outcomes else Report(options, [], warnings, [])

    index = {entry.folder.path: position for position, entry in enumerate(entries)}
    cell_of = {run.entry.folder.path: position for position, cell in enumerate(report.cells) for run in cell.runs}
    differing = varying_options(outcomes)
    runs = [
        _run(entry, len(entries), differing) | {"index": position, "cell": cell_of.get(entry.folder.path)}
        for position, entry in enumerate(entries)
    ]
    profiles, problems = layer_profiles.layer_profiles(entries, report.cells, [run["warmup"] for run in runs])
    for position, problem in problems:
        runs[position]["note"] = _join_notes(runs[position]["note"], problem)
        runs[position]["problems"] += [] if problem == layer_profiles.NO_STATISTICS else [problem]
    missing = [_missing_state(entry) for entry in entries if entry.folder.path not in cell_of]
    texts = table_rows(report) if report.rows else []
    order = rank_cells(report.cells)
    run_options = sorted(options_of([entry.run for entry in entries]))
    return {
        "title": _title(selection, len(entries)),
        "options": {option: _option_values(entries, option) for option in run_options},
        "short_names": short_names(run_options),
        "by": options,
        "level": LEVEL,
        "summary": summary_sentences(report.cells, missing, options),
        "best": best_cell(report.cells),
        "order": [*order, *(position for position in range(len(report.cells)) if position not in order)],
        "banners": comparability_warnings(outcomes),
        "warnings": report.warnings,
        "notes": notes(report) if report.rows else [],
        "cells": [
            {
                **row,
                "index": position,
                "label": cell.name,
                "runs": [index[run.entry.folder.path] for run in cell.runs],
                "at_best": [index[run.entry.folder.path] for run in cell.runs_at(cell.best_lr)],
                "text": text,
            }
            for position, (row, cell, text) in enumerate(zip(report.rows, report.cells, texts, strict=True))
        ],
        "cell_columns": list(texts[0]) if texts else [],
        "runs": runs,
        "differing": differing,
        "matrix": matrix(outcomes, index),
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


def _option_values(entries: Sequence[Entry], option: str) -> list[Any]:
    """Return the value of an option for each run, or one value if all are equal."""
    values = [setting(entry.run, option) for entry in entries]
    return values[:1] if all(value == values[0] for value in values) else values


def _title(selection: Selection, kept: int) -> str:
    """Return the sweep's name or the number of runs; with conditions, how many of all runs meet them."""
    total = len(selection.entries)
    count = f"{kept} of {total} runs" if kept < total else "1 run" if total == 1 else f"{total} runs"
    if not selection.name:
        return count
    return selection.name if kept == total else f"{selection.name}: {count}"


def _missing_state(entry: Entry) -> str:
    """Return why a run is in no cell."""
    return entry.state if entry.state in (*NO_RUN_STATES, DAMAGED) else "no settings on record"


def _run(entry: Entry, runs: int, differing: Sequence[str]) -> Row:
    """Return the row of `summarize` for one of `runs` runs, with its curves."""
    most = curves.points_per_curve(runs)
    metrics = read_metrics(entry.folder)
    row = row_of(entry, lambda: metrics.rows)
    problems = [problem for problem in (entry.problem, metrics.problem) if problem]
    notes = [STILL_RUNNING] if entry.state == RUNNING else []
    return {
        **{key: row[key] for key in COLUMNS},
        "note": _join_notes(row["note"], *(note for note in notes + problems if note not in row["note"])),
        "problems": problems,
        "settings": {option: format_setting(setting(entry.run, option)) for option in differing},
        "warmup": _whole_number(get_nested(entry.run, "config.optim.warmup_steps")),
        "tokens_per_step": _tokens_per_step(entry),
        "diverged_at": _diverged_at(entry, row),
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


def _diverged_at(entry: Entry, row: Row) -> int | None:
    """Return the step at which a run diverged, or None."""
    if row["state"] != DIVERGED:
        return None
    step = get_nested(entry.status, "diverged.step")
    return _whole_number(row["step"] if step is None else step)


def _times(metrics: Metrics, most: int) -> Row:
    """Return at most `most` time stamps, evenly spaced, with the first and the last."""
    count = len(metrics.times)
    kept = [metrics.times[at] for at in np.linspace(0, count - 1, min(count, most)).round().astype(int)]
    return {"steps": [step for step, _ in kept], "seconds": [seconds for _, seconds in kept]}


def _tokens_per_step(entry: Entry) -> int | None:
    """Return the tokens of one update over all its micro-batches."""
    batch, context = (
        _whole_number(get_nested(entry.run, f"config.{key}")) for key in ("train.batch_size", "model.context")
    )
    return None if batch is None or context is None else batch * context


def _whole_number(value: Any) -> int | None:
    """Return a value of a record that is a whole number of 0 or more, else None."""
    known = number(value)
    return int(known) if known is not None and known >= 0 and known % 1 == 0 else None


def _join_notes(*notes: str) -> str:
    return "; ".join(filter(None, notes))
