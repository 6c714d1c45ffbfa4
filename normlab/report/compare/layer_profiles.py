"""Layer profiles: every core statistic at a few steps, of each run, or of each cell on a page of many runs.

Only the core tier is included, because other tiers are measured at other steps.

Shapes: S steps, N columns, L blocks; the L + 2 layers are the embeddings, the blocks and the head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normlab.errors import StoreError
from normlab.report.cells import Cell
from normlab.report.compare.curves import pack
from normlab.report.histories import History, NothingMeasured, histories, read_statistics
from normlab.stats.profiles import Array
from normlab.stats.registry import STATISTICS
from normlab.stats.statistic import CORE
from normlab.store.query import NO_RUN_STATES
from normlab.store.record import RunRecord

MAX_RUNS = 50
"""Maximum number of runs with one profile each; on a larger page each cell has the mean of its runs."""
MAX_STEPS, MIN_STEPS = 32, 6
MAX_BYTES = 2_500_000
"""Limits on the measured steps of a profile; it has fewer than `MAX_STEPS` if all profiles exceed `MAX_BYTES`."""
NO_STATISTICS = "no statistics on record"
"""The note of a run without statistics."""

MAX_DEPTH = 10_000
"""Most blocks of a model; a record of more is damaged and is left out."""
DESCRIPTION_KEYS = ("formula", "unit", "of", "question", "source")

Problem = tuple[int, str]
"""The index of a run, and the reason why its statistics are missing."""
Histories = Mapping[tuple[str, str], History]
"""Each statistic of a run over its measured steps, by statistic and site."""


class ProfileColumns(NamedTuple):
    """The N columns of a profile."""

    depth: int
    columns: tuple[tuple[str, str, tuple[int | None, ...]], ...]
    """Statistic, site and layers. Layer 0 is the embeddings, L + 1 the head; None: one number per step."""

    @property
    def width(self) -> int:
        """The number of columns, N."""
        return sum(len(layers) for _, _, layers in self.columns)


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """The statistics of a run, or the mean over several runs."""

    label: str
    runs: list[int]
    cell: int | None
    layout: ProfileColumns
    warmup: int | None
    """Updates until the peak learning rate."""
    steps: NDArray[np.int64]
    """(S,)."""
    values: Array
    """(S, N)."""


def layer_profiles(
    records: Sequence[RunRecord], cells: Sequence[Cell], warmups: Sequence[int | None]
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the layer profiles of the page, and the runs that have none.

    Args:
        records: The runs.
        cells: Their cells.
        warmups: The warm-up of each run, updates.
    """
    problems: list[Problem] = []
    per_run = len(records) <= MAX_RUNS
    profiles = limit_size((run_profiles if per_run else _cell_profiles)(records, cells, warmups, problems), MAX_BYTES)
    layouts = list(dict.fromkeys(profile.layout for profile in profiles))
    names = dict.fromkeys(name for layout in layouts for name, _, _ in layout.columns)
    return {
        "of": "run" if per_run else "cell",
        "layouts": [layout._asdict() for layout in layouts],
        "units": [_as_json(profile, layouts.index(profile.layout)) for profile in profiles],
        "statistics": {name: {key: getattr(STATISTICS[name], key) for key in DESCRIPTION_KEYS} for name in names},
    }, problems


def choose_steps(steps: NDArray[np.int64], warmup: int | None, most: int) -> NDArray[np.int64]:
    """Return at most `most` steps, with the first, the first after warm-up and the last.

    Args:
        steps: (S,), rising.
        warmup: Number of warm-up updates; None if unknown.
        most: 3 or more.
    """
    if len(steps) <= most:
        return steps
    after = index_after_warmup(steps, warmup)
    indices = np.round(np.linspace(0, len(steps) - 1, most)).astype(int)
    if after is not None and after not in indices:
        nearest = np.abs(indices[1:-1] - after).argmin() + 1
        indices[nearest] = after
    return steps[np.unique(indices)]


def index_after_warmup(steps: NDArray[np.int64], warmup: int | None) -> int | None:
    """Return the index of the first step at or after the end of warm-up, or None."""
    if warmup is None or not len(steps) or steps[-1] < warmup:
        return None
    return int(np.searchsorted(steps, warmup))


def limit_size(profiles: Sequence[LayerProfile], max_bytes: int) -> list[LayerProfile]:
    """Return the profiles with as many steps as fit into `max_bytes`, at least `MIN_STEPS`."""

    def size(most: int) -> int:
        return sum(4 * min(len(profile.steps), most) * profile.layout.width for profile in profiles)

    most = next((most for most in range(MAX_STEPS, MIN_STEPS, -1) if size(most) <= max_bytes), MIN_STEPS)
    limited = []
    for profile in profiles:
        kept = np.isin(profile.steps, choose_steps(profile.steps, profile.warmup, most))
        limited.append(dataclasses.replace(profile, steps=profile.steps[kept], values=profile.values[kept]))
    return limited


def run_profiles(
    records: Sequence[RunRecord], cells: Sequence[Cell], warmups: Sequence[int | None], problems: list[Problem]
) -> list[LayerProfile]:
    """Return a profile for each run with statistics; append the others to `problems`."""
    cell_of = {run.record.folder.path: index for index, cell in enumerate(cells) for run in cell.runs}
    profiles: list[LayerProfile] = []
    for index, record in enumerate(records):
        if measured := _read_histories(index, record, problems):
            layout, run = measured
            profiles.append(
                _mean_profile(record.name, {index: run}, cell_of.get(record.folder.path), layout, warmups[index])
            )
    return profiles


def _cell_profiles(
    records: Sequence[RunRecord], cells: Sequence[Cell], warmups: Sequence[int | None], problems: list[Problem]
) -> list[LayerProfile]:
    """Return the profiles of each cell at its best learning rate: a mean over the runs with equal columns."""
    index_of = {record.folder.path: index for index, record in enumerate(records)}

    def profiles_of(number: int, cell: Cell) -> Iterator[LayerProfile]:
        groups: dict[ProfileColumns, dict[int, Histories]] = {}
        for run in cell.runs_at(cell.best_lr):
            index = index_of[run.record.folder.path]
            if measured := _read_histories(index, run.record, problems):
                layout, run_histories = measured
                groups.setdefault(layout, {})[index] = run_histories
        depths = {layout.depth for layout in groups}
        for count, (layout, runs) in enumerate(groups.items(), start=1):
            suffix = f", depth {layout.depth}" if len(depths) == len(groups) else f", depth {layout.depth} ({count})"
            label = cell.name + (suffix if len(groups) > 1 else "")
            known = [warmup for index in runs if (warmup := warmups[index]) is not None]
            yield _mean_profile(label, runs, number, layout, max(known, default=None))

    return [profile for number, cell in enumerate(cells) for profile in profiles_of(number, cell)]


def _read_histories(index: int, record: RunRecord, problems: list[Problem]) -> tuple[ProfileColumns, Histories] | None:
    """Return the columns and core statistics of a run, or None and a line in `problems`."""
    if record.state in NO_RUN_STATES:
        return None
    messages: list[str] = []
    measured: dict[tuple[str, str], History] = {}
    depth = 0
    try:
        parts = [part for part in read_statistics(record.folder, messages) if part.layout.depth <= MAX_DEPTH]
        depth = max((part.layout.depth for part in parts), default=0)
        measured = {(name, each.site): each for name, each in histories(parts, CORE) if each.has_values}
    except NothingMeasured:
        messages = [NO_STATISTICS]
    except StoreError as error:
        messages.append(str(error))
    problems += [(index, message) for message in messages or ([] if measured else [NO_STATISTICS])]
    columns = ((*key, (None,) if each.is_per_step else tuple(each.layers)) for key, each in measured.items())
    return (ProfileColumns(depth, tuple(columns)), measured) if measured else None


def _mean_profile(
    label: str, runs: Mapping[int, Histories], cell: int | None, layout: ProfileColumns, warmup: int | None
) -> LayerProfile:
    """Return a profile: the mean over runs of finite values, at up to `MAX_STEPS` steps."""
    measured = np.unique(np.concatenate([each.steps for run in runs.values() for each in run.values()]))
    steps = choose_steps(measured, warmup, MAX_STEPS)
    tables = [_values_at(steps, run, layout) for run in runs.values()]
    values = tables[0] if len(tables) == 1 else mean_of_finite(np.stack(tables))
    return LayerProfile(label, list(runs), cell, layout, warmup, steps, values)


def _values_at(steps: NDArray[np.int64], run: Histories, layout: ProfileColumns) -> Array:
    """Return the values of a run at some steps, (S, N); NaN for a step that was not measured."""
    tables: list[Array] = []
    for name, site, layers in layout.columns:
        history = run[name, site]
        measured = np.asarray(history.steps)
        rows = np.searchsorted(measured, steps, side="right") - 1
        is_measured = (rows >= 0) & (measured[rows] == steps)
        # One number per step is an array (S,), or the last layer of (S, L + 2).
        columns = [-1 if layer is None else layer for layer in layers]
        values = history.values[:, None] if history.values.ndim == 1 else history.values[:, columns]
        tables.append(np.where(is_measured[:, None], values[rows], np.nan))
    return np.hstack(tables)


def mean_of_finite(tables: Array) -> Array:
    """Return the mean of the finite values over the first axis; NaN if there is none."""
    finite = np.isfinite(tables)
    counts = finite.sum(axis=0)
    return np.where(counts > 0, np.where(finite, tables, 0).sum(axis=0) / np.maximum(counts, 1), np.nan)


def _as_json(profile: LayerProfile, layout: int) -> dict[str, Any]:
    return {
        "label": profile.label,
        "runs": profile.runs,
        "cell": profile.cell,
        "layout": layout,
        "steps": profile.steps.tolist(),
        "after_warmup": index_after_warmup(profile.steps, profile.warmup),
        "values": pack(profile.values),
    }
