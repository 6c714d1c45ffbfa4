"""The figures of the comparison page as JSON values, which the page's scripts draw."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from normlab.analysis.cells import runs_of
from normlab.analysis.factors import label
from normlab.analysis.settings import setting
from normlab.analysis.table import CellsTable
from normlab.base.errors import NormlabError, counted
from normlab.catalogue.statistics.registry import STATISTICS
from normlab.report.channels import MAX_PANELS, Channels
from normlab.report.figure_axes import Axis
from normlab.report.figure_data import Figure, curve_figure, describe, layout_of
from normlab.report.figure_layout import FigureLayout, Line, Panel, lines_of
from normlab.report.figure_points import SERIES, Point, ReadCache, mean_curve
from normlab.report.tables import TableRow
from normlab.store.record import RunEntry

MAX_UNFINISHED = 48
"""Most lines of the figure of unfinished runs."""
DIGITS = 6
"""Significant digits of curves and profiles."""
TITLES = {
    "factor": "Final loss", "unfinished": "Unfinished runs", "loss": "Over training", "lr": "Learning rates",
    "layers": "Statistics of each layer at the last measured step",
}  # fmt: skip
"""The figures of the page in their order, with their titles."""
FIRST_STATISTICS = ("dresid_rms", "resid_rms")
"""The statistics of each layer that the page shows first: the gradients and the activations of the residual stream."""

Style = tuple[str, str, str]
"""The label, the colour and the line style of a line."""


@dataclass(frozen=True, eq=False)
class PageFigures:
    """The figures of a page, which share their channels and the styles of their lines."""

    table: CellsTable
    channels: Channels
    options: Sequence[str]
    """The options in which the runs differ, which name a run that has no name."""
    cache: ReadCache
    styles: dict[Style, int] = field(default_factory=dict)
    """The number of each style, in the order of the numbers; `values` fills it."""

    def values(self) -> list[TableRow]:
        """Return the figures that the runs have, as JSON values; a line has the number of its style."""
        figures: list[TableRow] = []
        for kind, title in TITLES.items():
            variants: dict[str, TableRow] = {}
            about: dict[str, str] = {}
            caption = ""
            for statistic, figure in self._variants(kind):
                variants[statistic] = self._figure_values(figure)
                caption = caption or _caption(figure)
                if kind == "layers":
                    described = STATISTICS[statistic.partition(" ")[0]]
                    about[statistic] = f"{described.question} Formula: {described.formula}"
            if not variants:
                continue
            # A statistic of each layer is read beside another one.
            shown_first = 2 if kind == "layers" else 1
            first = list(variants)[:shown_first]
            texts = {"id": kind, "title": title, "first": first, "caption": caption, "about": about}
            figures.append(texts | {"variants": variants})
        return figures

    def _variants(self, kind: str) -> Iterator[tuple[str, Figure]]:
        """Yield the figures of a kind that the runs have, each with its statistic or curve."""
        kind_of_layout = "loss" if kind == "unfinished" else kind
        try:
            layout = layout_of(kind_of_layout, self.table.cells, self.channels)
        except NormlabError:
            return
        # With a single learning rate there is no curve over it.
        if kind == "lr" and all(len(cell.losses) < 2 for cell in layout.cells):
            return
        for statistic in self._choices(kind, layout):
            try:
                if kind == "unfinished":
                    figure = _unfinished(layout, statistic, self.options, self.cache)
                else:
                    figure = describe(kind, layout, self.cache, statistic)
            except NormlabError:  # no run has recorded it
                continue
            yield statistic, figure

    def _choices(self, kind: str, layout: FigureLayout) -> list[str]:
        """Return the statistics or curves of a kind of figure, the one that the page shows first."""
        if kind == "layers":
            return _statistics(layout, self.cache)
        if kind == "loss":
            return list(dict.fromkeys(["val_loss", *SERIES]))
        if kind == "unfinished":
            # The training loss of a run that trains is newer.
            return list(dict.fromkeys(["train_loss", *SERIES]))
        return [""]

    def _figure_values(self, figure: Figure) -> TableRow:
        panels: list[TableRow] = []
        for panel in figure.panels[:MAX_PANELS]:
            lines = [self._line_values(line, figure) for line in panel.lines]
            panels.append({"title": panel.title, "lines": lines})
        axes = {"x": _axis_values(figure.x), "y": _axis_values(figure.y)}
        return axes | {"is_connected": figure.is_connected, "is_band": figure.is_band, "panels": panels}

    def _line_values(self, line: Line, figure: Figure) -> list[Any]:
        """Return the number of the style of a line, its points, and its other marks, if it has any."""
        # Most lines of a page have one of few styles: a number is shorter than its texts.
        style = line.label, line.color, line.style
        number = self.styles.setdefault(style, len(self.styles))
        values_of = _band_values if figure.is_band else _mark_values
        values: list[Any] = [number, list(map(values_of, line.points))]
        marks = [*line.crosses, *map(_highest_rate_values, line.highest_rates)]
        if marks:
            values.append(marks)
        return values


def _statistics(layout: FigureLayout, cache: ReadCache) -> list[str]:
    layers_of: dict[tuple[str, str], int] = {}
    for cell in layout.cells:
        for run in cell.runs_at_best:
            for key, profile in cache.profiles(run).items():
                layers_of[key] = len(profile.layers)
    first: list[str] = []
    others: list[str] = []
    for (name, site), layers in layers_of.items():
        # A single layer is no curve over layers.
        if layers <= 1:
            continue
        statistic = name
        if site:
            statistic = f"{name} {site}"
        if statistic in FIRST_STATISTICS:
            first.append(statistic)
        else:
            others.append(statistic)
    return [*sorted(first, key=FIRST_STATISTICS.index), *others]


def _unfinished(layout: FigureLayout, series: str, options: Sequence[str], cache: ReadCache) -> Figure:
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
                    drawn.append(Line(f"{name_of(run, options)}, {run.state}", line.color, line.style, points))
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


def _axis_values(axis: Axis) -> TableRow:
    low, high = _round(axis.low), _round(axis.high)
    ticks = [[_round(at), text] for at, text in axis.ticks]
    return {"name": axis.name, "low": low, "high": high, "ticks": ticks, "is_log": axis.is_log}


def _band_values(point: Point) -> list[float]:
    return list(map(_round, (point.x, point.y or 0, point.low or 0, point.high or 0)))


def _mark_values(point: Point) -> TableRow:
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


def _highest_rate_values(point: Point) -> TableRow:
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


def name_of(record: RunEntry, options: Sequence[str]) -> str:
    """Return the given name of a run, or else the label of its options: `DeepNorm, depth 8, seed 0`."""
    if record.name != record.run_id or not options or not record.options:
        return record.name
    return label(options, [setting(record, option) for option in options])
