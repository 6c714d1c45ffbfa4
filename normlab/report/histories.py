"""Read the statistics of a run from its record, each over all measured steps.

A run starts a new part of its record when its set of statistics changes; a history joins the parts.

Shapes: S measured steps, L blocks; the L + 2 layers are the embeddings, the blocks and the head.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from normlab.base.errors import ConfigError, StatisticsError, StoreError, unknown
from normlab.catalogue.statistics.derived import later_half_sizes
from normlab.catalogue.statistics.profiles import Array, Profiles, join
from normlab.catalogue.statistics.registry import STATISTICS, layers_of, values_of
from normlab.store.format import COMPLETED_STATES, RUNNING
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder

SPIKES = "spikes"
"""The name that `normlab inspect` accepts for the spikes of the loss and the gradient norm."""


class NothingMeasured(StoreError):
    """A complete record of a run that measured no statistics."""


class History(NamedTuple):
    """A statistic at one site, at every step where it was measured."""

    site: str
    steps: list[int]
    values: Array
    """(S, L + 2), or (S,)."""
    layers: list[int]
    """The layers with values, 0 to L + 1."""
    counts: list[int] | None = None
    """The number of measured steps that each value averages, (S,); None for a statistic that is not averaged."""
    notes: tuple[str, ...] = ()
    is_per_step: bool = False
    """Whether the statistic is one number per step, of the model or of the head."""


def read_statistics(folder: RunFolder, problems: list[str], name: str | None = None) -> list[Profiles]:
    """Return the statistics of a run, part by part; `problems` receives a line for each damaged or missing part.

    With a name, only the files that may hold this statistic, or what it is derived from, are read.

    Raises:
        ConfigError: The statistic is unknown.
        NothingMeasured: Statistics are off, or no step has been measured yet.
        StatisticsError: The run measured others only.
        StoreError: The statistics are missing or cannot be read.
    """
    tiers: set[str] | None = None
    if name is not None:
        tiers = _tiers_of(name)
    # Read first, so that the arrays are at least as new as the status.
    run = RunRecord.load(folder)
    arrays = folder.statistics
    unreadable: list[str] = []
    stored_parts = list(arrays.parts(unreadable))
    # A running process may be in the middle of a row.
    if run.state != RUNNING:
        for _, part in stored_parts:
            if part.has_torn_row():
                unreadable.append(f"{part.file.path}: incomplete last row, left out")
    measured: list[Profiles] = []
    for tier in dict.fromkeys(tier for tier, _ in stored_parts):
        if tiers is not None and tier not in tiers:
            continue
        parts, damaged = arrays.read(tier)
        if damaged:
            unreadable.append(f"{arrays.path}: damaged rows, left out: {damaged}")
        measured += [part for part in parts if len(part.steps)]
    problems += filter(None, [*unreadable, folder.statistics_problem(tiers)])
    if measured:
        return measured
    if tiers is not None and stored_parts and not unreadable:
        raise StatisticsError(f"{name}: was not measured")
    # A run that starts from another one may end before its first measured step.
    is_measured = run.config.stats.every and run.config.train.start_from is None
    if unreadable or (is_measured and (run.status.step or run.state in COMPLETED_STATES)):
        raise StoreError(f"{arrays.path}: has no intact statistics of run {folder.run_id}; restore them from a copy")
    raise NothingMeasured(
        f"run {folder.run_id} has no statistics: it was trained with stats=off, or has not measured a step yet"
    )


def _tiers_of(name: str) -> set[str]:
    """Return the tiers of a statistic, or of those that it is derived from."""
    if name not in STATISTICS:
        raise ConfigError(unknown("statistic", name, [*STATISTICS, SPIKES]))
    return {STATISTICS[needed].tier for needed in STATISTICS[name].needs or (name,)}


def histories(profiles: Sequence[Profiles]) -> Iterator[tuple[str, History]]:
    """Yield each measured or derived statistic with its history at each site."""
    for name in STATISTICS:
        # The parts of a damaged record may overflow or differ in depth.
        parts: list[History] = []
        with np.errstate(all="ignore"), contextlib.suppress(StatisticsError, ValueError):
            parts = history(profiles, name)
        for part in parts:
            yield name, part


def history(profiles: Sequence[Profiles], name: str) -> list[History]:
    """Return the history of a statistic at each site, sorted by step.

    Raises:
        ConfigError: The statistic is unknown.
        StatisticsError: The statistic was not measured.
    """
    if name not in STATISTICS:
        raise ConfigError(unknown("statistic", name, [*STATISTICS, SPIKES]))
    needs = (name, *STATISTICS[name].needs)
    by_site: dict[str, list[tuple[Profiles, Array]]] = {}
    layers: dict[str, set[int]] = {}
    problem: StatisticsError | None = None
    # Parts that differ only in other statistics are joined, so that a mean over steps continues across them.
    for part in join(part.select(needs) for part in profiles):
        try:
            for site, values in values_of(part, name).items():
                by_site.setdefault(site, []).append((part, values))
            for site, has_value in layers_of(part, name).items():
                layers.setdefault(site, set()).update(np.flatnonzero(has_value).tolist())
        except StatisticsError as error:
            problem = error
    if not by_site:
        assert problem is not None
        raise problem
    joined: list[History] = []
    for site, parts in by_site.items():
        joined.append(_join_parts(name, site, parts, sorted(layers.get(site, ()))))
    return joined


def _join_parts(name: str, site: str, parts: Sequence[tuple[Profiles, Array]], layers: list[int]) -> History:
    steps = np.concatenate([part.steps for part, _ in parts])
    # Stable, so that of two parts with the same step the later one stays behind, as in `join`.
    order = np.argsort(steps, kind="stable")
    values = np.concatenate([values for _, values in parts])[order]
    statistic, counts, notes = STATISTICS[name], None, ()
    # An average starts again with each part.
    if statistic.averaged:
        counts = np.concatenate([later_half_sizes(len(part.steps)) for part, _ in parts])[order].tolist()
    recorded = values
    if values.ndim == 2:  # layers without the statistic are NaN too
        recorded = values[:, layers]
    if statistic.undefined and np.isnan(recorded).any():
        notes = (f"nan: {statistic.undefined}",)
    is_per_step = values.ndim == 1 or statistic.of == "model"
    return History(site, steps[order].tolist(), values, layers, counts, notes, is_per_step)
