"""Place the cells of a figure: each combination of levels on a panel and a line.

A kind of figure (`figure_data`) then says which points a line has.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from normlab.analysis.cells import Cell
from normlab.analysis.factors import level_label
from normlab.report.channels import Channels
from normlab.report.figure_points import Point
from normlab.store.record import Setting


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one colour and line style, connected if the x axis has an order."""

    label: str
    color: str
    style: str
    points: Sequence[Point]
    crosses: Sequence[float] = ()
    """The steps at which seeds diverged."""
    highest_rates: Sequence[Point] = ()
    """The highest learning rate that trains in each cell, on the line; its interval is along the x axis."""
    law: Sequence[Point] = ()
    """A law that is fitted to the points, with its interval."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    lines: Sequence[Line]


class FigureLayout:
    """The cells of a figure on its panels and lines."""

    def __init__(self, cells: Sequence[Cell], channels: Channels) -> None:
        self.cells, self.channels = cells, channels
        self.panels: dict[str, list[Cell]] = {}
        """The cells of each panel, by its title, in the order of the panel factors' levels."""
        for cell in sorted(cells, key=self._order):
            title = channels.panel_label(cell.levels)
            self.panels.setdefault(title, []).append(cell)
        self.lines = {title: self._lines(members) for title, members in self.panels.items()}
        """The lines of each panel without points, each with its cells."""

    def _order(self, cell: Cell) -> list[int]:
        """Return the positions of a cell's levels among those of the panel factors."""
        return [factor.levels.index(cell.levels[factor.option]) for factor in self.channels.panel]

    def _lines(self, cells: Sequence[Cell]) -> list[tuple[Line, list[Cell]]]:
        channels = self.channels
        lines: list[tuple[Line, list[Cell]]] = []
        for color, color_text in channels.colors().items():
            for style, style_text in channels.styles().items():
                levels: dict[str, Setting] = {}
                if channels.color is not None:
                    levels[channels.color.option] = color
                if channels.style is not None:
                    levels[channels.style.option] = style
                members: list[Cell] = []
                for cell in cells:
                    if levels.items() <= cell.levels.items():
                        members.append(cell)
                # A sweep need not have all combinations of its levels.
                if members:
                    name = ", ".join(map(level_label, levels, levels.values()))
                    lines.append((Line(name, color_text, style_text, ()), members))
        return lines

    def draw(
        self,
        points: Callable[[Sequence[Cell]], Sequence[Point]],
        crosses: Callable[[Cell], Iterable[float]] | None = None,
        highest_rates: Callable[[Sequence[Cell], Sequence[Point]], Sequence[Point]] | None = None,
        law: Callable[[Sequence[Cell]], Sequence[Point]] | None = None,
    ) -> list[Panel]:
        """Return the panels with the points of the cells of each line, without lines that have none."""
        panels: list[Panel] = []
        for title, lines in self.lines.items():
            drawn: list[Line] = []
            for line, cells in lines:
                points_of_line = points(cells)
                if not points_of_line:
                    continue
                steps: list[float] = []
                rates: Sequence[Point] = ()
                if crosses:
                    for cell in cells:
                        steps += crosses(cell)
                if highest_rates:
                    rates = highest_rates(cells, points_of_line)
                law_points: Sequence[Point] = ()
                if law:
                    law_points = law(cells)
                drawn.append(Line(line.label, line.color, line.style, points_of_line, steps, rates, law_points))
            panels.append(Panel(title, drawn))
        return panels


def lines_of(panels: Sequence[Panel]) -> list[Line]:
    """Return the lines of all panels."""
    lines: list[Line] = []
    for panel in panels:
        lines += panel.lines
    return lines


def points_of(panels: Sequence[Panel]) -> list[Point]:
    """Return the points of all lines."""
    points: list[Point] = []
    for line in lines_of(panels):
        points += line.points
    return points
