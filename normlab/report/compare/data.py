"""The data of the comparison page as JSON values. The page's scripts draw them and compute no statistics."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from normlab.analysis.best import rank_by_size, rank_cells, size_options
from normlab.analysis.cells import Cell
from normlab.analysis.factor_tests import run_test
from normlab.analysis.factors import Factor, level_label, level_title, option_name, short_label, varying_options
from normlab.analysis.intervals import LEVEL
from normlab.analysis.phrases import counted
from normlab.analysis.results import RunResult, comparability_warnings, read_results
from normlab.analysis.settings import format_setting, select_where, setting
from normlab.analysis.table import CellsTable, build_table, cell_options
from normlab.errors import ConfigError
from normlab.report.cells_table import json_rows, notes, table_rows
from normlab.report.channels import choose_channels, level_colors
from normlab.report.compare.summary_text import (
    BAD_STATES,
    MAX_COMPARED,
    NO_RESULT,
    all_bad,
    loss_text,
    lr_text,
    margin_text,
    margins,
    not_comparable,
    selection_note,
    summary_sentences,
)
from normlab.report.figure_data import factor_axis
from normlab.report.figure_points import (
    MOMENTS,
    SERIES,
    CurveReader,
    Point,
    Profile,
    Statistic,
    loss_point,
    mean_curve,
    median_profile,
    read_profiles,
)
from normlab.report.runs_table import row_of
from normlab.report.tables import Row, format_value
from normlab.report.tests_table import format_tests, notes_on_tests
from normlab.stats.registry import STATISTICS
from normlab.store.format import RUNNING
from normlab.store.query import NOT_STARTED, Selection
from normlab.store.record import RunEntry, RunRecord

MAX_LAYER_VALUES = 400_000
"""Most values of profiles over layers; a page of more keeps fewer of the `MOMENTS`, the last one at least."""
MAX_INTERACTIONS = 500
"""Most rows of the page's table of interactions; a page of more leaves it out."""
RUN_COLUMNS = (
    "state", "val_loss", "best_val_loss", "last_val_loss", "train_loss", "step", "tokens_per_s", "flops_per_s",
    "mfu", "seconds", "id", "note",
)  # fmt: skip
"""The columns of the table of runs after the options in which the runs differ."""
_RUN_TITLES = {"flops_per_s": "TFLOP/s", "mfu": "MFU"}
"""Titles that are not the key."""
STILL_RUNNING = "still running: the numbers may be some steps old"
MAX_UNFINISHED = 48
"""Most runs of the figure of unfinished runs."""
DIGITS = 6
"""Significant digits of curves and profiles."""
Value = TypeVar("Value")


class ReadCache:
    """Keeps what was read from runs until their files change, for a page that is written again and again."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Callable[..., Any], Path], tuple[object, Any, list[str]]] = {}
        self._points: dict[object, tuple[Sequence[Any], list[list[float]]]] = {}
        self._earlier = self._points
        self.curves = CurveReader()

    def start_page(self) -> None:
        """Drop the points that the last page did not use."""
        self._earlier, self._points = self._points, {}

    def points(
        self, combine: Callable[..., Sequence[Point]], values: Sequence[Any], *arguments: str
    ) -> list[list[float]]:
        """Return the numbers of `combine(values, *arguments)`, or those of an earlier call with the same objects."""
        key = (combine, *arguments, *map(id, values))  # the values are kept, so that no other object has their ids
        if key not in self._points:
            self._points[key] = self._earlier.get(key) or (values, _numbers(combine(values, *arguments)))
        return self._points[key][1]

    def read(self, read: Callable[[Any, list[str]], Value], record: RunEntry, problems: list[str]) -> Value:
        """Return `read(record, problems)`, or the value and the problems of the call with the same files."""
        key, stamp = (read, record.folder.path), record.folder.stamp()  # taken first: a later change is read next time
        if key not in self._kept or self._kept[key][0] != stamp:
            found: list[str] = []
            self._kept[key] = (stamp, read(record, found), found)
        _, value, found = self._kept[key]
        problems += found
        return value


def page_data(
    selection: Selection,
    by: Sequence[str] | None,
    where: Sequence[str],
    channels: Mapping[str, Any] | None = None,
    cache: ReadCache | None = None,
) -> Row:
    """Return the data of the page.

    Args:
        selection: The runs.
        by: The factors; None for the options in which the runs differ.
        where: Conditions that the runs must meet.
        channels: Arguments of `choose_channels`: `x`, `color`, `style` and `panel`.
        cache: What an earlier call has read.

    Raises:
        ConfigError: An option of `by`, a condition or a channel is invalid.
    """
    cache = cache or ReadCache()
    cache.start_page()
    results, warnings = read_results(selection.records)  # warns of every damaged run, which can meet no condition
    records = select_where(selection.records, where)
    selected = set(records)
    among, results = results, [result for result in results if result.record in selected]
    options = cell_options(by, results)
    table = build_table(results, options, warnings=warnings, among=among)
    cells, factors = table.cells, table.factors

    in_cells = {run.record.folder.path for cell in cells for run in cell.runs}
    missing = [record.state for record in records if record.folder.path not in in_cells]
    compared, problems = margins(cells), _Problems(cache)
    curves, (layers, moments) = list(_curves(cells, problems)), _layers(cells, problems)
    texts = table_rows(table)
    return {
        "title": _title(selection, len(records)),
        "about": _about(records, results, table),
        "summary": summary_sentences(cells, missing, compared),
        "not_comparable": not_comparable(cells),
        "no_result": NO_RESULT,
        "all_bad": all_bad(),
        "missing": [[state, missing.count(state)] for state in dict.fromkeys(missing)],
        "warnings": table.warnings,
        "caveats": [*comparability_warnings(results), *table.warnings, *selection_note(cells)],
        "by": options,
        "level": LEVEL,
        "max_compared": MAX_COMPARED,
        "factors": [_factor(factor) for factor in factors],
        "channels": _channels(factors, records, channels or {}),
        "cells": [
            {**row, **_cell(cell), "curves": series, "layers": profiles, "gradient": _smallest_gradient(profiles)}
            for row, cell, series, profiles in zip(json_rows(table), cells, curves, layers, strict=True)
        ],
        "order": rank_cells(cells),
        "sizes": list(rank_by_size(cells).items()),
        "size_name": " and ".join(map(option_name, size_options(cells))),
        "margins": [[*pair, each.is_lower, margin_text(cells[pair[1]], each)] for pair, each in compared.items()],
        "series": SERIES,
        "moments": {moment: MOMENTS[moment] for moment in MOMENTS if moment in moments},
        "statistics": _descriptions(layers),
        "cell_table": {"columns": list(texts[0]) if texts else [], "rows": [list(row.values()) for row in texts]},
        "run_table": _run_table(records, varying_options(results), cells, problems),
        "unfinished": list(_unfinished(cells, varying_options(results), problems)),
        "interactions": _interactions(table),
        "notes": notes(table, texts[0]) if texts else [],
        "problems": problems.lines(table.warnings),
    }


class _Problems:
    """Reads the records of runs, and collects what is wrong with each."""

    def __init__(self, cache: ReadCache) -> None:
        self.cache = cache
        self._by_run: dict[str, list[str]] = {}

    def read(self, read: Callable[[Any, list[str]], Value], record: RunEntry) -> Value:
        return self.cache.read(read, record, self.of(record))

    def of(self, record: RunEntry) -> list[str]:
        return self._by_run.setdefault(record.run_id, [])

    def lines(self, warnings: Sequence[str]) -> list[str]:
        """Return a line for each run with problems that are in no warning."""
        new = {
            run: [line for line in dict.fromkeys(lines) if not any(line in warning for warning in warnings)]
            for run, lines in self._by_run.items()
        }
        return [f"run {run}: {'; '.join(lines)}".replace(f" of run {run}", "") for run, lines in new.items() if lines]


def _title(selection: Selection, kept: int) -> str:
    """Return the sweep's name or the number of runs, and how many conditions select."""
    total = len(selection.records)
    count = f"{kept} of {counted(total, 'run')}" if kept < total else counted(total, "run")
    if not selection.name:
        return count
    return selection.name if kept == total else f"{selection.name}: {count}"


def _about(records: Sequence[RunEntry], results: Sequence[RunResult], table: CellsTable) -> str:
    """Return the number of runs, the definition of a cell, and the corpora and devices."""
    names = [sorted({str(run.settings[key]) for run in results}) for key in ("corpus", "device", "precision")]
    of_each = " x ".join(factor.name for factor in table.factors)
    cells = f"in {counted(len(table.cells), 'cell')}: {of_each}" if table.cells else ""
    about = f"{counted(len(records), 'run')} {cells}".rstrip()
    return " · ".join([about, *map(", ".join, filter(None, names))])


def _factor(factor: Factor) -> Row:
    axis = factor_axis(factor)
    return {
        "option": factor.option,
        "name": factor.name,
        "levels": [format_setting(level) for level in factor.levels],
        "values": [repr(level) if isinstance(level, float) else format_setting(level) for level in factor.levels],
        "titles": [level_title(factor.option, level) for level in factor.levels],
        "labels": [level_label(factor.option, level) for level in factor.levels],
        "positions": [axis.positions[level] for level in factor.levels],
        "is_numeric": factor.is_numeric,
        "is_log": axis.is_log,
        "light": list(level_colors(factor).values()),
        "dark": list(level_colors(factor, dark=True).values()),
        "styles": [(factor.all_levels or factor.levels).index(level) for level in factor.levels],
    }


def _channels(factors: Sequence[Factor], records: Sequence[RunEntry], given: Mapping[str, Any]) -> dict[str, str]:
    """Return the channel of each factor in figures with a factor on x: `x`, `color`, `style` or `panel`."""
    chosen = choose_channels(factors, records, has_x=True, **given)
    singles = (("color", chosen.color), ("style", chosen.style), ("x", chosen.x))  # a single factor on both is on x
    pairs = [*((factor, "panel") for factor in chosen.panel), *((factor, name) for name, factor in singles if factor)]
    return {factor.option: name for factor, name in pairs}


def _cell(cell: Cell) -> Row:
    """Return what the page shows of a cell besides its row of `summarize`."""
    levels = {option: format_setting(value) for option, value in cell.levels.items()}
    statuses = [run.record.status for run in cell.runs]
    flops = [run.record.run.flops_per_token * run.record.status.tokens for run in cell.runs]
    seconds = [status.seconds / status.pack_size for status in statuses]
    batch, context = cell.runs[0].record.config.train.batch_size, cell.runs[0].record.config.model.context
    return {
        "levels": levels,
        "arm": cell.arm,
        "loss_text": loss_text(cell),
        "lr_text": lr_text(cell),
        "is_bad": cell.has_bad_outcome,
        "bad": {text: count for text, state in BAD_STATES.items() if (count := cell.count(state))},
        "bad_rates": list(
            map(format_setting, sorted({run.lr for run in cell.runs if run.state in BAD_STATES.values()}))
        ),
        "tokens": math.fsum(status.tokens for status in statuses),
        "flops": sum(flops),
        "hours": math.fsum(seconds) / 3600,
        "tokens_per_step": batch * context,
        "point": dataclasses.asdict(loss_point(cell, cell.best_lr, 0)) if cell.losses else None,
        "rates": [{**dataclasses.asdict(loss_point(cell, lr, lr)), "text": format_setting(lr)} for lr in cell.losses],
        "diverged_at": [
            run.record.status.diverged.step
            for run in cell.runs_at(cell.best_lr)
            if run.record.status.diverged is not None
        ],
    }


def _curves(cells: Sequence[Cell], problems: _Problems) -> Iterator[dict[str, list[list[float]]]]:
    """Yield, for each cell, [step, mean, low, high] of each of `SERIES` at its best learning rate."""
    for cell in cells:
        members = cell.runs_at_best
        runs = [problems.read(problems.cache.curves.read, run.record) for run in members]
        yield {name: problems.cache.points(mean_curve, [curves[name] for curves in runs]) for name in SERIES}


def _unfinished(cells: Sequence[Cell], options: Sequence[str], problems: _Problems) -> Iterator[Row]:
    """Yield the curves of each run without an outcome, the first `MAX_UNFINISHED`, with the index of its cell.

    A run that trains is not in the curves of its cell if other runs of the cell have an outcome.
    """
    runs = [(index, run) for index, cell in enumerate(cells) for run in cell.runs if not run.has_loss]
    for index, run in runs[:MAX_UNFINISHED]:
        read = problems.read(problems.cache.curves.read, run.record)
        curves = {name: problems.cache.points(mean_curve, [curve]) for name, curve in read.items()}
        if any(curves.values()):
            levels = [setting(run.record, option) for option in options]
            label = short_label(options, levels) or run.record.name
            yield {"id": run.record.run_id, "cell": index, "label": label, "state": run.record.state, "curves": curves}


def _row_of(record: RunEntry, problems: list[str]) -> Row:
    # `ReadCache` keeps what is read after it looked at the files; the record may be older.
    return row_of(RunRecord.read(record.folder))


def _metrics_problem(record: RunEntry, problems: list[str]) -> str:
    return record.folder.metrics_problem()


def _numbers(points: Sequence[Point]) -> list[list[float]]:
    return [[_round(point.x), *map(_round, (point.y or 0, point.low or 0, point.high or 0))] for point in points]


def _round(value: float) -> float:
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def _interactions(table: CellsTable) -> Row:
    """Return the table of the interactions of each pair of factors as text, and its notes; empty without one."""
    try:
        rows = run_test("interaction", table.cells, table.factors) if len(table.cells) > 1 < len(table.factors) else []
    except ConfigError:  # no group of cells has the levels that a test compares
        rows = []
    if not 0 < len(rows) <= MAX_INTERACTIONS or not_comparable(table.cells):
        return {"columns": [], "rows": [], "notes": []}
    texts = format_tests(rows)
    return {"columns": list(texts[0]), "rows": [list(row.values()) for row in texts], "notes": notes_on_tests(rows)}


Layers = dict[str, dict[str, list[list[float]]]]
"""[layer, median, low, high] by statistic and moment."""


def _layers(cells: Sequence[Cell], problems: _Problems) -> tuple[list[Layers], list[str]]:
    """Return the profiles over layers of each cell at its best learning rate, and the moments that they have."""
    measured: list[dict[Statistic, list[Profile]]] = []
    for cell in cells:
        profiles: dict[Statistic, list[Profile]] = {}
        for run in cell.runs_at_best:
            for key, profile in problems.read(read_profiles, run.record).items():
                profiles.setdefault(key, []).append(profile)
        measured.append(profiles)
    values = sum(
        3 * len(profiles[0].get("last", ())) for by_key in measured for profiles in by_key.values() if profiles
    )
    most = max(1, min(len(MOMENTS), MAX_LAYER_VALUES // max(values, 1)))
    moments = ["last", "first", "warmup"][:most]
    with_layers = {
        key for by_key in measured for key, profiles in by_key.items() if len(profiles[0].get("last", ())) > 1
    }
    layers = [
        {
            " ".join(filter(None, key)): {
                moment: problems.cache.points(median_profile, profiles, moment) for moment in moments
            }
            for key, profiles in by_key.items()
            if key in with_layers
        }
        for by_key in measured
    ]
    return layers, moments


def _smallest_gradient(layers: Layers) -> Row | None:
    """Return the layer of a cell with the smallest gradient of the residual stream, relative to the head's.

    The gradient is the median of `dresid_rms` over seeds at the last measured step; None if it was not measured.
    """
    profile = layers.get("dresid_rms", {}).get("last", [])
    if len(profile) < 2 or not profile[-1][1] > 0:
        return None
    layer, value, *_ = min(profile[:-1], key=lambda point: point[1])
    return {"layer": layer, "ratio": _round(value / profile[-1][1])}


def _descriptions(layers: Sequence[Layers]) -> Row:
    """Return the definition of each statistic of the page."""
    keys = dict.fromkeys(itertools.chain.from_iterable(layers))
    by_key = {key: STATISTICS[key.partition(" ")[0]] for key in keys}
    return {key: {"formula": s.formula, "unit": s.unit, "question": s.question} for key, s in by_key.items()}


def _run_table(records: Sequence[RunEntry], options: Sequence[str], cells: Sequence[Cell], problems: _Problems) -> Row:
    """Return the table of runs as text, with the index of each run's cell."""
    cell_of = {run.record.folder.path: index for index, cell in enumerate(cells) for run in cell.runs}
    rows = []
    for record in records:
        lines = problems.of(record)
        row = row_of(record) if record.state == NOT_STARTED else problems.read(_row_of, record)
        if record.state != NOT_STARTED:
            lines += filter(None, [record.problem, problems.read(_metrics_problem, record)])
        notes = [row["note"], record.problem, *([STILL_RUNNING] if record.state == RUNNING else []), *lines]
        row = row | {"note": "; ".join(dict.fromkeys(filter(None, notes)))}
        levels = [setting(record, option) for option in options]
        name = record.name if record.name != record.run_id or not record.options else short_label(options, levels)
        values = [name, *map(format_setting, levels)]
        values += [format_value(key, row[key]) for key in RUN_COLUMNS]
        rows.append(
            {"id": record.run_id, "cell": cell_of.get(record.folder.path), "state": row["state"], "values": values}
        )
    titles = [_RUN_TITLES.get(key, key.replace("_", " ")) for key in RUN_COLUMNS]
    return {"columns": ["run", *options, *titles], "rows": rows}
