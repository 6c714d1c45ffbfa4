"""What was measured inside a run, read from its record: every statistic over training, whatever parts it lies in.

Shapes: S measured steps, L blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from normlab.errors import ConfigError, StatisticsError, StoreError, unknown
from normlab.stats import options  # noqa: F401  (with it every statistic is known)
from normlab.stats.profiles import Array, Profiles, join, later_half
from normlab.stats.statistic import STATISTICS, layers_of, values_of
from normlab.store.runs import RunFolder
from normlab.store.schema import DAMAGED, DIVERGED, FINISHED, RUNNING, number

SPIKES = "spikes"
"""The word for what is counted in every step's loss and gradient norm."""


class NothingMeasured(StoreError):
    """A run that has no statistics, and should have none."""


class History(NamedTuple):
    """A statistic at one site, at every step that it was measured at."""

    site: str
    steps: list[int]
    values: Array
    """(S, L + 2), or (S,)."""
    places: list[int]
    """Where it is, of the L + 2."""
    counts: list[int] | None = None
    """(S,): how many measured steps each value averages; None for a statistic that does not average."""
    notes: tuple[str, ...] = ()
    """What to know before these values are believed."""


def read_statistics(folder: RunFolder, problems: list[str]) -> list[Profiles]:
    """What was measured in a run, part by part.

    Args:
        folder: The run's.
        problems: Is told of what is damaged or missing, a line each.

    Raises:
        NothingMeasured: It was not asked for, or not yet.
        StoreError: It is gone, or cannot be read.
    """
    try:  # before the rows: what it counts on is among them
        state, status = folder.observe()
    except StoreError:
        state, status = DAMAGED, {}
    arrays, unread = folder.arrays, list[str]()
    described = list(arrays.parts(unread))
    # A row that is being written is half there for a moment.
    torn = [] if state == RUNNING else [part.path for _, part in described if part.torn()]
    unread += [f"{path}: half a row stands at its end, and is left out" for path in torn]
    found: list[Profiles] = []
    for tier in dict.fromkeys(tier for tier, _ in described):
        parts, damaged = arrays.read(tier)
        if damaged:
            unread.append(f"{arrays.path}: damaged rows, left out: {damaged}")
        found += [part for part in parts if len(part.steps)]
    # What was measured before it is on the disk, and stays there when the run goes on.
    saved = _whole(status.get("checkpoint"))
    missing = arrays.told_missing(saved)
    problems += unread + (missing if found else [])
    if found:
        return found
    ended = state in (FINISHED, DIVERGED)
    if unread or missing or (described and (saved or ended)) or (saved and _begun_with_statistics(folder)):
        raise StoreError(f"{arrays.path}: the rows of run {folder.run_id} are gone; put back a copy")
    raise NothingMeasured(
        f"run {folder.run_id} has no statistics: it was trained with stats=off, or has not measured a step yet"
    )


def _whole(value: object) -> int:
    """How many updates a status says; 0 where it says none."""
    known = number(value)
    return int(known) if known is not None and math.isfinite(known) else 0


def _begun_with_statistics(folder: RunFolder) -> bool:
    """Whether a run measured its first step."""
    try:
        run = folder.run()
        # The steps that it took over from another may not have been measured.
        return run["config"]["stats"]["every"] is not None and "continued_from" not in run
    except (StoreError, KeyError, TypeError):
        return False


def history(profiles: Sequence[Profiles], name: str) -> list[History]:
    """A statistic over all parts of a run, in the order of their steps.

    Raises:
        ConfigError: There is no statistic of that name.
        StatisticsError: It was not measured.
    """
    if name not in STATISTICS and not any(name in part for part in profiles):
        raise ConfigError(unknown("statistic", name, [*STATISTICS, SPIKES]))
    statistic = STATISTICS.get(name)
    needs = (name, *statistic.needs) if statistic else (name,)
    found: dict[str, list[tuple[Profiles, Array]]] = {}
    places: dict[str, set[int]] = {}
    problem: StatisticsError | None = None
    # A run's parts can differ in other statistics; what averages over steps reads across them.
    for part in join(part.select(needs) for part in profiles):
        try:
            for site, values in values_of(part, name).items():
                found.setdefault(site, []).append((part, values))
            for site, there in layers_of(part, name).items():
                places.setdefault(site, set()).update(np.flatnonzero(there).tolist())
        except StatisticsError as error:
            problem = error
    if not found:
        assert problem is not None
        raise problem
    return [_joined(name, site, parts, sorted(places.get(site, ()))) for site, parts in found.items()]


def _joined(name: str, site: str, parts: Sequence[tuple[Profiles, Array]], places: list[int]) -> History:
    steps = np.concatenate([part.steps for part, _ in parts])
    order = np.argsort(steps, kind="stable")
    values = np.concatenate([values for _, values in parts])[order]
    statistic, counts, notes = STATISTICS.get(name), None, list[str]()
    if statistic is not None and statistic.averaged:
        sizes = [[1] * len(part.steps) if name in part else later_half(len(part.steps)) for part, _ in parts]
        counts = np.concatenate(sizes)[order].tolist()
        if any(name in part for part, _ in parts):
            notes.append("n = 1: recorded by an older normlab as ratios of single steps, which scatter widely")
    if statistic is not None and statistic.undefined:
        there = values[:, places] if values.ndim == 2 else values
        if np.isnan(there).any():
            notes.append(f"nan: {statistic.undefined}")
    return History(site, steps[order].tolist(), values, places, counts, tuple(notes))
