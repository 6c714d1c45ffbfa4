"""Everything that the page of a comparison shows, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from normlab.report.by import Options, Report, build_report, check_by, read_results
from normlab.report.by_text import notes, table_rows
from normlab.report.compare import curves, depths
from normlab.report.compare.answer import answer, best
from normlab.report.compare.comparable import banners, default_by, varied
from normlab.report.compare.find import ABSENT, Found, not_started
from normlab.report.compare.numbers import SPIKE_RULES, Numbers, read_numbers
from normlab.report.compare.rates import matrix, rates
from normlab.report.intervals import LEVEL
from normlab.report.outcomes import RunResult
from normlab.report.settings import check_options, format_setting, get_nested, options_of, setting, short_names
from normlab.report.summary import COLUMNS, row_of
from normlab.report.where import match_runs, parse_conditions
from normlab.stats.spikes import RULES
from normlab.store.query import Entry
from normlab.store.schema import DAMAGED, DIVERGED, RUNNING, number

Row = dict[str, Any]

MOST_SPIKES = 200
"""The most spikes of a run and a series whose steps are told, the first of them; how many there are is told always."""
STILL_RUNNING = "is still running: these are its numbers until now"


def data(found: Found, by: Sequence[str] | None, where: Sequence[str]) -> Row:
    """What the page shows.

    Args:
        found: The runs.
        by: The words that cells are made of; those in which the runs differ unless given.
        where: Conditions that the runs must meet.

    Raises:
        ConfigError: A word is none of the runs', or a condition is none.
    """
    if by is not None:
        check_by(by)
    entries = list(found.entries)
    if where:
        kept = match_runs([entry.run for entry in entries], parse_conditions(where, "--where"))
        entries = [entry for entry, keep in zip(entries, kept, strict=True) if keep]
    began = [entry for entry in entries if entry.state not in ABSENT]
    outcomes, said = read_results(began)
    said = [*not_started([entry.state for entry in entries]), *said]
    words = list(by) if by is not None else default_by(outcomes)
    if by is not None and outcomes:
        check_options(words, [one.entry.run for one in outcomes], "--by")
    report = build_report(outcomes, words, Options(), said) if outcomes else Report(words, [], said, [])

    index = {entry.folder.path: place for place, entry in enumerate(entries)}
    cell_of = {run.entry.folder.path: place for place, cell in enumerate(report.cells) for run in cell.runs}
    differing = varied(outcomes)
    by_path = {one.entry.folder.path: one for one in outcomes}
    runs = [
        {**_run(entry, by_path.get(entry.folder.path), len(entries), differing), "cell": cell_of.get(entry.folder.path)}
        for entry in entries
    ]
    for place, run in enumerate(runs):
        run["index"] = place
    absent = [_absence(entry) for entry in entries if entry.folder.path not in cell_of]
    texts = table_rows(report) if report.rows else []
    profiles, unmeasured = depths.profiles(entries, report.cells, [run["warmup"] for run in runs])
    for place, problem in unmeasured:
        runs[place]["note"] = _joined(runs[place]["note"], problem)
        runs[place]["problems"] += [] if problem == depths.UNMEASURED else [problem]
    options = sorted(options_of([entry.run for entry in entries]))
    return {
        "title": _title(found, len(entries)),
        "options": {option: _values(entries, option) for option in options},
        "short_names": short_names(options),
        "by": words,
        "level": LEVEL,
        "answer": answer(report.cells, absent, words),
        "best": best(report.cells),
        "banners": banners(outcomes),
        "warnings": report.warnings,
        "notes": notes(report) if report.rows else [],
        "cells": [
            {
                **row,
                "index": place,
                "label": cell.name,
                "runs": [index[run.entry.folder.path] for run in cell.runs],
                "at_best": [index[run.entry.folder.path] for run in cell.runs_at(cell.best_lr)],
                "text": text,
            }
            for place, (row, cell, text) in enumerate(zip(report.rows, report.cells, texts, strict=True))
        ],
        "cell_columns": list(texts[0]) if texts else [],
        "runs": runs,
        "differing": differing,
        "matrix": matrix(outcomes, index),
        "rates": rates(report.cells, index),
        "profiles": profiles,
        "spike_rules": {
            of: {"name": rule.name, "formula": rule.formula, "source": rule.source}
            for of, name in SPIKE_RULES.items()
            for rule in RULES
            if rule.name == name
        },
        "sampling": curves.SAMPLING,
    }


def _values(entries: Sequence[Entry], option: str) -> list[Any]:
    """What each run has of an option, or the one value that all have."""
    values = [setting(entry.run, option) for entry in entries]
    return values[:1] if all(value == values[0] for value in values) else values


def _title(found: Found, kept: int) -> str:
    """The sweep's name, or how many runs there are; of how many, where conditions left some out."""
    total = len(found.entries)
    count = f"{kept} of {total} runs" if kept < total else "1 run" if total == 1 else f"{total} runs"
    return found.name if found.name and kept == total else f"{found.name}: {count}" if found.name else count


def _absence(entry: Entry) -> str:
    """Why a run is in no cell."""
    return entry.state if entry.state in (*ABSENT, DAMAGED) else "does not say what it was"


def _run(entry: Entry, one: RunResult | None, runs: int, differing: Sequence[str]) -> Row:
    """The row that `summarize` has of one of so many runs, and what the page shows besides."""
    most = curves.points_for(runs)
    read = read_numbers(entry.folder)
    row = row_of(entry, read.rows)
    problems = [problem for problem in (entry.problem, read.problem) if problem]
    told = [STILL_RUNNING] if entry.state == RUNNING else []
    note = _joined(row["note"], *(problem for problem in told + problems if problem not in row["note"]))
    return {
        **{key: row[key] for key in COLUMNS},
        "note": note,
        "problems": problems,
        "settings": {word: format_setting(setting(entry.run, word)) for word in differing},
        "came_out": one is not None and one.has_loss,
        "warmup": _count(get_nested(entry.run, "config.optim.warmup_steps")),
        "tokens_per_step": _tokens(entry),
        "diverged_at": _diverged_at(entry, row),
        "spikes": {of: steps[:MOST_SPIKES] for of, steps in _spikes(read).items()},
        "spike_counts": {of: len(steps) for of, steps in _spikes(read).items()},
        "loss": curves.curve(read.steps, read.loss, most),
        "grad_norm": curves.curve(read.steps, read.grad_norm, most),
        "evals": {
            "steps": [seen.step for seen in read.evaluations],
            "values": [seen.loss for seen in read.evaluations],
        },
        "paces": _paces(read, curves.moments_for(runs)),
    }


def _diverged_at(entry: Entry, row: Row) -> int | None:
    """The step at which a run diverged: its last one, where its final loss is the divergence."""
    if row["state"] != DIVERGED:
        return None
    step = get_nested(entry.status, "diverged.step")
    return _count(row["step"] if step is None else step)


def _spikes(read: Numbers) -> dict[str, list[int]]:
    return {of: read.spikes.get(of, []) for of in SPIKE_RULES}


def _paces(read: Numbers, most: int) -> Row:
    """When the run was where, evenly thinned; the first and the last moment among them."""
    last, most = len(read.paces) - 1, min(len(read.paces), most)
    kept = [read.paces[round(at * last / max(most - 1, 1))] for at in range(most)]
    return {"steps": [step for step, _ in kept], "seconds": [seconds for _, seconds in kept]}


def _tokens(entry: Entry) -> int | None:
    """Tokens of an update; the batch is that of all its micro-batches."""
    batch, context = (_count(get_nested(entry.run, f"config.{word}")) for word in ("train.batch_size", "model.context"))
    return None if batch is None or context is None else batch * context


def _count(value: Any) -> int | None:
    """A whole number of the record; None for any other."""
    known = number(value)
    return int(known) if known is not None and known >= 0 and known % 1 == 0 else None


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))
