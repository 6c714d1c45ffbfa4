"""A curve of any length as few points as a page needs, with every extreme of it where it was.

Shapes: S points of a record, B buckets.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_POINTS, FEWEST_POINTS = 2_000, 400
"""Points of a curve, of few runs and of many."""
POINTS_OF_ALL = 80_000
"""Points of one curve of every run together, above which each has fewer."""
MOST_MOMENTS, FEWEST_MOMENTS, MOMENTS_OF_ALL = 200, 20, 10_000
"""Moments of a run whose time is told, as for points."""
LARGEST = float(np.finfo(np.float32).max)

SAMPLING = (
    "a curve of more points than are drawn is cut into equal stretches of consecutive steps, and of each the least and "
    "the largest value are kept at their steps, with the first and the last point and both ends of every stretch that "
    "is not finite: no spike is lost; the means are those of the stretches, over their finite points"
)
"""How curves are sampled, in words."""


def points_for(runs: int) -> int:
    """How many points each curve of so many runs may have."""
    return min(MOST_POINTS, max(FEWEST_POINTS, POINTS_OF_ALL // max(runs, 1)))


def moments_for(runs: int) -> int:
    """How many moments of each of so many runs have their time told."""
    return min(MOST_MOMENTS, max(FEWEST_MOMENTS, MOMENTS_OF_ALL // max(runs, 1)))


def sample(values: NDArray[np.float64], most: int) -> tuple[NDArray[np.intp], int]:
    """Which points of a curve are kept, in order, and of how many consecutive points each bucket is made.

    All of them, and a bucket of 1, where they are `most` or fewer. Else of each of B = (most - 2) / 2 equal buckets the
    least and the largest finite value; the first and the last point; and the first and the last of every stretch of
    points that are not finite, which may make it more than `most`.

    Args:
        values: (S,).
        most: How many points are wanted at most, 4 or more.
    """
    total = len(values)
    if total <= most:
        return np.arange(total), 1
    size = -(-total // ((most - 2) // 2))
    finite = np.isfinite(values)
    some = _bucketed(finite, size, False).any(axis=1)
    starts = np.arange(0, total, size)[some]
    least = starts + _bucketed(np.where(finite, values, np.inf), size, np.inf)[some].argmin(axis=1)
    largest = starts + _bucketed(np.where(finite, values, -np.inf), size, -np.inf)[some].argmax(axis=1)
    change = np.flatnonzero(np.diff(finite))
    broken = np.concatenate([change, change + 1])
    return np.unique(np.concatenate([[0, total - 1], least, largest, broken[~finite[broken]]])), size


def curve(steps: NDArray[np.int64], values: NDArray[np.float64], most: int) -> dict[str, Any] | None:
    """A curve as a page has it; None where there is no point.

    `n`, the points of the record; `steps`, uint32, and `values`, float32, of those that are kept; and where not all
    are, `means` and `mean_steps`, float32, of each bucket with a finite point, and `count`, the points of a bucket.
    Arrays are little-endian, in base64. A finite value that no float32 holds is the largest that one does.

    Args:
        steps: (S,).
        values: (S,).
        most: As `sample`.
    """
    if not len(steps):
        return None
    kept, size = sample(values, most)
    found: dict[str, Any] = {"n": len(steps), "steps": packed(steps[kept], "<u4"), "values": packed(values[kept])}
    if size > 1:
        finite = np.isfinite(values)
        counts = _bucketed(finite, size, False).sum(axis=1)
        some = counts > 0
        sums = (_bucketed(np.where(finite, each, 0.0), size, 0.0).sum(axis=1)[some] for each in (steps, values))
        means = [packed(total / counts[some]) for total in sums]
        found |= {"mean_steps": means[0], "means": means[1], "count": size}
    return found


def packed(values: NDArray[Any], kind: str = "<f4") -> str:
    """An array as base64 of its bytes."""
    if kind == "<f4":
        values = np.where(np.isfinite(values), np.clip(values, -LARGEST, LARGEST), values)
    return base64.b64encode(values.astype(kind).tobytes()).decode()


def _bucketed(values: NDArray[Any], size: int, filler: Any) -> NDArray[Any]:
    """(B, size), the last bucket filled up."""
    short = -len(values) % size
    return np.concatenate([values, np.full(short, filler, values.dtype)]).reshape(-1, size)
