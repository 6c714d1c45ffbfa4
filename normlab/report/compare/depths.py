"""What happened inside the runs, block by block, at a few steps of each: of every run, or where they are many of cells.

Shapes: S steps, N numbers a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normlab.errors import StoreError
from normlab.report.compare.curves import packed
from normlab.report.compare.find import ABSENT
from normlab.report.compare.layers import Layers, layers_of, measured_in, table, told
from normlab.report.groups import Cell
from normlab.report.histories import NothingMeasured, read_statistics
from normlab.stats.profiles import Array, Profiles
from normlab.store.query import Entry

MOST_RUNS = 50
"""Runs that are shown each by itself; of more, the mean of each cell."""
MOST_STEPS, FEWEST_STEPS = 32, 6
"""Measured steps of each: so many, and fewer where all of it would be more than `MOST_BYTES`."""
MOST_BYTES = 2_500_000
UNMEASURED = "nothing was measured inside it"
"""What is said of a run that has no statistics, and should have none."""

Problem = tuple[int, str]
"""A run by its index, and why it is not shown."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A run, or the mean of several."""

    label: str
    runs: list[int]
    cell: int | None
    layers: Layers
    warmup: int | None
    """Updates until the peak learning rate."""
    steps: NDArray[np.int64]
    """(S,)."""
    counts: NDArray[np.int64]
    """(S,): how many runs were measured at the step."""
    values: Array
    """(S, N)."""


def profiles(
    entries: Sequence[Entry], cells: Sequence[Cell], warmups: Sequence[int | None]
) -> tuple[dict[str, Any], list[Problem]]:
    """Every statistic of the step at a few steps, and the runs of which there is none, with why.

    Args:
        entries: The runs.
        cells: Those of them that are in cells.
        warmups: Updates of each run's warm-up.
    """
    problems: list[Problem] = []
    of = "run" if len(entries) <= MOST_RUNS else "cell"
    found = _of_runs if of == "run" else _of_cells
    units = within(list(found(entries, cells, warmups, problems)), MOST_BYTES)
    layouts = list(dict.fromkeys(unit.layers for unit in units))
    return {
        "of": of,
        "layouts": [
            {"depth": layout.depth, "columns": [[name, site, list(places)] for name, site, places in layout.columns]}
            for layout in layouts
        ],
        "units": [_plain(unit, layouts.index(unit.layers)) for unit in units],
        "statistics": told(layouts),
    }, problems


def choose(steps: NDArray[np.int64], warmup: int | None, most: int) -> NDArray[np.int64]:
    """So many steps at most: the first, the first at or after the end of warm-up, the last; others evenly between.

    Args:
        steps: (S,), rising.
        warmup: Updates of warm-up, if they are known.
        most: 3 or more.
    """
    if len(steps) <= most:
        return steps
    after = after_warmup(steps, warmup)
    picked = np.round(np.linspace(0, len(steps) - 1, most)).astype(int)
    if after is not None and after not in picked:
        inner = np.abs(picked[1:-1] - after).argmin() + 1
        picked[inner] = after
    return steps[np.unique(picked)]


def after_warmup(steps: NDArray[np.int64], warmup: int | None) -> int | None:
    """Where the first step at or after the end of warm-up is; None where there is none, or no warm-up is known."""
    if warmup is None or not len(steps) or steps[-1] < warmup:
        return None
    return int(np.searchsorted(steps, warmup))


def within(units: Sequence[Unit], most_bytes: int) -> list[Unit]:
    """Units with as many steps as fit, `FEWEST_STEPS` at least."""
    size = lambda most: sum(4 * min(len(unit.steps), most) * unit.layers.width for unit in units)  # noqa: E731
    most = next((most for most in range(MOST_STEPS, FEWEST_STEPS, -1) if size(most) <= most_bytes), FEWEST_STEPS)
    return [_thinned(unit, most) for unit in units]


def _thinned(unit: Unit, most: int) -> Unit:
    kept = np.isin(unit.steps, choose(unit.steps, unit.warmup, most))
    return Unit(
        unit.label, unit.runs, unit.cell, unit.layers, unit.warmup,
        unit.steps[kept], unit.counts[kept], unit.values[kept],
    )  # fmt: skip


def _of_runs(
    entries: Sequence[Entry], cells: Sequence[Cell], warmups: Sequence[int | None], problems: list[Problem]
) -> Iterator[Unit]:
    cell_of = {run.entry.folder.path: index for index, cell in enumerate(cells) for run in cell.runs}
    for index, entry in enumerate(entries):
        if parts := _read(index, entry, problems):
            yield _mean(entry.name, {index: parts}, cell_of.get(entry.folder.path), layers_of(parts), warmups[index])


def _of_cells(
    entries: Sequence[Entry], cells: Sequence[Cell], warmups: Sequence[int | None], problems: list[Problem]
) -> Iterator[Unit]:
    """The means over the runs at each cell's best learning rate that have the same numbers."""
    index_of: Mapping[Path, int] = {entry.folder.path: index for index, entry in enumerate(entries)}
    for number, cell in enumerate(cells):
        groups: dict[Layers, dict[int, list[Profiles]]] = {}
        for run in cell.runs_at(cell.best_lr):
            index = index_of[run.entry.folder.path]
            if parts := _read(index, run.entry, problems):
                groups.setdefault(layers_of(parts), {})[index] = parts
        depths = {layers.depth for layers in groups}
        for count, (layers, runs) in enumerate(groups.items(), start=1):
            apart = f", depth {layers.depth}" if len(depths) == len(groups) else f", depth {layers.depth} ({count})"
            known = [warmup for index in runs if (warmup := warmups[index]) is not None]
            yield _mean(cell.name + (apart if len(groups) > 1 else ""), runs, number, layers, max(known, default=None))


def _read(index: int, entry: Entry, problems: list[Problem]) -> list[Profiles]:
    """What was measured in the step itself; empty where there is none, and that is said."""
    if entry.state in ABSENT:
        return []
    told: list[str] = []
    parts: list[Profiles] = []
    try:
        parts = measured_in(read_statistics(entry.folder, told))
    except NothingMeasured:
        told = [UNMEASURED]
    except StoreError as error:
        told.append(str(error))
    problems += [(index, problem) for problem in told or ([] if parts else [UNMEASURED])]
    return parts


def _mean(
    label: str, runs: Mapping[int, Sequence[Profiles]], cell: int | None, layers: Layers, warmup: int | None
) -> Unit:
    """The mean over runs of what is finite, at the steps that are kept of all that were measured."""
    there = [np.unique(np.concatenate([part.steps for part in parts])) for parts in runs.values()]
    steps = choose(np.unique(np.concatenate(there)), warmup, MOST_STEPS)
    counts = np.sum([np.isin(steps, own) for own in there], axis=0)
    tables = [table(parts, layers, steps) for parts in runs.values()]
    values = tables[0] if len(tables) == 1 else _mean_of_finite(np.stack(tables))
    return Unit(label, list(runs), cell, layers, warmup, steps, counts, values)


def _mean_of_finite(tables: Array) -> Array:
    """Over the first axis; NaN where none is finite."""
    finite = np.isfinite(tables)
    counts = finite.sum(axis=0)
    return np.where(counts > 0, np.where(finite, tables, 0).sum(axis=0) / np.maximum(counts, 1), np.nan)


def _plain(unit: Unit, layout: int) -> dict[str, Any]:
    return {
        "label": unit.label,
        "runs": unit.runs,
        "cell": unit.cell,
        "layout": layout,
        "steps": unit.steps.tolist(),
        "init": 0,
        "warmup": after_warmup(unit.steps, unit.warmup),
        "end": len(unit.steps) - 1,
        "n": len(unit.runs),
        "counts": unit.counts.tolist(),
        "values": packed(unit.values),
    }
