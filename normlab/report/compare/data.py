"""The data of the comparison page as JSON values. The page's scripts draw them and compute nothing."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from normlab.analysis.cells import Cell, runs_of
from normlab.analysis.comparability import intact_runs
from normlab.analysis.conditions import select_where
from normlab.analysis.factors import label, varying_options
from normlab.analysis.rate_range import HIGHEST, SENSITIVITY
from normlab.analysis.settings import format_setting, setting, settings_of
from normlab.analysis.table import CellsTable, build_table, cell_options
from normlab.base.errors import NormlabError, counted, printable
from normlab.catalogue.statistics.registry import STATISTICS
from normlab.report.cells_table import notes, table_rows
from normlab.report.channels import MAX_PANELS, Channels, choose_channels
from normlab.report.compare.summary_text import Fact, summary_facts
from normlab.report.figure_axes import Axis, short_number
from normlab.report.figure_data import Figure, Layout, Line, Panel, curve_figure, describe, layout_of, lines_of
from normlab.report.figure_points import SERIES, Point, ReadCache, mean_curve
from normlab.report.runs_table import COLUMNS, row_of
from normlab.report.tables import Row
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
MAX_UNFINISHED = 48
DIGITS = 6
"""Significant digits of curves and profiles."""
TITLES = {
    "factor": "Final loss", "unfinished": "Unfinished runs", "loss": "Over training", "lr": "Learning rates",
    "layers": "Statistics of each layer at the last measured step",
}  # fmt: skip
"""The figures of the page in their order, with their titles."""


def page_data(
    selection: Selection,
    by: Sequence[str] | None,
    where: Sequence[str],
    channels: Mapping[str, Any] | None = None,
) -> Row:
    """Return the data of the page of the runs that meet the conditions, by some factors; `by` as in `cell_options`.

    Raises:
        ConfigError: An option of `by`, a condition or a channel is invalid.
    """
    cache = ReadCache()
    among, warnings = intact_runs(selection.records)  # warns of every damaged run, which can meet no condition
    records = select_where(selection.records, where)
    runs = [record for record in records if isinstance(record, RunRecord)]
    options = cell_options(by, runs)
    table = build_table(runs, options, warnings=warnings, among=among)
    chosen = choose_channels(table.factors, records, **channels or {})
    in_cells = {run.folder.path for run in runs_of(table.cells)}
    missing = [record.state for record in records if record.folder.path not in in_cells]
    facts = summary_facts(table.cells, missing)
    figures, lines = _figures(table, chosen, varying_options(runs), cache)
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
        "lines": lines,
        "series": SERIES,
        "cell_table": {"columns": cell_columns, "rows": [list(row.values()) for row in texts]},
        "run_table": _run_table(records, varying_options(runs), cache),
        "notes": _notes(table, facts, texts),
        "problems": _problems(cache, table.warnings),
    }


def _notes(table: CellsTable, facts: Sequence[Fact], texts: Sequence[Row]) -> list[str]:
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
        values = sorted({str(settings_of(run)[key]) for run in runs})
        if values:
            parts.append(", ".join(values))
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


# Figures


def _figures(
    table: CellsTable, channels: Channels, options: Sequence[str], cache: ReadCache
) -> tuple[list[Row], list[list[str]]]:
    """Return the figures that the runs have, and the label, the colours and the style of their lines."""
    styles: dict[tuple[str, ...], int] = {}
    figures: list[Row] = []
    for kind, title in TITLES.items():
        drawn: dict[str, Row] = {}
        about, caption = dict[str, str](), ""
        for statistic, figure in _variants(kind, table, channels, options, cache):
            drawn[statistic] = _figure_values(figure, styles)
            caption = caption or _caption(figure)
            if kind == "layers":
                described = STATISTICS[statistic.partition(" ")[0]]
                about[statistic] = f"{described.question} Formula: {described.formula}"
        if drawn:
            # A statistic of each layer is read beside another one.
            first = list(drawn)[:1]
            if kind == "layers":
                first = list(drawn)[:2]
            texts = {"id": kind, "title": title, "first": first, "caption": caption, "about": about}
            figures.append(texts | {"variants": drawn})
    return figures, [list(style) for style in styles]


def _variants(
    kind: str, table: CellsTable, channels: Channels, options: Sequence[str], cache: ReadCache
) -> Iterator[tuple[str, Figure]]:
    """Yield the figures of a kind that the runs have, each with its statistic or curve."""
    kind_of_layout = "loss" if kind == "unfinished" else kind
    try:
        layout = layout_of(kind_of_layout, table.cells, channels)
    except NormlabError:
        return
    if kind == "lr" and all(len(cell.losses) < 2 for cell in layout.cells):
        return
    if kind == "layers":
        choices = _statistics(layout, cache)
    elif kind == "loss":
        choices = list(dict.fromkeys(["val_loss", *SERIES]))
    elif kind == "unfinished":  # the training loss of a run that trains is newer
        choices = list(dict.fromkeys(["train_loss", *SERIES]))
    else:
        choices = [""]
    for statistic in choices:
        try:
            if kind == "unfinished":
                yield statistic, _unfinished(layout, statistic, options, cache)
            else:
                yield statistic, describe(kind, layout, cache, statistic)
        except NormlabError:  # no run has recorded it
            continue


def _statistics(layout: Layout, cache: ReadCache) -> list[str]:
    layers_of: dict[tuple[str, str], int] = {}
    for cell in layout.cells:
        for run in cell.runs_at_best:
            for key, profile in cache.profiles(run).items():
                layers_of[key] = len(profile.layers)
    names = [" ".join(filter(None, key)) for key, layers in layers_of.items() if layers > 1]
    return sorted(names, key=lambda name: {"dresid_rms": 0, "resid_rms": 1}.get(name, 2))


def _unfinished(layout: Layout, series: str, options: Sequence[str], cache: ReadCache) -> Figure:
    """Return a line for each run without an outcome, the first `MAX_UNFINISHED`.

    A run that trains is not in the curves of its cell if other runs of the cell have an outcome.
    """
    panels: list[Panel] = []
    count = 0
    for title, lines in layout.lines.items():
        drawn: list[Line] = []
        for line, cells in lines:
            for run in runs_of(cells):
                if run.has_loss or count == MAX_UNFINISHED:
                    continue
                points = mean_curve([cache.curves(run)[series]])
                if points:
                    drawn.append(Line(f"{_name_of(run, options)}, {run.state}", line.color, line.style, points))
                    count += 1
        if drawn:
            panels.append(Panel(title, drawn))
    if not panels:
        raise NormlabError("no run is unfinished")
    return curve_figure(series, panels, "A line for each run that has no final loss yet.")


def _caption(figure: Figure) -> str:
    """Return the caption on the page, where a list shows the statistic of a figure by layer."""
    text = figure.caption
    if figure.kind == "layers":
        _, _, text = text.partition(", ")
    if any(line.crosses for line in lines_of(figure.panels)):
        text += " x: a seed diverged at this step."
    missing = len(figure.panels) - MAX_PANELS
    if missing > 0:
        text += f" {missing} more panels are not drawn: select with --where, or use --color or --style."
    return text[0].upper() + text[1:]


def _figure_values(figure: Figure, styles: dict[tuple[str, ...], int]) -> Row:
    """Return a figure as JSON values; `styles` receives the label, the colours and the style of its lines."""
    mark = _band_values if figure.is_band else _mark_values

    def values(line: Line) -> list[Any]:
        style = line.label, line.color, line.style
        number = styles.setdefault(style, len(styles))
        marks = [*line.crosses, *map(_highest_rate_values, line.highest_rates)]
        if not marks:
            return [number, list(map(mark, line.points))]
        return [number, list(map(mark, line.points)), marks]

    panels: list[Row] = []
    for panel in figure.panels[:MAX_PANELS]:
        panels.append({"title": panel.title, "lines": [*map(values, panel.lines)]})
    axes = {"x": _axis_values(figure.x), "y": _axis_values(figure.y)}
    return axes | {"is_connected": figure.is_connected, "is_band": figure.is_band, "panels": panels}


def _axis_values(axis: Axis) -> Row:
    low, high = _round(axis.low), _round(axis.high)
    ticks = [[_round(at), text] for at, text in axis.ticks]
    return {"name": axis.name, "low": low, "high": high, "ticks": ticks, "is_log": axis.is_log}


def _band_values(point: Point) -> list[float]:
    return list(map(_round, (point.x, point.y or 0, point.low or 0, point.high or 0)))


def _mark_values(point: Point) -> Row:
    text = f"{point.diverged} of {counted(point.n, 'seed')} diverged"
    if point.y is not None and not point.diverged:
        text = f"{point.y:.4f}{_interval_text(point, '.4f')} (n={point.n})"
    # A single seed would hide its own mean.
    seeds = point.seeds if point.n > 1 else ()
    diverged = f"{point.diverged}/{point.n}" if point.diverged else ""
    return {
        "x": point.x, "y": point.y, "low": point.low, "high": point.high, "seeds": seeds, "diverged": diverged,
        "is_open": point.stuck > 0, "text": text,
    }  # fmt: skip


def _highest_rate_values(point: Point) -> Row:
    text = f"highest rate that trains {point.x:.3g}{_interval_text(point, '.3g')} (n={point.n})"
    return {"x": point.x, "y": point.y, "low": point.low, "high": point.high, "text": text}


def _interval_text(point: Point, form: str) -> str:
    if point.low is None:
        return ""
    return f" [{point.low:{form}}, {point.high:{form}}]"


def _round(value: float) -> float:
    rounded = float(f"{value:.{DIGITS}g}")
    # A whole number is shorter as an integer, and a page has many.
    if rounded == int(rounded) and abs(rounded) < 1e15:
        return int(rounded)
    return rounded


# Tables


def _run_table(records: Sequence[RunEntry], options: Sequence[str], cache: ReadCache) -> Row:
    rows: list[Row] = []
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
        levels = [format_setting(setting(record, option)) for option in options]
        texts = [printable(_COLUMN_OF[key].text_of(row[key])) for key in _COLUMNS_AFTER_OPTIONS]
        values = [_name_of(record, options), *levels, *texts]
        rows.append({"id": record.run_id, "state": row["state"], "values": values})
    titles = [_COLUMN_OF[key].title for key in _COLUMNS_AFTER_OPTIONS]
    return {"columns": ["run", *options, *titles], "rows": rows}


def _name_of(record: RunEntry, options: Sequence[str]) -> str:
    """Return the given name of a run, or else the label of its options: `DeepNorm, depth 8, seed 0`."""
    if record.name != record.run_id or not options or not record.options:
        return record.name
    return label(options, [setting(record, option) for option in options])


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
