"""A run's statistics at some of its steps as one array, with a description of its columns.

Only the core tier is included, measured or derived: other tiers have steps of their own.

Shapes: S steps, N columns, L blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from normlab.errors import StatisticsError
from normlab.stats.profiles import Array, Group, Layout, Profiles
from normlab.stats.registry import STATISTICS, values_of
from normlab.stats.statistic import CORE

MAX_DEPTH = 10_000
"""A record of more blocks than this is taken to be damaged."""
DESCRIPTION_KEYS = ("formula", "unit", "of", "question", "source")


class StatisticColumns(NamedTuple):
    """The columns of one statistic at one site."""

    statistic: str
    site: str
    layers: tuple[int | None, ...]
    """Of the L + 2 layers: 0 the embeddings, L + 1 the head; (None,) for one number per step."""


class TableLayout(NamedTuple):
    """The N columns of a run's table."""

    depth: int
    columns: tuple[StatisticColumns, ...]

    @property
    def width(self) -> int:
        """The number of columns, N."""
        return sum(len(column.layers) for column in self.columns)


def layout_of(parts: Sequence[Profiles]) -> TableLayout:
    """Return the columns of a run over all parts of its record, in the order of `list stats`."""
    layers: dict[tuple[str, str], set[int | None]] = {}
    for part in parts:
        for column in _columns(part.layout):
            layers.setdefault((column.statistic, column.site), set()).update(column.layers)
    order = {name: index for index, name in enumerate(STATISTICS)}
    keys = sorted(layers, key=lambda key: order[key[0]])
    depth = max((part.layout.depth for part in parts), default=0)
    columns = (StatisticColumns(*key, tuple(sorted(layers[key], key=lambda layer: layer or 0))) for key in keys)
    return TableLayout(depth, tuple(columns))


def core_parts(profiles: Sequence[Profiles]) -> list[Profiles]:
    """Return the parts of a record that hold core statistics."""
    return [part for part in profiles if part.layout.depth <= MAX_DEPTH and _columns(part.layout)]


def table(parts: Sequence[Profiles], layout: TableLayout, steps: NDArray[np.int64]) -> Array:
    """Return the values at some steps, (S, N); NaN for a step or a column that was not measured."""
    values: Array = np.full((len(steps), layout.width), np.nan)
    keys = [(column.statistic, column.site, layer) for column in layout.columns for layer in column.layers]
    number_of = {key: number for number, key in enumerate(keys)}
    for part in parts:
        _, rows, measured = np.intersect1d(steps, part.steps, return_indices=True)
        if not len(rows):
            continue
        selected = Profiles(part.layout, part.steps[measured], part.values[measured])
        by_name = {name: _values(selected, name) for name in {column.statistic for column in _columns(part.layout)}}
        for name, site, layers in _columns(part.layout):
            at_site = by_name[name][site]
            for layer in layers:
                # One number per step is an array (S,), or the last layer of (S, L + 2).
                column = at_site if at_site.ndim == 1 else at_site[:, -1 if layer is None else layer]
                values[rows, number_of[name, site, layer]] = column
    return values


def describe_statistics(layouts: Sequence[TableLayout]) -> dict[str, dict[str, str]]:
    """Return the description of each statistic that has a column."""
    names = dict.fromkeys(column.statistic for layout in layouts for column in layout.columns)
    return {name: {key: getattr(STATISTICS[name], key) for key in DESCRIPTION_KEYS} for name in names}


def _columns(layout: Layout) -> tuple[StatisticColumns, ...]:
    return _cached_columns(layout.depth, layout.groups, tuple(layout.families.items()))


@cache  # many runs have the same layout
def _cached_columns(
    depth: int, groups: tuple[Group, ...], families: tuple[tuple[str, str], ...]
) -> tuple[StatisticColumns, ...]:
    """Find the columns that a layout provides by computing every statistic from a row of ones."""
    layout = Layout(depth, groups, dict(families))
    ones = Profiles(layout, np.zeros(1, np.int64), np.ones((1, layout.width)))
    columns: list[StatisticColumns] = []
    for statistic in STATISTICS.values():
        for site, values in _values(ones, statistic.name).items() if statistic.tier == CORE else ():
            per_step = values.ndim == 1 or statistic.of == "model"
            layers = (None,) if per_step else tuple(np.flatnonzero(~np.isnan(values[0])).tolist())
            if layers:
                columns.append(StatisticColumns(statistic.name, site, layers))
    return tuple(columns)


def _values(profiles: Profiles, name: str) -> dict[str, Array]:
    """Return a statistic by site; empty if it was not measured, or at sites that this version does not know."""
    try:
        with np.errstate(all="ignore"):
            return values_of(profiles, name)
    except (StatisticsError, ValueError):
        return {}
