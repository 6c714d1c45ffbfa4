"""Downsampling of a curve for the page: few points, and every extreme at its step.

Shapes: S points of a record, B buckets.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POINTS, MIN_POINTS, TOTAL_POINTS = 2_000, 400, 80_000
"""Points of one curve for few runs and for many; points of all runs together above which each has fewer."""
MAX_TIMES, MIN_TIMES, TOTAL_TIMES = 200, 20, 10_000
"""Time stamps of one run, bounded in the same way."""
FLOAT32_MAX = float(np.finfo(np.float32).max)

SAMPLING = (
    "a longer curve is cut into buckets of consecutive steps; each bucket keeps its minimum and maximum at their "
    "steps, so no spike is lost; the first and last point and both ends of each non-finite stretch are kept too; means "
    "are over the finite points of a bucket"
)
"""The downsampling, for captions."""


def points_per_curve(runs: int) -> int:
    """Return the most points of a curve on a page of `runs` runs."""
    return min(MAX_POINTS, max(MIN_POINTS, TOTAL_POINTS // max(runs, 1)))


def times_per_run(runs: int) -> int:
    """Return the most time stamps of a run on a page of `runs` runs."""
    return min(MAX_TIMES, max(MIN_TIMES, TOTAL_TIMES // max(runs, 1)))


def sample(values: NDArray[np.float64], most: int) -> tuple[NDArray[np.intp], int]:
    """Return the indices of the points to keep, rising, and the number of points of a bucket.

    A curve of at most `most` points is kept, with buckets of 1. A longer one keeps, of each of B = (most - 2) / 2
    buckets, the least and the largest finite value; its first and last point; and the first and last point of every
    non-finite stretch, which can exceed `most`.

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
    """Return a curve as JSON values, or None without points.

    Keys: `n`, the points of the record; `steps` (uint32) and `values` (float32) of the kept points; for a downsampled
    curve also `mean_steps` and `means` (float32) of each bucket with a finite point. Arrays are packed by `pack`.

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
    """Return the bytes of an array in base64; a finite value beyond float32 becomes the largest float32."""
    if dtype == "<f4":
        values = np.where(np.isfinite(values), np.clip(values, -FLOAT32_MAX, FLOAT32_MAX), values)
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


def _in_buckets(values: NDArray[Any], size: int, filler: Any) -> NDArray[Any]:
    """Return values as (B, size), the last bucket filled up."""
    missing = -len(values) % size
    return np.concatenate([values, np.full(missing, filler, values.dtype)]).reshape(-1, size)
