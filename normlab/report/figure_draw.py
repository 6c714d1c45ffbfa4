"""Draw the figures of `figure_data` with matplotlib, for papers: PDF, SVG or PNG, one or two columns wide.

Fonts are embedded. An interval that leaves the frame ends in an arrow.
"""

from __future__ import annotations

import io
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normlab.base.errors import ConfigError, printable
from normlab.report.figure_data import Figure
from normlab.report.figure_layout import Line, Panel, lines_of, points_of
from normlab.report.figure_points import Point
from normlab.report.pages.shell import write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

SUFFIXES = (".pdf", ".svg", ".png")
WIDTHS = {1: 3.4, 2: 7.0}
"""Width in inches of a figure of one and of two text columns."""
CHARACTER = 0.06
"""Width of a character of a label, inches."""
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_MARKERS = {"solid": "o", "dash": "s", "dot": "^", "dashdot": "D"}
SETTINGS = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "legend.fontsize": 7, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6,
    "grid.linewidth": 0.4, "grid.color": "#dddddd", "lines.linewidth": 1.3, "lines.markersize": 4,
    "pdf.fonttype": 42, "svg.hashsalt": "normlab", "savefig.dpi": 200, "legend.frameon": False,
}  # fmt: skip


def write_figure(figure: Figure, path: Path, columns: int = 2) -> None:
    """Write a figure, one or two text columns wide; the suffix of the path selects the format.

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
    from matplotlib.lines import Line2D

    class Canvas(MatplotlibFigure):
        def _repr_png_(self) -> bytes:
            return render_figure(self, "png")

    count = len(figure.panels)
    across = min(count, _most_across(count, columns))
    down = math.ceil(count / across)
    width = WIDTHS[columns]
    if count == 1 and columns == 2:
        width = 4.6
    height = down * min(2.6, max(1.7, 0.75 * width / across)) + 0.5
    canvas = Canvas(figsize=(width, height), layout="constrained")
    axes = canvas.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    flat = list(axes.flat)
    # The last row may have fewer panels than the others.
    for axis in flat[count:]:
        axis.set_visible(False)
    for index, (axis, panel) in enumerate(zip(flat, figure.panels, strict=False)):
        titles = textwrap.wrap(printable(panel.title), max(8, int(0.85 * width / across / CHARACTER)))
        axis.set_title("\n".join(map(_literal, titles)))
        _set_ranges(axis, figure)
        _draw_lines(axis, figure, panel)
        _set_x_ticks(axis, figure, width / across)
        # Panels share their axes, so that only the outer ones need their names.
        if index + across >= count:
            axis.set_xlabel(_literal(figure.x.name))
            axis.tick_params(labelbottom=True)
        if index % across == 0:
            axis.set_ylabel(_literal(figure.y.name))
    # One legend above all panels: a line of several panels is in it once.
    lines: dict[str, Line] = {}
    for line in lines_of(figure.panels):
        if line.label:
            lines[line.label] = line
    if lines:
        handles = [Line2D([], [], **_style(line, figure), label=_literal(line.label)) for line in lines.values()]
        widest = max(map(len, lines))
        fitting = max(1, int(width / (0.5 + CHARACTER * widest)))
        canvas.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), fitting, 4))
    return canvas


def _most_across(count: int, columns: int) -> int:
    """Return the most panels beside each other."""
    if columns == 1 or count == 4:
        return 2
    if count > 6:
        return 4
    return 3


def _literal(text: str) -> str:
    """Return a text for matplotlib, which reads what is between two dollar signs as a formula."""
    return printable(text).replace("$", r"\$")


def _style(line: Line, figure: Figure) -> dict[str, Any]:
    style: dict[str, Any] = {"color": line.color, "linestyle": "none", "marker": None}
    if figure.is_connected:
        style["linestyle"] = _DASHES[line.style]
    if not figure.is_band:
        style["marker"] = _MARKERS[line.style]
    return style


def _set_x_ticks(axis: Axes, figure: Figure, panel_width: float) -> None:
    """Set the ticks of the x axis, and turn their texts if they are wider than their places."""
    positions: list[float] = []
    texts: list[str] = []
    for x, text in figure.x.ticks:
        positions.append(x)
        texts.append(_literal(text))
    axis.set_xticks(positions, texts)
    if CHARACTER * max(map(len, texts), default=0) > 0.8 * panel_width / max(len(texts), 1):
        axis.tick_params(axis="x", labelrotation=45)
        for text in axis.get_xticklabels():
            text.set_horizontalalignment("right")
            text.set_rotation_mode("anchor")


def _set_ranges(axis: Axes, figure: Figure) -> None:
    """Set the scales and the ranges of both axes, and the ticks of y."""
    low, high = figure.y.low, figure.y.high
    if figure.x.is_log:
        axis.set_xscale("log")
    if figure.y.is_log:
        axis.set_yscale("log")
    # A logarithmic axis would add minor ticks to those of the figure.
    axis.minorticks_off()
    has_diverged = any(point.diverged for point in points_of(figure.panels))
    # Room above the values for the crosses of diverged seeds.
    axis.set_xlim(figure.x.low, figure.x.high)
    axis.set_ylim(low, high + 0.12 * (high - low) * has_diverged)
    positions: list[float] = []
    texts: list[str] = []
    for y, text in figure.y.ticks:
        positions.append(y)
        texts.append(text)
    axis.set_yticks(positions, texts)
    axis.grid(axis="y")


def _draw_lines(axis: Axes, figure: Figure, panel: Panel) -> None:
    low, high = figure.y.low, figure.y.high
    crosses: dict[float, int] = {}
    for index, line in enumerate(panel.lines):
        position = index - (len(panel.lines) - 1) / 2
        points: list[Point] = []
        x: list[float] = []
        y: list[float] = []
        for point in line.points:
            if point.y is not None:
                points.append(point)
                x.append(_shifted(figure, point.x, position))
                y.append(point.y)
        axis.plot(x, y, **_style(line, figure))
        if figure.is_band:
            lows, highs = [point.low or 0.0 for point in points], [point.high or 0.0 for point in points]
            axis.fill_between(x, lows, highs, color=line.color, alpha=0.15, linewidth=0)
            continue
        _draw_law(axis, line)
        for point in line.highest_rates:
            _draw_highest_rate(axis, point, line.color)
        for at, point in zip(x, points, strict=True):
            if point.stuck:
                _draw_stuck(axis, at, point, line, high)
            _draw_interval(axis, at, point, line.color, (low, high))
        seeds_x: list[float] = []
        seeds_y: list[float] = []
        for point in line.points:
            # A single seed is the point itself.
            if point.n > 1:
                seeds_x += [_shifted(figure, point.x, position)] * len(point.seeds)
                seeds_y += point.seeds
        axis.plot(seeds_x, seeds_y, linestyle="none", marker=".", markersize=3, color=line.color, alpha=0.5)
        # Points with diverged seeds stand above the frame, those of several lines below each other.
        for point in line.points:
            if point.diverged:
                crosses[point.x] = crosses.get(point.x, -1) + 1
                top = high + (0.05 - 0.07 * crosses[point.x]) * (high - low)
                at = _shifted(figure, point.x, position), top
                axis.plot(*at, marker="x", color=line.color, linestyle="none")
                text = f"{point.diverged}/{point.n}"
                axis.annotate(text, at, (4, 0), textcoords="offset points", va="center", fontsize=6)


def _shifted(figure: Figure, x: float, position: float) -> float:
    """Return the x of a point of a line, a little aside, so that intervals do not cover each other."""
    # A band has no intervals, and a point of a law belongs beside its line.
    if figure.is_band or figure.has_laws:
        return x
    if figure.x.is_log:
        return x * (figure.x.high / figure.x.low) ** (0.01 * position)
    shift = 0.14
    if figure.is_connected:
        shift = 0.01 * (figure.x.high - figure.x.low)
    return x + shift * position


def _draw_law(axis: Axes, line: Line) -> None:
    """Draw a fitted law with its interval, if it has one."""
    x, y = [point.x for point in line.law], [point.y or 0.0 for point in line.law]
    axis.plot(x, y, color=line.color, linestyle=_DASHES[line.style], linewidth=1.0)
    if all(point.low is not None for point in line.law):
        lows, highs = [point.low or 0.0 for point in line.law], [point.high or 0.0 for point in line.law]
        axis.fill_between(x, lows, highs, color=line.color, alpha=0.15, linewidth=0)


def _draw_highest_rate(axis: Axes, point: Point, color: str) -> None:
    """Draw a diamond with a horizontal interval."""
    ends = [end for end in (point.low, point.high) if end is not None]
    y = point.y or 0.0
    axis.plot(ends, [y] * len(ends), marker="|", color=color, linewidth=0.9, zorder=3)
    axis.plot([point.x], [y], marker="D", markerfacecolor="white", color=color, zorder=3)


def _draw_stuck(axis: Axes, x: float, point: Point, line: Line, top: float) -> None:
    """Draw an open point, at the top with its loss if it is above the frame."""
    y = point.y or 0.0
    style = {"color": line.color, "marker": _MARKERS[line.style], "markerfacecolor": "white", "zorder": 3}
    axis.plot([x], [min(y, top)], linestyle="none", clip_on=False, **style)
    if y > top:
        axis.annotate(f"{y:.2f}", (x, top), (-4, 0), textcoords="offset points", ha="right", fontsize=6)


def _draw_interval(axis: Axes, x: float, point: Point, color: str, limits: tuple[float, float]) -> None:
    """Draw an interval; an end outside the limits is an arrow at the limit."""
    if point.low is None or point.high is None:
        return
    low, high = max(point.low, limits[0]), min(point.high, limits[1])
    axis.plot([x, x], [low, high], color=color, linewidth=0.9)
    axis.plot([x], [low], marker="v" if point.low < limits[0] else "_", color=color, markersize=4)
    axis.plot([x], [high], marker="^" if point.high > limits[1] else "_", color=color, markersize=4)
