"""The axes of the figures: their ranges and their ticks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from normlab.analysis.factor_tests.contrasts_of_losses import LOGARITHMIC
from normlab.analysis.factors import Factor
from normlab.report.figure_points import Point
from normlab.store.record import Setting

LOGARITHMIC_FROM = 30
"""The ratio of the largest and the smallest value from which an axis may be logarithmic."""
ROOM = 0.08
"""Room beyond the values, as a share of their range."""
TICKS = 6
"""Most steps between the ticks of an axis of numbers."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The range of an axis, with the positions and the texts of its ticks."""

    name: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False


def short_number(value: float) -> str:
    """Return a number in few characters: 1.25, 12k, 3M, 1e-5."""
    size = abs(value)
    if 1e4 <= size < 1e12:
        unit, letter = 1e3, "k"
        if size >= 1e9:
            unit, letter = 1e9, "G"
        elif size >= 1e6:
            unit, letter = 1e6, "M"
        return f"{float(f'{value / unit:.3g}'):g}{letter}"
    return f"{value:.6g}".replace("e-0", "e-").replace("e+", "e")


def number_ticks(low: float, high: float, *, is_log: bool = False) -> list[tuple[float, str]]:
    """Return the round numbers of a range, about `TICKS`, with their texts."""
    ticks: list[float] = []
    if is_log:
        ticks = _log_ticks(low, high)
    # A logarithmic axis within one decade may have no two such numbers.
    if len(ticks) < 2:
        ticks = _linear_ticks(low, high)
    return [(tick, short_number(tick)) for tick in ticks]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round multiples of powers of ten, fewer for each power the more powers there are."""
    decades = math.log10(high / low)
    if decades > 3:
        factors = (1,)
    elif decades > 1.2:
        factors = (1, 3)
    else:
        factors = (1, 2, 3, 5, 7)
    ticks: list[float] = []
    for power in range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1):
        for factor in factors:
            tick = float(f"{factor * 10.0**power:.12g}")
            if low <= tick <= high:
                ticks.append(tick)
    return ticks[:: math.ceil(len(ticks) / TICKS) or 1]


def _linear_ticks(low: float, high: float) -> list[float]:
    """Return the multiples of 1, 2, 5 or 10 times a power of ten, of the smallest that gives at most `TICKS` steps."""
    size = 10.0 ** math.floor(math.log10((high - low) / TICKS))
    step = size
    for factor in (1, 2, 5, 10):
        step = factor * size
        if (high - low) / step <= TICKS:
            break
    # An end of the range may miss its tick by the last bits of the division.
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # In twelve digits, because a multiple of 0.1 in binary may have seventeen.
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def value_axis(name: str, points: Sequence[Point], *, may_be_log: bool = False, skip: float = 0.0) -> Axis:
    """Return the vertical axis: all values, and intervals up to the range of the values beyond them.

    With `may_be_log` it is logarithmic if the values are positive and differ by `LOGARITHMIC_FROM`. In the first share
    `skip` of the x axis values may lie above the range.
    """
    # The first losses of a run are far above the later ones, and would press these together.
    if skip:
        first = skip * max((point.x for point in points), default=0.0)
        later = [point for point in points if point.x >= first]
        # Of a run with few evaluations, only the last one or two are left.
        if len({point.x for point in later}) > 2:
            points = later
    points = _without_stuck(points)
    values = _values(points)
    if not values:
        return Axis(name, 0.0, 1.0, number_ticks(0.0, 1.0))
    low, high = min(values), max(values)
    if may_be_log and low > 0 and high / low > LOGARITHMIC_FROM:
        low, high = low / 1.3, high * 1.3
        return Axis(name, low, high, number_ticks(low, high, is_log=True), is_log=True)
    # A wide interval may extend the axis by the range of the values at each end, not more.
    beyond = (high - low) or 0.1 * abs(high) or 1.0
    ends: list[float | None] = [low, high]
    for point in points:
        ends += point.low, point.high
    finite_ends = _finite(ends)
    low, high = max(low - beyond, min(finite_ends)), min(high + beyond, max(finite_ends))
    room = ROOM * (high - low or beyond)
    return Axis(name, low - room, high + room, number_ticks(low - room, high + room))


def _without_stuck(points: Sequence[Point]) -> Sequence[Point]:
    """Return the points without those with stuck runs above the others, if these stretch the axis to twice its length.

    A short run above the band around the unigram entropy is not stuck, so that stuck runs may lie below it.
    """
    top = max(_values([point for point in points if not point.stuck]), default=None)
    if top is None:
        return points
    kept: list[Point] = []
    for point in points:
        if not point.stuck or max(_values([point]), default=top) <= top:
            kept.append(point)
    values, kept_values = _values(points), _values(kept)
    span, kept_span = max(values) - min(values), max(kept_values) - min(kept_values)
    if span > 2 * kept_span > 0:
        return kept
    return points


def _values(points: Sequence[Point]) -> list[float]:
    """Return the means and the seeds of points, without infinite ones."""
    values: list[float | None] = []
    for point in points:
        values += point.y, *point.seeds
    return _finite(values)


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def number_axis(name: str, values: Sequence[float]) -> Axis:
    """Return the horizontal axis of some whole numbers, such as steps."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    high = max(high, low + 1)
    # There is no step 2.5.
    ticks: list[tuple[float, str]] = []
    for position, text in number_ticks(low, high):
        if position.is_integer():
            ticks.append((position, text))
    return Axis(name, low, high, ticks)


def tick_axis(name: str, ticks: Sequence[tuple[float, str]], *, is_log: bool, is_connected: bool) -> Axis:
    """Return the horizontal axis of some levels, with room beyond the outer ones."""
    low, high = ticks[0][0], ticks[-1][0]
    if is_log:
        factor = 2.0
        if high > low:
            factor = (high / low) ** ROOM
        return Axis(name, low / factor, high * factor, ticks, is_log=True)
    room = 0.5
    if is_connected:
        room = ROOM * (high - low) or 1.0
    return Axis(name, low - room, high + room, ticks)


def factor_axis(factor: Factor) -> tuple[dict[Setting, float], bool]:
    """Return the positions of a factor's levels, and whether the axis is logarithmic.

    The positions are the levels themselves if they are numbers that a float can distinguish, else 0, 1, 2, ...
    """
    ordinal: dict[Setting, float] = {}
    numeric: dict[Setting, float] = {}
    for index, level in enumerate(factor.levels):
        ordinal[level] = float(index)
        if isinstance(level, int | float):
            numeric[level] = float(level)
    if not factor.is_numeric or len(set(numeric.values())) < len(numeric):
        return ordinal, False
    return numeric, factor.option in LOGARITHMIC and all(x > 0 for x in numeric.values())
