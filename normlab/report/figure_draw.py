"""Draw the figures of `figure_data` with matplotlib, for papers: PDF, SVG or PNG, one or two columns wide.

Fonts are embedded. The limits of the loss axis fit the means and the seeds; an interval that leaves the frame ends in
an arrow.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normlab.errors import ConfigError, printable
from normlab.report.figure_data import Figure, Line, Panel, Point
from normlab.report.pages.shell import write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

SUFFIXES = (".pdf", ".svg", ".png")
WIDTHS = {1: 3.4, 2: 7.0}
"""Width in inches of a figure of one and of two text columns."""
LOGARITHMIC_FROM = 30
"""The ratio of the largest and the smallest value from which an axis may be logarithmic."""
RANGES = ("loss", "layers")
"""The figures in which low and high are the range of the seeds, drawn as a band."""
CHARACTER = 0.06
"""Width of a character of a label, inches."""
ROOM = 0.08
"""Room above and below the values, as a share of their range."""
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_MARKERS = {"solid": "o", "dash": "s", "dot": "^", "dashdot": "D"}
SETTINGS = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "legend.fontsize": 7, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6,
    "grid.linewidth": 0.4, "grid.color": "#dddddd", "lines.linewidth": 1.3, "lines.markersize": 4,
    "pdf.fonttype": 42, "svg.hashsalt": "normlab", "savefig.dpi": 200, "legend.frameon": False,
}  # fmt: skip


def write_figure(figure: Figure, path: Path, columns: int = 2) -> None:
    """Write a figure; the suffix of the path selects the format.

    Args:
        figure: The data.
        path: The file.
        columns: The width in text columns, 1 or 2.

    Raises:
        ConfigError: The suffix or the number of columns is unknown.
        StoreError: The file cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"-o {path}: a figure ends in {', '.join(SUFFIXES)}")
    if columns not in WIDTHS:
        raise ConfigError(f"--columns {columns}: must be 1 or 2")
    import matplotlib

    with matplotlib.rc_context(SETTINGS):  # pyright: ignore[reportArgumentType]
        write_output(path, render_figure(draw(figure, columns), path.suffix.lower().removeprefix(".")))


def render_figure(canvas: Canvas, format: str) -> bytes:
    """Return a figure as a file that names normlab, without dates, so that equal figures are equal files."""
    metadata = {
        "pdf": {"Creator": "normlab", "CreationDate": None}, "svg": {"Creator": "normlab", "Date": None},
        "png": {"Software": "normlab"},
    }[format]  # fmt: skip
    content = io.BytesIO()
    canvas.savefig(content, format=format, metadata=metadata)
    return content.getvalue()


def draw(figure: Figure, columns: int = 2) -> Canvas:
    """Return the figure as a matplotlib figure, without its caption."""
    from matplotlib.figure import Figure as MatplotlibFigure

    class Canvas(MatplotlibFigure):
        def _repr_png_(self) -> bytes:
            """Return the picture that a notebook shows."""
            return render_figure(self, "png")

    figure = _with_literal_texts(figure)
    count = len(figure.panels)
    most = (1 if figure.kind == "matrix" else 2) if columns == 1 or count == 4 else 4 if count > 6 else 3
    across = min(count, most)
    down = math.ceil(count / across)
    width = WIDTHS[columns] if count > 1 or columns == 1 else 4.6
    height = down * min(2.6, max(1.7, 0.75 * width / across)) + 0.5
    canvas = Canvas(figsize=(width, height), layout="constrained")
    axes = canvas.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    flat = [axis for row in axes for axis in row]
    for axis in flat[count:]:
        axis.set_visible(False)
    limits = _limits(figure)
    for index, (axis, panel) in enumerate(zip(flat, figure.panels, strict=False)):
        axis.set_title(_wrapped(panel.title, max(8, int(0.85 * width / across / CHARACTER))))
        if figure.kind == "matrix":
            image = _draw_grid(axis, figure, panel, limits, width / across)
            if index == count - 1 and image is not None:
                canvas.colorbar(image, ax=flat[:count], shrink=0.8, label="nats/token")
        else:
            _draw_lines(axis, figure, panel, limits, width / across)
        if index + across >= count:
            axis.set_xlabel(figure.x_name)
            axis.tick_params(labelbottom=True)
        if index % across == 0:
            axis.set_ylabel(figure.y_name)
    lines = {line.label: line for panel in figure.panels for line in panel.lines if line.label}
    if lines:
        from matplotlib.lines import Line2D

        # The order of the levels, which one panel may lack.
        handles = [Line2D([], [], **_style(line, figure), label=line.label) for line in lines.values()]
        longest = max(map(len, lines))
        fitting = max(1, int(width / (0.5 + CHARACTER * longest)))
        canvas.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), fitting, 4))
    return canvas


def _with_literal_texts(figure: Figure) -> Figure:
    """Return a figure whose texts, but for the titles, are drawn as they are; they may be someone else's."""
    panels = (
        replace(panel, lines=tuple(replace(line, label=_literal(line.label)) for line in panel.lines))
        for panel in figure.panels
    )
    ticks = {name: tuple((at, _literal(text)) for at, text in getattr(figure, name)) for name in ("x_ticks", "y_ticks")}
    names = {name: _literal(getattr(figure, name)) for name in ("x_name", "y_name")}
    return replace(figure, panels=tuple(panels), **ticks, **names)


def _literal(text: str) -> str:
    """Return a text for matplotlib, which reads what is between two dollar signs as a formula."""
    return printable(text).replace("$", r"\$")


def _wrapped(text: str, width: int) -> str:
    """Return a text for matplotlib in lines of at most `width` characters."""
    return "\n".join(map(_literal, textwrap.wrap(printable(text), width)))


def _points(figure: Figure) -> list[Point]:
    lines = [point for panel in figure.panels for line in panel.lines for point in line.points]
    return lines + [point for panel in figure.panels for point in panel.grid.values()]


def _limits(figure: Figure) -> tuple[float, float]:
    """Return the range of the loss axis: all values, and intervals up to the range of the values beyond them.

    In a figure over steps, values in the first tenth of the steps may lie above the range.
    """
    points = _points(figure)
    is_range = figure.kind in RANGES
    first = max((point.x for point in points), default=0.0) / 10 if figure.kind == "loss" else -math.inf
    later = [point for point in points if point.x >= first]
    points = later if len({point.x for point in later}) > 2 else points
    points = _without_stuck(points)
    values = [*(value for point in points for value in (point.y, *point.seeds))]
    ends = [value for point in points for value in (point.low, point.high)]
    if is_range:
        values, ends = [*values, *ends], []
    elif figure.kind == "matrix":
        ends = []
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    beyond = (high - low) or 0.1 * abs(high) or 1.0
    ends = [value for value in ends if value is not None]
    if figure.may_be_log and low > 0 and high / low > LOGARITHMIC_FROM:
        return low / 1.3, high * 1.3
    low, high = max(low - beyond, min([low, *ends])), min(high + beyond, max([high, *ends]))
    room = ROOM * (high - low or beyond)
    return low - room, high + room


def _without_stuck(points: Sequence[Point]) -> Sequence[Point]:
    """Return the points without those with stuck runs if these stretch the axis to more than twice its length."""
    others = [point for point in points if not point.stuck]
    spans = []
    for each in (points, others):
        values = [value for point in each for value in (point.y, *point.seeds) if value is not None]
        spans.append(max(values) - min(values) if values else 0.0)
    return others if spans[0] > 2 * spans[1] > 0 else points


def _style(line: Line, figure: Figure) -> dict[str, Any]:
    connected = figure.is_connected
    return {
        "color": line.color,
        "linestyle": _DASHES[line.style] if connected else "none",
        "marker": None if figure.kind in RANGES else _MARKERS[line.style],
    }


def _draw_lines(axis: Axes, figure: Figure, panel: Panel, limits: tuple[float, float], panel_width: float) -> None:
    if figure.is_log_x:
        axis.set_xscale("log")
        axis.minorticks_off()
    from matplotlib.ticker import MaxNLocator

    is_range = figure.kind in RANGES
    low, high = limits
    if figure.may_be_log and low > 0 and high / low > LOGARITHMIC_FROM:
        axis.set_yscale("log")
    if figure.kind == "layers":
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    top = high + (0.0 if is_range or not any(point.diverged for point in _points(figure)) else 0.12 * (high - low))
    axis.set_ylim(low, top)
    axis.grid(axis="y")
    crosses: dict[float, int] = {}
    for index, line in enumerate(panel.lines):
        points = [point for point in line.points if point.y is not None]
        shift = _shifted(figure, index - (len(panel.lines) - 1) / 2)
        x, y = [shift(point.x) for point in points], [point.y or 0.0 for point in points]
        axis.plot(x, y, **_style(line, figure))
        for at, point in zip(x, points, strict=True):
            if point.stuck and point.y is not None:
                style = {"color": line.color, "marker": _MARKERS[line.style], "markerfacecolor": "white", "zorder": 3}
                axis.plot([at], [min(point.y, high)], linestyle="none", clip_on=False, **style)
                if point.y > high:
                    axis.annotate(
                        f"{point.y:.2f}", (at, high), (-4, 0), textcoords="offset points", ha="right", fontsize=6
                    )
        if is_range:
            lows, highs = [point.low or 0.0 for point in points], [point.high or 0.0 for point in points]
            axis.fill_between(x, lows, highs, color=line.color, alpha=0.15, linewidth=0)
        else:
            for at, point in zip(x, points, strict=True):
                _draw_interval(axis, at, point, line.color, limits)
            seeds = [(shift(point.x), seed) for point in line.points if point.n > 1 for seed in point.seeds]
            axis.plot(*_columns(seeds), linestyle="none", marker=".", markersize=3, color=line.color, alpha=0.5)
            for point in (point for point in line.points if point.diverged):
                stacked = crosses[point.x] = crosses.get(point.x, -1) + 1
                at = shift(point.x), high + (0.05 - 0.07 * stacked) * (high - low)
                axis.plot(*at, marker="x", color=line.color, linestyle="none")
                axis.annotate(
                    f"{point.diverged}/{point.n}", at, (4, 0), textcoords="offset points", va="center", fontsize=6
                )
    if figure.x_ticks:
        axis.set_xticks([x for x, _ in figure.x_ticks], [text for _, text in figure.x_ticks])
        _turn_long_ticks(axis, figure, panel_width)
    if not figure.is_connected and figure.x_ticks:
        axis.set_xlim(figure.x_ticks[0][0] - 0.5, figure.x_ticks[-1][0] + 0.5)
    elif len(figure.x_ticks) == 1:
        x = figure.x_ticks[0][0]
        axis.set_xlim((x / 2, x * 2) if figure.is_log_x else (x - 1, x + 1))


def _turn_long_ticks(axis: Axes, figure: Figure, panel_width: float) -> None:
    """Turn the texts of the x ticks if they are wider than their places."""
    place = 0.8 * panel_width / len(figure.x_ticks)
    if CHARACTER * max(len(text) for _, text in figure.x_ticks) > place:
        axis.tick_params(axis="x", labelrotation=45)
        for text in axis.get_xticklabels():
            text.set_horizontalalignment("right")
            text.set_rotation_mode("anchor")


def _shifted(figure: Figure, position: float) -> Callable[[float], float]:
    """Return a function that moves the x of a line a little aside, so that intervals do not cover each other."""
    if figure.kind in RANGES:
        return lambda x: x
    ticks = [x for x, _ in figure.x_ticks]
    if figure.is_log_x:
        span = math.log(max(ticks) / min(ticks)) or 1.0
        return lambda x: x * math.exp(0.012 * position * span)
    span = max(ticks) - min(ticks) or 1.0
    return lambda x: x + (0.012 * span if figure.is_connected else 0.14) * position


def _columns(pairs: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    pairs = list(pairs)
    return [x for x, _ in pairs], [y for _, y in pairs]


def _draw_interval(axis: Axes, x: float, point: Point, color: str, limits: tuple[float, float]) -> None:
    """Draw an interval; an end outside the limits is an arrow at the limit."""
    if point.low is None or point.high is None:
        return
    low, high = max(point.low, limits[0]), min(point.high, limits[1])
    axis.plot([x, x], [low, high], color=color, linewidth=0.9)
    axis.plot([x], [low], marker="v" if point.low < limits[0] else "_", color=color, markersize=4)
    axis.plot([x], [high], marker="^" if point.high > limits[1] else "_", color=color, markersize=4)


def _draw_grid(axis: Axes, figure: Figure, panel: Panel, limits: tuple[float, float], panel_width: float) -> Any:
    """Draw a heat map with the loss in each field; a field with diverged seeds has no colour."""
    import numpy as np

    values = np.full((len(figure.y_ticks), len(figure.x_ticks)), np.nan)
    for (column, row), point in panel.grid.items():
        values[row, column] = math.nan if point.y is None else point.y
    image = axis.imshow(values, cmap="cividis", vmin=limits[0], vmax=limits[1], aspect="auto")
    for (column, row), point in panel.grid.items():
        light = point.y is not None and point.y > (limits[0] + limits[1]) / 2
        text = f"{point.diverged}/{point.n}" if point.y is None else f"{point.y:.3f}{' o' if point.stuck else ''}"
        color = "black" if light or point.y is None else "white"
        room = 0.7 * panel_width / len(figure.x_ticks)
        size = min(7.0, 7.0 * room / (CHARACTER * len(text)))
        axis.text(column, row, text, ha="center", va="center", fontsize=size, color=color)
    axis.set_xticks([x for x, _ in figure.x_ticks], [text for _, text in figure.x_ticks])
    _turn_long_ticks(axis, figure, panel_width)
    axis.set_yticks([y for y, _ in figure.y_ticks], [text for _, text in figure.y_ticks])
    for spine in axis.spines.values():
        spine.set_visible(False)
    return image
