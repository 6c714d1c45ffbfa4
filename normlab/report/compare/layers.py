"""A run's statistics at a few of its steps as one table: which numbers there are of a step, and what they are.

Only those of the step itself (the core tier), measured or derived: others have steps of their own.

Shapes: S steps, N numbers a step, L blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from normlab.errors import StatisticsError
from normlab.stats.profiles import Array, Group, Layout, Profiles
from normlab.stats.statistic import CORE, STATISTICS, sorted_statistics, values_of

DEEPEST = 10_000
"""Blocks beyond which a description is not believed."""
SAID = ("formula", "unit", "of", "question", "source", "merge")
"""What is told of a statistic."""


class Column(NamedTuple):
    """A statistic at one site."""

    statistic: str
    site: str
    places: tuple[int | None, ...]
    """Of the L + 2: 0 the embeddings, L + 1 the head; a single None where there is one number a step."""


class Layers(NamedTuple):
    """What the N numbers of a step are."""

    depth: int
    columns: tuple[Column, ...]

    @property
    def width(self) -> int:
        """N."""
        return sum(len(column.places) for column in self.columns)


def layers_of(parts: Sequence[Profiles]) -> Layers:
    """What there is of the steps of a run, over all the parts that it was measured in; in the order of `list stats`."""
    places: dict[tuple[str, str], set[int | None]] = {}
    for part in parts:
        for column in _columns(part.layout):
            places.setdefault(column[:2], set()).update(column.places)
    order = {one.name: index for index, one in enumerate(sorted_statistics())}
    keys = sorted(places, key=lambda key: order[key[0]])
    depth = max((part.layout.depth for part in parts), default=0)
    return Layers(depth, tuple(Column(*key, tuple(sorted(places[key], key=lambda at: at or 0))) for key in keys))


def measured_in(profiles: Sequence[Profiles]) -> list[Profiles]:
    """The parts that hold numbers of the step itself."""
    return [part for part in profiles if part.layout.depth <= DEEPEST and _columns(part.layout)]


def table(parts: Sequence[Profiles], layers: Layers, steps: NDArray[np.int64]) -> Array:
    """The numbers of some steps, (S, N); NaN where a step or a number was not measured."""
    found: Array = np.full((len(steps), layers.width), np.nan)
    starts = np.cumsum([0, *(len(column.places) for column in layers.columns)])
    where = {
        (column.statistic, column.site, place): start + at
        for column, start in zip(layers.columns, starts, strict=False)
        for at, place in enumerate(column.places)
    }
    for part in parts:
        known, rows, own = np.intersect1d(steps, part.steps, return_indices=True)
        if not len(known):
            continue
        some = Profiles(part.layout, part.steps[own], part.values[own])
        columns = _columns(part.layout)
        numbers = np.concatenate(
            [_numbers(some, name, columns) for name in dict.fromkeys(c.statistic for c in columns)], 1
        )
        to = [where[column.statistic, column.site, place] for column in columns for place in column.places]
        found[np.ix_(rows, to)] = numbers
    return found


def _columns(layout: Layout) -> tuple[Column, ...]:
    return _columns_of(layout.depth, layout.groups, tuple(layout.families.items()))


@cache
def _columns_of(depth: int, groups: tuple[Group, ...], families: tuple[tuple[str, str], ...]) -> tuple[Column, ...]:
    """What can be read of a layout, found out by reading it: many runs have the same."""
    layout = Layout(depth, groups, dict(families))
    ones = Profiles(layout, np.zeros(1, np.int64), np.ones((1, layout.width)))
    columns: list[Column] = []
    for one in sorted_statistics():
        for site, values in _values(ones, one.name).items() if one.tier == CORE else ():
            alone = values.ndim == 1 or one.of == "model"
            there = (None,) if alone else tuple(np.flatnonzero(~np.isnan(values[0])).tolist())
            if there:
                columns.append(Column(one.name, site, there))
    return tuple(columns)


def _values(profiles: Profiles, name: str) -> dict[str, Array]:
    try:
        with np.errstate(all="ignore"):
            return values_of(profiles, name)
    except (StatisticsError, ValueError):  # not measured; or at sites that this normlab does not know it at
        return {}


def _numbers(profiles: Profiles, name: str, columns: Sequence[Column]) -> Array:
    """A statistic at all its sites, a column for each place, (S, n)."""
    values = _values(profiles, name)
    found: list[Array] = []
    for _, site, places in (column for column in columns if column.statistic == name):
        own, at = values[site], [place for place in places if place is not None]
        found.append(own[:, None] if own.ndim == 1 else own[:, at] if at else own[:, -1:])
    return np.concatenate(found, axis=1)


def told(layers: Sequence[Layers]) -> dict[str, dict[str, str]]:
    """Of each statistic that is among them, in words, what it is."""
    names = dict.fromkeys(column.statistic for one in layers for column in one.columns)
    return {name: {word: getattr(STATISTICS[name], word) for word in SAID} for name in names}
