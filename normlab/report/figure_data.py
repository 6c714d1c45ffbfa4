"""The description of the figures of a sweep: panels, axes, lines, points, texts and colours.

`figure_draw` (matplotlib) and the page (`chart.js`) draw it and compute nothing. Every point is a cell: loss and
interval are those of `summarize`. A diverged run has no finite loss; a point with diverged runs shows their number in
place of a mean.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from normlab.analysis.cells import BAD_OUTCOMES, Cell, reason_cells_not_comparable, runs_of
from normlab.analysis.comparability import SIZE_OPTIONS
from normlab.analysis.factor_tests.rate_tests import RateRange
from normlab.analysis.factor_tests.scaling import BEYOND
from normlab.analysis.factors import level_title
from normlab.analysis.rate_range import HIGHEST, NEAR
from normlab.analysis.settings import format_setting
from normlab.analysis.table import CellsTable
from normlab.base.errors import ConfigError, NormlabError, counted, unknown, warn
from normlab.base.parsing import is_whole_number
from normlab.catalogue.statistics.registry import STATISTICS
from normlab.report.channels import MAX_PANELS, Channels, choose_channels
from normlab.report.figure_axes import Axis, factor_axis, number_axis, number_ticks, tick_axis, value_axis
from normlab.report.figure_layout import FigureLayout, Panel, lines_of, points_of
from normlab.report.figure_points import MOMENTS, SERIES, Point, ReadCache, loss_point, mean_curve, median_profile
from normlab.report.histories import History
from normlab.store.format import DIVERGED
from normlab.store.outcome import REGRESSED, STUCK
from normlab.store.record import RunRecord

MOST_RATES = 12
"""The most learning rates that each have a tick."""
LAW_POINTS = 60
"""The points of the line of a law."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: panels that share their axes."""

    kind: str
    x: Axis
    y: Axis
    panels: Sequence[Panel]
    caption: str
    is_connected: bool = True
    is_band: bool = False
    """Whether low and high are the range of the seeds, drawn as a band."""

    @property
    def has_laws(self) -> bool:
        return any(line.law for line in lines_of(self.panels))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of figure."""

    describe: Callable[[FigureLayout, ReadCache, str | None, str], Figure]
    """Its description, from its layout, the records, a statistic and a moment."""
    has_range: bool = False
    """Whether it shows the range of the seeds, which runs without a final loss have, too."""
    has_factor_axis: bool = False
    """Whether its x axis is a factor."""
    has_size_axis: bool = False
    """Whether its x axis is the compute of all sizes, so that no option of the size needs a channel."""
    has_statistic: bool = False
    """Whether `statistic` selects what it shows."""
    has_moment: bool = False
    """Whether `moment` selects the step that it shows."""


def make_figure(
    kind: str, table: CellsTable, *, statistic: str | None = None, moment: str = "last", **channels: Any
) -> Figure:
    """Return the description of a figure.

    Args:
        kind: One of `KINDS`.
        table: The cells.
        statistic: For `layers` a statistic, such as `resid_rms` (the default) or `norm_in_rms attn.in`, which names a
            site too; for `loss` one of `SERIES`, by default `val_loss`.
        moment: The step of `layers`, or one of `MOMENTS`.
        channels: Options of `choose_channels`.

    Raises:
        ConfigError: The kind, the statistic, the moment or an option is unknown, or a factor is left without a channel.
        NormlabError: There is nothing to draw.
    """
    if kind not in KINDS:
        raise ConfigError(f"figure {kind}: " + unknown("figure", kind, KINDS))
    if channels.get("x") is not None and not KINDS[kind].has_factor_axis:
        raise ConfigError(f"--x {channels['x']}: this figure has its own x axis; use --color, --style or --panel")
    if statistic is not None and not KINDS[kind].has_statistic:
        raise ConfigError(f"--statistic {statistic}: has no effect on figure {kind}; leave it out, or draw layers")
    if moment != "last" and not KINDS[kind].has_moment:
        raise ConfigError(f"--at {moment}: has no effect on figure {kind}; leave it out, or draw layers")
    factors = table.factors
    if KINDS[kind].has_size_axis:
        factors = [factor for factor in factors if factor.option not in SIZE_OPTIONS]
    layout = layout_of(kind, table.cells, choose_channels(factors, runs_of(table.cells), **channels))
    cache = ReadCache()
    try:
        figure = describe(kind, layout, cache, statistic, moment)
    finally:
        # Also where nothing can be drawn: then they say why.
        problems: dict[str, None] = {}
        for lines in cache.problems.values():
            problems |= dict.fromkeys(lines)
        for problem in problems:
            warn(problem)
    if len(figure.panels) > MAX_PANELS:
        raise ConfigError(
            f"figure {kind}: {len(figure.panels)} panels, at most {MAX_PANELS}; select runs with --where, or move "
            f"{', '.join(factor.option for factor in layout.channels.panel)} to --color or --style"
        )
    return figure


def layout_of(kind: str, cells: Sequence[Cell], channels: Channels) -> FigureLayout:
    """Return the cells that a kind of figure shows, in panels and lines.

    Raises:
        NormlabError: No cell has a final loss, and the figure shows final losses.
    """
    # A curve or a profile needs no final loss.
    shown = [cell for cell in cells if cell.losses or KINDS[kind].has_range]
    if not shown:
        raise NormlabError(f"figure {kind}: no selected run has a final loss yet")
    if not KINDS[kind].has_factor_axis:
        channels = channels.without_x()
    return FigureLayout(shown, channels)


def describe(
    kind: str, layout: FigureLayout, cache: ReadCache, statistic: str | None = None, moment: str = "last"
) -> Figure:
    """Return the description of a figure; arguments and errors as for `make_figure`."""
    return KINDS[kind].describe(layout, cache, statistic, moment)


# Captions


def _at_best(cells: Sequence[Cell]) -> str:
    rates = _rates_of(cells)
    if len(rates) == 1:
        return f"at learning rate {format_setting(rates[0])}"
    return "each cell at its best learning rate, selected on this same loss"


def _rates_of(cells: Sequence[Cell]) -> list[float]:
    """Return the learning rates at which a cell has a loss, in order."""
    rates: set[float] = set()
    for cell in cells:
        rates.update(cell.losses)
    return sorted(rates)


def _loss_caption(what: str, cells: Sequence[Cell], figure_runs: Callable[[Cell], Sequence[RunRecord]]) -> str:
    """Return the caption of final losses: what is shown, its marks, and the runs with a bad outcome."""
    runs: list[RunRecord] = []
    for cell in cells:
        runs += figure_runs(cell)
    counts = Counter(run.result for run in runs)
    marks = "mean and 95% interval over seeds (three or more), points: seeds"
    if counts[DIVERGED]:
        marks += ", x: diverged seeds"
    if counts[STUCK] or counts[REGRESSED]:
        marks += ", open point: with stuck or regressed runs"
    caption = f"Final validation loss{what}: {marks}."
    bad: list[str] = []
    for outcome in BAD_OUTCOMES:
        if counts[outcome]:
            bad.append(f"{counts[outcome]} {outcome}")
    if not bad:
        return caption
    return f"{caption} Of {counted(len(runs), 'run')}, {', '.join(bad)}."


# Kinds of figures


def _factor(layout: FigureLayout) -> Figure:
    factor = layout.channels.x
    if factor is None:
        raise NormlabError("figure factor: the selected runs do not differ in any option; use figure loss or lr")
    positions, is_log = factor_axis(factor)

    def points(members: Sequence[Cell]) -> list[Point]:
        drawn: list[Point] = []
        for cell in members:
            level = cell.levels.get(factor.option)
            drawn.append(loss_point(cell, cell.best_lr, positions[level]))
        return sorted(drawn, key=lambda point: point.x)

    panels = layout.draw(points)
    ticks = [(x, level_title(factor.option, level)) for level, x in positions.items()]
    return Figure(
        "factor",
        tick_axis(factor.name, ticks, is_log=is_log, is_connected=factor.is_numeric),
        value_axis(SERIES["val_loss"], points_of(panels)),
        panels,
        _loss_caption(f", {_at_best(layout.cells)}", layout.cells, lambda cell: cell.runs_at(cell.best_lr)),
        is_connected=factor.is_numeric,
    )


def _learning_rates(layout: FigureLayout) -> Figure:
    def points(members: Sequence[Cell]) -> list[Point]:
        drawn: list[Point] = []
        for cell in members:
            drawn += [loss_point(cell, lr, lr) for lr in cell.losses]
        return drawn

    cells = layout.cells
    panels = layout.draw(points, highest_rates=_highest_rates)
    rates = _rates_of(cells)
    caption = _loss_caption(" at each learning rate", cells, lambda cell: cell.completed)
    if any(line.highest_rates for line in lines_of(panels)):
        caption += (
            f" Diamond with a horizontal bar: highest rate whose loss is within {NEAR} nats/token of the lowest of its "
            "seed, and its 95% interval (three seeds or more); none where the grid ends first."
        )
    ticks = [(rate, format_setting(rate)) for rate in rates]
    x = tick_axis("learning rate", ticks, is_log=True, is_connected=True)
    # The trials of a search have a rate each, whose ticks would cover each other.
    if len(rates) > MOST_RATES:
        x = replace(x, ticks=number_ticks(x.low, x.high, is_log=True))
    return Figure("lr", x, value_axis(SERIES["val_loss"], points_of(panels)), panels, caption)


def _highest_rates(cells: Sequence[Cell], points: Sequence[Point]) -> list[Point]:
    """Return the highest learning rate that trains in each cell, unless the grid ends first."""
    # A rate with a diverged seed has no mean, and no point on the line.
    known: list[tuple[float, float]] = []
    for point in points:
        if point.y is not None:
            known.append((point.x, point.y))
    if not known:
        return []
    rates, losses = zip(*sorted(known), strict=True)
    log_rates = list(map(math.log, rates))
    marks: list[Point] = []
    for _, row in RateRange().of_cells(cells, HIGHEST):
        if row["estimate"] is None or row["beyond_grid"]:
            continue
        # On the line of the losses, which is straight in ln rate.
        y = float(np.interp(math.log(row["estimate"]), log_rates, losses))
        # The interval of two seeds is wider than any figure.
        low = high = None
        if row["n"] > 2:
            low, high = row["low"], row["high"]
        marks.append(Point(row["estimate"], y, low, high, n=row["n"]))
    return marks


def _scaling(layout: FigureLayout) -> Figure:
    """Return the figure of the losses over the compute of training, with the laws of `--test scaling`."""
    from normlab.analysis.ladders import arms_of, fit_arms, rate_of

    reason = reason_cells_not_comparable(layout.cells)
    if reason:
        raise ConfigError(f"figure scaling: {reason}; add these options to --by")
    try:
        fitted = fit_arms(layout.cells)
    except ConfigError as error:
        raise ConfigError(f"figure scaling: {error}") from None

    def points(members: Sequence[Cell]) -> list[Point]:
        drawn: list[Point] = []
        for arm in arms_of(members):
            for size, cell in arm.cells.items():
                drawn.append(loss_point(cell, rate_of(cell), arm.compute_at(size)))
        return sorted(drawn, key=lambda point: point.x)

    def law(members: Sequence[Cell]) -> list[Point]:
        drawn: list[Point] = []
        # A line is one arm, since every other factor has a channel.
        [arm] = arms_of(members)
        levels_of_fitted = [fitted_arm.levels for fitted_arm in fitted.arms]
        if arm.levels not in levels_of_fitted:
            return drawn
        index = levels_of_fitted.index(arm.levels)
        fitted_arm = fitted.arms[index]
        computes = [fitted_arm.compute_at(size) for size in fitted_arm.cells]
        for compute in np.geomspace(min(computes), BEYOND[0] * max(computes), LAW_POINTS).tolist():
            loss = fitted.laws.loss(index, compute)
            drawn.append(Point(compute, loss.value, loss.low, loss.high))
        return drawn

    panels = layout.draw(points, law=law)
    shown = points_of(panels)
    for line in lines_of(panels):
        shown += line.law
    ends = [point.x for point in shown]
    # FLOPs are read as powers of ten: 3e11, not 300G.
    ticks: list[tuple[float, str]] = []
    for tick, _ in number_ticks(min(ends), max(ends), is_log=True):
        ticks.append((tick, f"{tick:.0e}".replace("e+", "e")))
    x = tick_axis("FLOPs of training", ticks, is_log=True, is_connected=True)
    x = replace(x, low=min(ends) / 1.3, high=max(ends) * 1.3)
    rates = "at the learning rate of its law, the one with the most seeds"
    caption = _loss_caption(f", each cell {rates}", layout.cells, lambda cell: cell.runs_at(rate_of(cell)))
    caption += (
        f" Lines: the laws of `normlab summarize --test scaling` with their 95% intervals, up to {BEYOND[0]} times the "
        "compute of the largest size."
    )
    void: list[str] = []
    for regret in fitted.regrets:
        if regret.is_void:
            void.append(f"{regret.arm.label}, {regret.arm.label_of_size(regret.size)}")
    if void:
        caption += f" The laws leave out sizes at which another learning rate is better: {'; '.join(void)}."
    return Figure("scaling", x, value_axis(SERIES["val_loss"], shown), panels, caption, is_connected=False)


def _losses(layout: FigureLayout, cache: ReadCache, series: str) -> Figure:
    if series not in SERIES:
        raise ConfigError(f"--statistic {series}: " + unknown("curve", series, SERIES))

    def points(members: Sequence[Cell]) -> list[Point]:
        curves = [cache.curves(run)[series] for run in _runs_at_best(members)]
        return mean_curve(curves)

    def crosses(cell: Cell) -> list[float]:
        steps: list[float] = []
        for run in cell.runs_at(cell.best_lr):
            if run.status.diverged is not None:
                steps.append(run.status.diverged.step)
        return steps

    name, _, _ = SERIES[series].partition(",")
    panels = layout.draw(points, crosses)
    if not lines_of(panels):
        raise NormlabError(f"figure loss: no selected run has recorded the {name}; choose another --statistic")
    caption = f"{name.capitalize()} during training, {_at_best(layout.cells)}: mean and range of the seeds."
    return curve_figure(series, panels, caption)


def curve_figure(series: str, panels: Sequence[Panel], caption: str) -> Figure:
    """Return a figure of one of `SERIES` over steps; the axis fits the values after the first tenth of the steps."""
    y = value_axis(SERIES[series], points_of(panels), may_be_log=series == "grad_norm", skip=0.1)
    steps = [point.x for point in points_of(panels)]
    for line in lines_of(panels):
        steps += line.crosses
    return Figure("loss", number_axis("step", steps), y, panels, caption, is_band=True)


def _layers(layout: FigureLayout, cache: ReadCache, statistic: str, moment: str) -> Figure:
    if moment not in MOMENTS and not is_whole_number(moment):
        raise ConfigError(f"--at {moment}: must be a step, first or last")
    name, _, site = statistic.partition(" ")
    steps: set[int] = set()

    def points(members: Sequence[Cell]) -> list[Point]:
        profiles: list[History] = []
        shown_site = site
        for run in _runs_at_best(members):
            for (measured, measured_site), profile in cache.profiles(run).items():
                if measured != name:
                    continue
                # Without a site in the name of the statistic, its first site is shown.
                if not shown_site:
                    shown_site = measured_site
                if measured_site == shown_site:
                    profiles.append(profile)
                    steps.update(profile.steps)
        return median_profile(profiles, moment)

    panels = layout.draw(points)
    has_lines = bool(lines_of(panels))
    # The statistic was measured, but not at this step.
    if steps and is_whole_number(moment) and not has_lines:
        nearest = sorted(sorted(steps, key=lambda step: abs(step - int(moment)))[:2])
        choice = " or ".join(map(str, nearest))
        raise ConfigError(f"--at {moment}: not measured at this step (stats.every says at which); choose {choice}")
    if not has_lines:
        raise ConfigError(_no_profile(name, site, layout, cache))
    title, unit = statistic, STATISTICS[name].unit
    if unit != "1":
        title = f"{statistic}, {unit}"
    when = f"step {moment}"
    if moment in MOMENTS:
        when = f"the {moment} measured step"
    return Figure(
        "layers",
        number_axis("layer", [point.x for point in points_of(panels)]),
        value_axis(title, points_of(panels), may_be_log=True),
        panels,
        f"{statistic} of each layer at {when}, {_at_best(layout.cells)}: median and range of the seeds. "
        "Layer 0 is the embeddings, the last one the LM head.",
        is_band=True,
    )


def _no_profile(name: str, site: str, layout: FigureLayout, cache: ReadCache) -> str:
    known: set[tuple[str, str]] = set()
    for run in _runs_at_best(layout.cells):
        known.update(cache.profiles(run))
    statistics: set[str] = set()
    sites: list[str] = []
    for statistic, known_site in known:
        statistics.add(statistic)
        if statistic == name:
            sites.append(known_site)
    if sites:
        return f"--statistic {name} {site}: " + unknown("site", site, sorted(sites))
    if name in STATISTICS and not known:
        return f"--statistic {name}: the runs have no statistics by layer; train with stats.every=10"
    return f"--statistic {name}: " + unknown("statistic by layer", name, sorted(statistics))


def _runs_at_best(cells: Sequence[Cell]) -> list[RunRecord]:
    """Return the runs of cells at their best learning rates."""
    runs: list[RunRecord] = []
    for cell in cells:
        runs += cell.runs_at_best
    return runs


KINDS = {
    "loss": Kind(
        lambda layout, cache, statistic, _: _losses(layout, cache, statistic or "val_loss"),
        has_range=True,
        has_statistic=True,
    ),
    "lr": Kind(lambda layout, *_: _learning_rates(layout)),
    "factor": Kind(lambda layout, *_: _factor(layout), has_factor_axis=True),
    "layers": Kind(
        lambda layout, cache, statistic, moment: _layers(layout, cache, statistic or "resid_rms", moment),
        has_range=True,
        has_statistic=True,
        has_moment=True,
    ),
    "scaling": Kind(lambda layout, *_: _scaling(layout), has_size_axis=True),
}
