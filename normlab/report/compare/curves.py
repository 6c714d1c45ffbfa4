"""Downsample the curves of the page to few points, with every extreme at its step.

Shapes: S points of a record, B buckets.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POINTS, MIN_POINTS, TOTAL_POINTS = 2_000, 400, 80_000
"""Most points of a curve with few runs and with many; the points of all curves together aim at the total."""
MAX_TIMES, MIN_TIMES, TOTAL_TIMES = 200, 20, 10_000
"""Limits on the time stamps of a run, as for points."""
FLOAT32_MAX = float(np.finfo(np.float32).max)

SAMPLING = (
    "a longer curve is cut into buckets of consecutive steps; each bucket keeps its minimum and maximum at their "
    "steps, so no spike is lost; the first and last point and both ends of each non-finite stretch are kept too; means "
    "are over the finite points of a bucket"
)
"""A description of the downsampling, for captions."""


def points_per_curve(runs: int) -> int:
    """Return the maximum number of points of a curve on a page of `runs` runs."""
    return min(MAX_POINTS, max(MIN_POINTS, TOTAL_POINTS // max(runs, 1)))


def times_per_run(runs: int) -> int:
    """Return the maximum number of time stamps of a run on a page of `runs` runs."""
    return min(MAX_TIMES, max(MIN_TIMES, TOTAL_TIMES // max(runs, 1)))


def sample(values: NDArray[np.float64], most: int) -> tuple[NDArray[np.intp], int]:
    """Return the sorted indices of the points to keep, and the number of points per bucket.

    A curve of at most `most` points is kept, with buckets of 1. A longer curve is cut into B = (most - 2) / 2 buckets.
    It keeps the smallest and the largest finite value of each bucket, its first and last point, and the first and last
    point of every non-finite stretch, which may make more than `most` points.

    Args:
        values: (S,).
        most: The number of points to aim at, 4 or more.
    """
    total = len(values)
    if total <= most:
        return np.arange(total), 1
    size = -(-total // ((most - 2) // 2))
    finite = np.isfinite(values)
    with_values = _in_buckets(finite, size, False).any(axis=1)
    starts = np.arange(0, total, size)[with_values]
    least = starts + _in_buckets(np.where(finite, values, np.inf), size, np.inf)[with_values].argmin(axis=1)
    largest = starts + _in_buckets(np.where(finite, values, -np.inf), size, -np.inf)[with_values].argmax(axis=1)
    changes = np.flatnonzero(np.diff(finite))
    edges = np.concatenate([changes, changes + 1])
    return np.unique(np.concatenate([[0, total - 1], least, largest, edges[~finite[edges]]])), size


def curve(steps: NDArray[np.int64], values: NDArray[np.float64], most: int) -> dict[str, Any] | None:
    """Return a curve as JSON values; None if the record has no points.

    Keys: `n`, the number of points on record; `steps` (uint32) and `values` (float32) of the kept points; for a
    downsampled curve also `mean_steps` and `means` (float32) of each bucket with a finite point. `pack` encodes arrays.

    Args:
        steps: (S,).
        values: (S,).
        most: As in `sample`.
    """
    if not len(steps):
        return None
    kept, size = sample(values, most)
    data: dict[str, Any] = {"n": len(steps), "steps": pack(steps[kept], "<u4"), "values": pack(values[kept])}
    if size > 1:
        finite = np.isfinite(values)
        counts = _in_buckets(finite, size, False).sum(axis=1)
        for key, array in (("mean_steps", steps), ("means", values)):
            sums = _in_buckets(np.where(finite, array, 0.0), size, 0.0).sum(axis=1)
            data[key] = pack(sums[counts > 0] / counts[counts > 0])
    return data


def pack(values: NDArray[Any], dtype: str = "<f4") -> str:
    """Return the bytes of an array in base64; finite values are clipped to the range of float32."""
    if dtype == "<f4":
        values = np.where(np.isfinite(values), np.clip(values, -FLOAT32_MAX, FLOAT32_MAX), values)
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


def _in_buckets(values: NDArray[Any], size: int, filler: Any) -> NDArray[Any]:
    """Return the values as (B, size), with `filler` in the rest of the last bucket."""
    missing = -len(values) % size
    return np.concatenate([values, np.full(missing, filler, values.dtype)]).reshape(-1, size)
