"""The data of the figures of a sweep, which `figure_draw` and the page draw without computing anything.

Every point is a cell: loss and interval are those of `summarize`. A diverged run has no finite loss; a point with
diverged runs shows their number in place of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from normlab.errors import ConfigError, NormlabError, unknown
from normlab.report.cells import Cell
from normlab.report.cells_table import BEST, CellsTable, losses_at
from normlab.report.channels import MAX_PANELS, Channels, choose_channels
from normlab.report.factor_tests import LOGARITHMIC
from normlab.report.factors import Factor, level_label, level_title
from normlab.report.histories import history, read_statistics
from normlab.stats.registry import STATISTICS
from normlab.store.parts import Setting
from normlab.store.series import evaluations

LOSS_AXIS = "validation loss, nats/token"


@dataclass(frozen=True, slots=True)
class Point:
    """A mean over seeds with its interval and the seeds, or the number of diverged seeds."""

    x: float
    y: float | None
    """None if a seed diverged."""
    low: float | None = None
    high: float | None = None
    """The interval; None with fewer than three seeds, where it is wider than any figure."""
    seeds: tuple[float, ...] = ()
    """The values of the seeds that did not diverge."""
    diverged: int = 0
    n: int = 1


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one colour and line style, connected if the x axis has an order."""

    label: str
    color: str
    style: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a figure."""

    title: str
    lines: tuple[Line, ...] = ()
    grid: Mapping[tuple[int, int], Point] = field(default_factory=dict)
    """The points of a heat map, by column and row."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: panels that share their axes."""

    kind: str
    x_name: str
    y_name: str
    panels: tuple[Panel, ...]
    caption: str
    is_log_x: bool = False
    x_ticks: tuple[tuple[float, str], ...] = ()
    """Positions and texts of the ticks; empty for those of the library."""
    y_ticks: tuple[tuple[float, str], ...] = ()
    is_connected: bool = True


def make_figure(
    kind: str,
    table: CellsTable,
    *,
    x: str | None = None,
    color: str | None = None,
    style: str | None = None,
    panel: Sequence[str] | None = None,
    statistic: str = "resid_rms",
) -> Figure:
    """Return the data of a figure.

    Args:
        kind: One of `KINDS`.
        table: The cells.
        x: The option on the x axis (factor), or of the columns (matrix).
        color: The option with the colours, or of the rows (matrix).
        style: The option with the line styles.
        panel: The options with one panel for each combination of levels.
        statistic: The statistic of `layers`.

    Raises:
        ConfigError: The kind or an option is unknown, or a factor is left without a channel.
        NormlabError: There is nothing to draw.
    """
    if kind not in KINDS:
        raise ConfigError(f"figure {kind}: " + unknown("figure", kind, KINDS))
    cells = [cell for cell in table.cells if cell.losses]
    if not cells:
        raise NormlabError(f"figure {kind}: no selected run has a final loss yet")
    runs = [run.record for cell in cells for run in cell.runs]
    has_x = kind in ("factor", "matrix")
    channels = choose_channels(table.factors, runs, has_x=has_x, x=x, color=color, style=style, panel=panel)
    figure = KINDS[kind](cells, channels, statistic)
    if len(figure.panels) > MAX_PANELS:
        raise ConfigError(
            f"figure {kind}: {len(figure.panels)} panels, at most {MAX_PANELS}; select runs with --where, or move "
            f"{', '.join(factor.option for factor in channels.panel)} to --color or --style"
        )
    return figure


def _values(cell: Cell) -> dict[str, Setting]:
    return dict(zip(cell.by, cell.key, strict=True))


def _level(factor: Factor | None, cell: Cell) -> Setting:
    return _values(cell).get(factor.option) if factor else None


def _panels(cells: Sequence[Cell], channels: Channels) -> dict[str, list[Cell]]:
    """Return the cells of each panel, by its title, in the order of the panel factors' levels."""
    titles: dict[str, list[Cell]] = {}
    order = {factor.option: list(factor.levels) for factor in channels.panel}
    for cell in sorted(cells, key=lambda cell: [levels.index(_values(cell)[o]) for o, levels in order.items()]):
        titles.setdefault(channels.panel_label(_values(cell)), []).append(cell)
    return titles


def _line_panels(
    cells: Sequence[Cell], channels: Channels, points: Callable[[Sequence[Cell]], Sequence[Point]]
) -> tuple[Panel, ...]:
    """Return the panels of a line plot; `points` returns the points of the cells of one line."""
    panels = _panels(cells, channels).items()
    return tuple(Panel(title, tuple(_lines(members, channels, points))) for title, members in panels)


def _lines(
    cells: Sequence[Cell], channels: Channels, points: Callable[[Sequence[Cell]], Sequence[Point]]
) -> Iterator[Line]:
    """Yield a line for each combination of colour and style among the cells of a panel."""
    colors, styles = channels.colors(), channels.styles()
    for color, color_text in colors.items():
        for style, style_text in styles.items():
            members = [
                cell
                for cell in cells
                if _level(channels.color, cell) == color and _level(channels.style, cell) == style
            ]
            if members and (drawn := tuple(points(members))):
                parts = [
                    level_label(factor.option, level)
                    for factor, level in ((channels.color, color), (channels.style, style))
                    if factor
                ]
                yield Line(", ".join(parts), color_text, style_text, drawn)


def _point(x: float, row: Mapping[str, Any], losses: Mapping[Any, float]) -> Point:
    """Return the point of a cell at one learning rate, from the numbers of `cells_table.losses_at`."""
    diverged, n = row["seeds_diverged"], row["seeds"]
    has_interval = n > 2 and row["val_loss_low"] is not None
    return Point(
        x=x,
        y=None if diverged else row["val_loss"],
        low=row["val_loss_low"] if has_interval else None,
        high=row["val_loss_high"] if has_interval else None,
        seeds=tuple(sorted(filter(math.isfinite, losses.values()))),
        diverged=diverged,
        n=n,
    )


def _loss_point(x: float, cell: Cell) -> Point:
    return _point(x, losses_at(cell, cell.best_lr, BEST), cell.final_losses)


_AT_BEST = "each cell at its best learning rate, selected on this same loss"
_MARKS = "mean and 95% interval over seeds (three or more), points: seeds, x: diverged seeds"


def _factor(cells: Sequence[Cell], channels: Channels, statistic: str) -> Figure:
    factor = channels.x
    if factor is None:
        raise NormlabError("figure factor: the selected runs do not differ in any option; use figure loss or lr")
    position: dict[Setting, float] = (
        {level: float(level) for level in factor.levels if isinstance(level, int | float)}
        if factor.is_numeric
        else {level: float(index) for index, level in enumerate(factor.levels)}
    )
    is_log = factor.option in LOGARITHMIC and all(x > 0 for x in position.values())

    def points(members: Sequence[Cell]) -> list[Point]:
        return sorted(
            (_loss_point(position[_level(factor, cell)], cell) for cell in members), key=lambda point: point.x
        )

    return Figure(
        "factor",
        factor.name,
        LOSS_AXIS,
        _line_panels(cells, channels, points),
        f"Final validation loss, {_AT_BEST}: {_MARKS}.",
        is_log_x=is_log,
        x_ticks=tuple((x, level_title(factor.option, level)) for level, x in position.items()),
        is_connected=factor.is_numeric,
    )


def _learning_rates(cells: Sequence[Cell], channels: Channels, statistic: str) -> Figure:
    def points(members: Sequence[Cell]) -> list[Point]:
        return [_point(lr, losses_at(cell, lr, BEST), losses) for cell in members for lr, losses in cell.losses.items()]

    rates = sorted({lr for cell in cells for lr in cell.losses})
    return Figure(
        "lr",
        "learning rate",
        LOSS_AXIS,
        _line_panels(cells, channels, points),
        f"Final validation loss at each learning rate: {_MARKS}.",
        is_log_x=all(rate > 0 for rate in rates),
        x_ticks=tuple((rate, f"{rate:g}") for rate in rates),
    )


def _losses(cells: Sequence[Cell], channels: Channels, statistic: str) -> Figure:
    def points(members: Sequence[Cell]) -> list[Point]:
        by_step: dict[int, list[float]] = {}
        for run in (run for cell in members for run in cell.runs_at(cell.best_lr)):
            for evaluation in evaluations(run.record.folder):
                by_step.setdefault(evaluation.step, []).append(evaluation.loss)
        return [_range_point(step, values) for step, values in sorted(by_step.items())]

    return Figure(
        "loss",
        "step",
        LOSS_AXIS,
        _line_panels(cells, channels, points),
        f"Validation loss during training, {_AT_BEST}: mean and range of the seeds.",
    )


def _range_point(x: float, values: Sequence[float]) -> Point:
    """Return the mean and the range of the finite values of the seeds."""
    finite = [value for value in values if math.isfinite(value)]
    mean = math.fsum(finite) / len(finite) if finite else None
    return Point(x, mean, min(finite, default=None), max(finite, default=None), n=len(values))


def _layers(cells: Sequence[Cell], channels: Channels, statistic: str) -> Figure:
    def points(members: Sequence[Cell]) -> list[Point]:
        by_layer: dict[int, list[float]] = {}
        for run in (run for cell in members for run in cell.runs_at(cell.best_lr)):
            for layer, value in last_profile(run.record.folder, statistic).items():
                by_layer.setdefault(layer, []).append(value)
        return [_range_point(layer, values) for layer, values in sorted(by_layer.items())]

    unit = STATISTICS[statistic].unit if statistic in STATISTICS else "1"
    return Figure(
        "layers",
        "layer",
        statistic if unit == "1" else f"{statistic}, {unit}",
        _line_panels(cells, channels, points),
        f"{statistic} of each layer at the last measured step, {_AT_BEST}: mean and range of the seeds. Layer 0 is the "
        "embeddings.",
    )


def last_profile(folder: Any, statistic: str) -> dict[int, float]:
    """Return a statistic at the last measured step, by layer; the site `block`, or the first one with layers.

    Raises:
        ConfigError: The statistic has no layers.
        StatisticsError, StoreError: The statistic was not measured, or cannot be read.
    """
    sites = [each for each in history(read_statistics(folder, []), statistic) if each.layers]
    if not sites:
        raise ConfigError(
            f"--statistic {statistic}: is one number per step; choose one that has layers, such as resid_rms"
        )
    values = sites[0].values[-1]
    return {layer: float(values[layer]) for layer in sites[0].layers}


def _matrix(cells: Sequence[Cell], channels: Channels, statistic: str) -> Figure:
    columns, rows = channels.x, channels.color
    if columns is None or rows is None or columns is rows:
        raise NormlabError("figure matrix: needs two factors; use figure factor for one")
    panels = []
    for title, members in _panels(cells, channels).items():
        grid = {}
        for cell in members:
            at = columns.levels.index(_level(columns, cell)), rows.levels.index(_level(rows, cell))
            grid[at] = _loss_point(at[0], cell)
        panels.append(Panel(title, grid=grid))

    def ticks(factor: Factor) -> tuple[tuple[float, str], ...]:
        return tuple((float(index), level_title(factor.option, level)) for index, level in enumerate(factor.levels))

    return Figure(
        "matrix",
        columns.name,
        rows.name,
        tuple(panels),
        f"Final validation loss, nats/token, {_AT_BEST}: mean over seeds; k/n: k of n seeds diverged.",
        x_ticks=ticks(columns),
        y_ticks=ticks(rows),
        is_connected=False,
    )


KINDS: dict[str, Callable[[Sequence[Cell], Channels, str], Figure]] = {
    "loss": _losses,
    "lr": _learning_rates,
    "factor": _factor,
    "layers": _layers,
    "matrix": _matrix,
}
"""The figures by name."""
