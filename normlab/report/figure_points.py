"""The points of figures: the results of a cell as means over its seeds, which `figure` and `compare` draw.

Final losses have the interval of `summarize`. Curves over training have the mean, and profiles over layers
the median, with the range of the seeds, at the cell's best learning rate.

Shapes: S steps of a run, B bins.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normlab.analysis.cells import Cell
from normlab.base.errors import StoreError
from normlab.report.histories import History, NothingMeasured, histories, read_statistics
from normlab.store.outcome import REGRESSED, STUCK
from normlab.store.record import RunEntry, RunRecord
from normlab.store.series import evaluations_of, series_of, steps_are_gone

SERIES = {
    "val_loss": "validation loss, nats/token",
    "val_loss_ema": "validation loss of the averaged weights, nats/token",
    "train_loss": "training loss, nats/token",
    "grad_norm": "norm of the gradient",
}
"""The curves over training, with the titles of their axes."""
MOMENTS = {"first": 0, "last": -1}
"""The measured steps that have a name, with their index."""
MAX_POINTS = 160

StatisticAtSite = tuple[str, str]
Reader = Callable[[RunRecord, list[str]], Any]


@dataclass(frozen=True, slots=True)
class Point:
    """A mean over seeds with its interval or range, or the number of diverged seeds."""

    x: float
    y: float | None
    """None if a seed diverged."""
    low: float | None = None
    high: float | None = None
    """The interval (None with fewer than three seeds, where it is wider than any figure), or the range of the seeds."""
    seeds: tuple[float, ...] = ()
    """The final losses of the seeds that did not diverge."""
    diverged: int = 0
    n: int = 1
    stuck: int = 0


def loss_point(cell: Cell, lr: float | None, x: float) -> Point:
    """Return the final loss of a cell at a learning rate."""
    final = cell.final_at(lr)
    interval = final.interval
    y = low = high = None
    if interval and not final.diverged:
        y = interval.estimate
    # With two seeds the interval is wider than any figure.
    if interval and interval.design.n > 2:
        low, high = interval.low, interval.high
    return Point(
        x=x,
        y=y,
        low=low,
        high=high,
        seeds=tuple(sorted(final.finite)),
        diverged=final.diverged,
        n=len(final.losses),
        stuck=sum(run.result in (STUCK, REGRESSED) for run in cell.runs_at(lr)),
    )


class ReadCache:
    """Reads the curves and the profiles of each run once, and collects the problems of the runs."""

    def __init__(self) -> None:
        self._read: dict[tuple[Reader, Path], Any] = {}
        self.problems: dict[str, list[str]] = {}
        """What is wrong with each run, by its id."""

    def curves(self, record: RunRecord) -> dict[str, Curve]:
        return self._once(read_curves, record)

    def profiles(self, record: RunRecord) -> dict[StatisticAtSite, History]:
        return self._once(read_profiles, record)

    def _once(self, read: Reader, record: RunRecord) -> Any:
        key = read, record.folder.path
        if key not in self._read:
            self._read[key] = read(record, self.problems_of(record))
        return self._read[key]

    def problems_of(self, record: RunEntry) -> list[str]:
        """Return the list of the problems of a run, which the caller may extend."""
        return self.problems.setdefault(record.run_id, [])


# Curves over training


class Curve(NamedTuple):
    steps: NDArray[np.float64]
    """(S,)."""
    values: NDArray[np.float64]
    """(S,)."""


def read_curves(record: RunRecord, problems: list[str]) -> dict[str, Curve]:
    """Return each of `SERIES` of a run, without a point where the metrics cannot be read.

    `problems` receives a line for each problem of the metrics.
    """
    try:
        read = record.folder.rows()
    except StoreError as error:
        problems.append(str(error))
        return _curves_of([])
    problems += filter(None, [read.problem(record.folder.metrics_path)])
    if record.status.step and not read.rows:
        problems.append(steps_are_gone(record.folder))
    return _curves_of(read.rows)


def _curves_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    trained = series_of([row for row in rows if row["kind"] == "train"])
    measured = evaluations_of(rows)
    losses: list[tuple[int, float]] = []
    averaged: list[tuple[int, float]] = []
    for evaluation in measured:
        losses.append((evaluation.step, evaluation.loss))
        if evaluation.loss_ema is not None:
            averaged.append((evaluation.step, evaluation.loss_ema))
    return {
        "val_loss": _curve(losses),
        "val_loss_ema": _curve(averaged),
        "train_loss": Curve(trained["step"], trained["loss"]),
        "grad_norm": Curve(trained["step"], trained["grad_norm"]),
    }


def _curve(points: Sequence[tuple[int, float]]) -> Curve:
    return Curve(*np.array(points, float).reshape(-1, 2).T)


def mean_curve(curves: Sequence[Curve]) -> list[Point]:
    """Return the mean over the seeds of a cell, with the range of all their values.

    Curves with more than `MAX_POINTS` steps are cut into bins of consecutive steps. The value of a seed in a bin is the
    mean of its finite values; the range is over every finite value, so that no spike is lost.
    """
    if not any(len(curve.steps) for curve in curves):
        return []
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    size = -(-len(steps) // MAX_POINTS)
    count = -(-len(steps) // size)
    means = np.full((len(curves), count), np.nan)
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    # A damaged record may hold values that overflow.
    with np.errstate(all="ignore"):
        for row, curve in enumerate(curves):
            # The last losses of a diverged run are infinite.
            finite = np.isfinite(curve.values)
            values, bins = curve.values[finite], np.searchsorted(steps, curve.steps[finite]) // size
            counts = np.bincount(bins, minlength=count)
            means[row] = np.bincount(bins, values, minlength=count) / counts
            np.minimum.at(low, bins, values)
            np.maximum.at(high, bins, values)
    points: list[Point] = []
    for index in range(count):
        values = [value for value in means[:, index].tolist() if math.isfinite(value)]
        if values:
            x = float(steps[index * size : (index + 1) * size].mean())
            # Divided first, because a sum can overflow.
            mean = math.fsum(value / len(values) for value in values)
            points.append(Point(x, mean, float(low[index]), float(high[index]), n=len(values)))
    return points


# Profiles over layers


def read_profiles(record: RunRecord, problems: list[str]) -> dict[StatisticAtSite, History]:
    """Return each statistic of a run that has layers and was measured.

    `problems` receives a line for each damaged or missing part of the statistics.
    """
    try:
        parts = read_statistics(record.folder, problems)
    except NothingMeasured:
        return {}
    except StoreError as error:
        problems.append(str(error))
        return {}
    profiles: dict[StatisticAtSite, History] = {}
    for name, profile in histories(parts):
        if profile.layers and profile.steps and not profile.is_per_step:
            profiles[name, profile.site] = profile
    return profiles


def median_profile(profiles: Sequence[History], moment: str) -> list[Point]:
    """Return the median and the range over seeds of each layer at a step, or at one of `MOMENTS`.

    The mean would show nothing but the one seed that diverged. A seed that was not measured at the step is left out.
    """
    by_layer: dict[int, list[float]] = {}
    for profile in profiles:
        at = _index_of(moment, profile.steps)
        if at is None:
            continue
        for layer in profile.layers:
            by_layer.setdefault(layer, []).append(float(profile.values[at, layer]))
    points: list[Point] = []
    for layer in sorted(by_layer):
        values = list(filter(math.isfinite, by_layer[layer]))
        if values:
            points.append(Point(layer, statistics.median(values), min(values), max(values), n=len(values)))
    return points


def _index_of(moment: str, steps: Sequence[int]) -> int | None:
    """Return the index of a step, or of one of `MOMENTS`; None if the step was not measured."""
    if moment in MOMENTS:
        return MOMENTS[moment]
    if int(moment) not in steps:
        return None
    return steps.index(int(moment))
