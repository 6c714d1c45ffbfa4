"""The data of the figures of a sweep, which `figure_draw` and the page draw without computing anything.

Every point is a cell: loss and interval are those of `summarize`. A diverged run has no finite loss; a point with
diverged runs shows their number in place of a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from normlab.analysis.cells import BAD_OUTCOMES, GRID_OF_DECAYS, Cell
from normlab.analysis.factor_tests import LOGARITHMIC
from normlab.analysis.factors import Factor, level_label, level_title
from normlab.analysis.results import RunResult
from normlab.analysis.settings import format_setting
from normlab.analysis.table import CellsTable
from normlab.errors import ConfigError, NormlabError, unknown, warn
from normlab.report.channels import MAX_PANELS, Channels, choose_channels
from normlab.report.figure_points import (
    MOMENTS,
    SERIES,
    Point,
    Statistic,
    loss_point,
    mean_curve,
    median_profile,
    read_curves,
    read_profiles,
)
from normlab.stats.registry import STATISTICS
from normlab.store.format import DIVERGED
from normlab.store.outcome import REGRESSED, STUCK
from normlab.store.record import Setting

LOSS_AXIS = SERIES["val_loss"]


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
    may_be_log: bool = False
    """Whether the y axis is logarithmic if the values are positive and differ by more than a factor of 30."""


def make_figure(
    kind: str,
    table: CellsTable,
    *,
    x: str | None = None,
    color: str | None = None,
    style: str | None = None,
    panel: Sequence[str] | None = None,
    statistic: str | None = None,
    moment: str = "last",
) -> Figure:
    """Return the data of a figure.

    Args:
        kind: One of `KINDS`.
        table: The cells.
        x: The option on the x axis (factor), or of the columns (matrix).
        color: The option with the colours, or of the rows (matrix).
        style: The option with the line styles.
        panel: The options with one panel for each combination of levels.
        statistic: For `layers` a statistic, such as `resid_rms` (the default) or `norm_in_rms attn.in`, which names a
            site too; for `loss` one of `SERIES`, by default `val_loss`.
        moment: The step of `layers`, one of `MOMENTS`.

    Raises:
        ConfigError: The kind, the statistic, the moment or an option is unknown, or a factor is left without a channel.
        NormlabError: There is nothing to draw.
    """
    if kind not in KINDS:
        raise ConfigError(f"figure {kind}: " + unknown("figure", kind, KINDS))
    cells = [cell for cell in table.cells if cell.losses or kind in ("loss", "layers")]
    if not cells:
        raise NormlabError(f"figure {kind}: no selected run has a final loss yet")
    runs = [run.record for cell in cells for run in cell.runs]
    has_x = kind in ("factor", "matrix")
    channels = choose_channels(table.factors, runs, has_x=has_x, x=x, color=color, style=style, panel=panel)
    if kind == "loss":
        figure = _losses(cells, channels, statistic or "val_loss")
    elif kind == "layers":
        figure = _layers(cells, channels, statistic or "resid_rms", moment)
    else:
        figure = {"factor": _factor, "lr": _learning_rates, "matrix": _matrix}[kind](cells, channels)
    if len(figure.panels) > MAX_PANELS:
        raise ConfigError(
            f"figure {kind}: {len(figure.panels)} panels, at most {MAX_PANELS}; select runs with --where, or move "
            f"{', '.join(factor.option for factor in channels.panel)} to --color or --style"
        )
    return figure


def _level(factor: Factor | None, cell: Cell) -> Setting:
    return cell.levels.get(factor.option) if factor else None


def _panels(cells: Sequence[Cell], channels: Channels) -> dict[str, list[Cell]]:
    """Return the cells of each panel, by its title, in the order of the panel factors' levels."""
    titles: dict[str, list[Cell]] = {}
    order = {factor.option: list(factor.levels) for factor in channels.panel}
    for cell in sorted(cells, key=lambda cell: [levels.index(cell.levels[o]) for o, levels in order.items()]):
        titles.setdefault(channels.panel_label(cell.levels), []).append(cell)
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


def _at_best(cells: Sequence[Cell]) -> str:
    """Return at which learning rate each cell is shown."""
    rates = {lr for cell in cells for lr in cell.losses}
    if len(rates) == 1:
        return f"at learning rate {format_setting(rates.pop())}"
    return "each cell at its best learning rate, selected on this same loss"


def _loss_caption(what: str, cells: Sequence[Cell], figure_runs: Callable[[Cell], Sequence[RunResult]]) -> str:
    """Return the caption of final losses: what is shown, its marks, and the runs with a bad outcome."""
    runs = [run for cell in cells for run in figure_runs(cell)]
    counts = {state: sum(run.state == state for run in runs) for state in BAD_OUTCOMES}
    marks = "mean and 95% interval over seeds (three or more), points: seeds"
    if counts[DIVERGED]:
        marks += ", x: diverged seeds"
    if counts[STUCK] or counts[REGRESSED]:
        marks += ", open point: with stuck or regressed runs"
    caption = f"Final validation loss{what}: {marks}."
    bad = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return f"{caption} Of {len(runs)} runs, {bad}." if bad else caption


@dataclass(frozen=True, slots=True)
class FactorAxis:
    """The positions of a factor's levels on an axis."""

    positions: Mapping[Setting, float]
    """The levels themselves if they are numbers that a float can distinguish, else 0, 1, 2, ..."""
    is_log: bool


def factor_axis(factor: Factor) -> FactorAxis:
    """Return the positions of a factor's levels; the axis is logarithmic for a depth, a rate, a width or a batch."""
    positions: dict[Setting, float] = {x: float(x) for x in factor.levels if isinstance(x, int | float)}
    if not factor.is_numeric or len(set(positions.values())) < len(positions):
        return FactorAxis({level: float(index) for index, level in enumerate(factor.levels)}, is_log=False)
    is_log = factor.option in LOGARITHMIC and all(x > 0 for x in positions.values())
    return FactorAxis(positions, is_log)


def _factor(cells: Sequence[Cell], channels: Channels) -> Figure:
    factor = channels.x
    if factor is None:
        raise NormlabError("figure factor: the selected runs do not differ in any option; use figure loss or lr")
    axis = factor_axis(factor)

    def points(members: Sequence[Cell]) -> list[Point]:
        drawn = (loss_point(cell, cell.best_lr, axis.positions[_level(factor, cell)]) for cell in members)
        return sorted(drawn, key=lambda point: point.x)

    return Figure(
        "factor",
        factor.name,
        LOSS_AXIS,
        _line_panels(cells, channels, points),
        _loss_caption(f", {_at_best(cells)}", cells, lambda cell: cell.runs_at(cell.best_lr)),
        is_log_x=axis.is_log,
        x_ticks=tuple((x, level_title(factor.option, level)) for level, x in axis.positions.items()),
        is_connected=factor.is_numeric,
    )


def _learning_rates(cells: Sequence[Cell], channels: Channels) -> Figure:
    def points(members: Sequence[Cell]) -> list[Point]:
        return [loss_point(cell, lr, lr) for cell in members for lr in cell.losses]

    rates = sorted({lr for cell in cells for lr in cell.losses})
    caption = _loss_caption(" at each learning rate", cells, lambda cell: [run for run in cell.runs if run.has_loss])
    if any(cell.varies_decay for cell in cells):
        caption += f" Note: {GRID_OF_DECAYS}."
    return Figure(
        "lr",
        "learning rate",
        LOSS_AXIS,
        _line_panels(cells, channels, points),
        caption,
        is_log_x=all(rate > 0 for rate in rates),
        x_ticks=tuple((rate, format_setting(rate)) for rate in rates),
    )


def _losses(cells: Sequence[Cell], channels: Channels, series: str) -> Figure:
    if series not in SERIES:
        raise ConfigError(f"--statistic {series}: " + unknown("curve", series, SERIES))

    def points(members: Sequence[Cell]) -> list[Point]:
        runs = [run for cell in members for run in cell.runs_at_best]
        problems: list[str] = []
        curves = [read_curves(run.record, problems)[series] for run in runs]
        _warn_once(problems)
        return mean_curve(curves)

    name, panels = SERIES[series].partition(",")[0], _line_panels(cells, channels, points)
    if not any(panel.lines for panel in panels):
        raise NormlabError(f"figure loss: no selected run has recorded the {name}; choose another --statistic")
    return Figure(
        "loss",
        "step",
        SERIES[series],
        panels,
        f"{name.capitalize()} during training, {_at_best(cells)}: mean and range of the seeds.",
        may_be_log=series == "grad_norm",
    )


def _layers(cells: Sequence[Cell], channels: Channels, statistic: str, moment: str) -> Figure:
    if moment not in MOMENTS:
        raise ConfigError(f"--at {moment}: " + unknown("moment", moment, MOMENTS))
    name, _, site = statistic.partition(" ")

    known: set[Statistic] = set()

    def points(members: Sequence[Cell]) -> list[Point]:
        runs = [run for cell in members for run in cell.runs_at_best]
        problems: list[str] = []
        profiles = [read_profiles(run.record, problems) for run in runs]
        _warn_once(problems)
        keys = list(dict.fromkeys(key for each in profiles for key in each))
        known.update(keys)
        key = next((key for key in keys if key[0] == name and site in ("", key[1])), None)
        return median_profile([each[key] for each in profiles if key in each], moment) if key else []

    panels = _line_panels(cells, channels, points)
    if not any(panel.lines for panel in panels):
        raise ConfigError(_no_profile(name, site, known))
    unit = STATISTICS[name].unit
    return Figure(
        "layers",
        "layer",
        statistic if unit == "1" else f"{statistic}, {unit}",
        panels,
        f"{statistic} of each layer at the {MOMENTS[moment]}, {_at_best(cells)}: median and range of the seeds. Layer "
        "0 is the embeddings, the last one the LM head.",
        may_be_log=True,
    )


def _warn_once(problems: Sequence[str]) -> None:
    for problem in dict.fromkeys(problems):
        warn(problem)


def _no_profile(name: str, site: str, known: set[Statistic]) -> str:
    """Return why a statistic has no profile over layers."""
    if sites := sorted(each for key, each in known if key == name):
        return f"--statistic {name} {site}: " + unknown("site", site, sites)
    if name in STATISTICS and not known:
        return f"--statistic {name}: the runs have no statistics by layer; train with stats.every=10"
    return f"--statistic {name}: " + unknown("statistic by layer", name, sorted({each for each, _ in known}))


def _matrix(cells: Sequence[Cell], channels: Channels) -> Figure:
    columns, rows = channels.x, channels.color
    if columns is None or rows is None or columns is rows:
        raise NormlabError("figure matrix: needs two factors; use figure factor for one")
    panels = []
    for title, members in _panels(cells, channels).items():
        grid = {}
        for cell in members:
            at = columns.levels.index(_level(columns, cell)), rows.levels.index(_level(rows, cell))
            grid[at] = loss_point(cell, cell.best_lr, at[0])
        panels.append(Panel(title, grid=grid))

    def ticks(factor: Factor) -> tuple[tuple[float, str], ...]:
        return tuple((float(index), level_title(factor.option, level)) for index, level in enumerate(factor.levels))

    return Figure(
        "matrix",
        columns.name,
        rows.name,
        tuple(panels),
        f"Final validation loss, nats/token, {_at_best(cells)}: mean over seeds; k/n: k of n seeds "
        "diverged; o: with stuck or regressed runs.",
        x_ticks=ticks(columns),
        y_ticks=ticks(rows),
        is_connected=False,
    )


KINDS = ("loss", "lr", "factor", "layers", "matrix")
"""The figures."""
