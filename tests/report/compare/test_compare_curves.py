"""Downsampled curves: short curves are exact, and long curves keep every extreme at its step."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from normlab.report.compare.curves import (
    FLOAT32_MAX,
    MAX_POINTS,
    MIN_POINTS,
    curve,
    points_per_curve,
    sample,
    times_per_run,
)


def unpacked(text: str, kind: str = "<f4"):
    return np.frombuffer(base64.b64decode(text), kind)


def test_points_per_curve_fall_with_the_number_of_runs():
    assert [points_per_curve(runs) for runs in (0, 1, 40, 80, 200, 1000)] == [2000, 2000, 2000, 1000, 400, 400]
    assert [times_per_run(runs) for runs in (0, 50, 200, 1000)] == [200, 200, 50, 20]
    assert (MAX_POINTS, MIN_POINTS) == (2000, 400)


@pytest.mark.parametrize("total", [0, 1, 2, 399, 400])
def test_short_curve_is_complete_and_exact(total):
    values = np.random.default_rng(1).normal(size=total).astype(np.float32).astype(np.float64)
    data = curve(np.arange(total), values, 400)
    if not total:
        assert data is None
        return
    assert data is not None
    assert set(data) == {"n", "steps", "values"}
    assert data["n"] == total
    assert unpacked(data["steps"], "<u4").tolist() == list(range(total))
    assert unpacked(data["values"]).tolist() == values.tolist()


@pytest.mark.parametrize("total", [401, 1000, 12_345, 200_001])
@pytest.mark.parametrize("most", [4, 100, 400])
def test_extremes_and_ends_keep_their_steps(total, most):
    rng = np.random.default_rng(total + most)
    values = 5 - np.arange(total) / total + rng.normal(0, 0.1, total)
    steps = np.arange(total) + 7
    kept, size = sample(values, most)
    assert len(kept) <= most
    assert kept[0] == 0
    assert kept[-1] == total - 1
    assert (np.diff(kept) > 0).all()
    for start in range(0, total, size):
        bucket = values[start : start + size]
        assert start + bucket.argmin() in kept
        assert start + bucket.argmax() in kept
    data = curve(steps, values, most)
    assert data is not None
    assert data["n"] == total
    assert (unpacked(data["steps"], "<u4") == steps[kept]).all()
    assert (unpacked(data["values"]) == values[kept].astype(np.float32)).all()
    means = [values[start : start + size].mean() for start in range(0, total, size)]
    assert unpacked(data["means"]) == pytest.approx(np.array(means), rel=1e-6)
    assert unpacked(data["mean_steps"])[0] == pytest.approx(7 + (min(size, total) - 1) / 2)


def test_every_spike_is_kept():
    rng = np.random.default_rng(0)
    values = rng.normal(3, 0.01, 100_000)
    spikes = np.arange(50, 100_000, 997)
    values[spikes] += 1 + rng.random(len(spikes))
    kept, _ = sample(values, 600)
    assert set(spikes.tolist()) <= set(kept.tolist())


def test_both_ends_of_a_nonfinite_stretch_are_kept():
    values = np.linspace(5, 2, 10_000)
    values[5000] = np.nan
    values[6000:6100] = np.inf
    values[-1] = -np.inf
    kept, _ = sample(values, 400)
    assert {5000, 6000, 6099, 9999} <= set(kept.tolist())
    assert not {6001, 6050} & set(kept.tolist())
    assert np.isfinite(values[[4999, 5001]]).all()
    data = curve(np.arange(10_000), values, 400)
    assert data is not None
    assert np.isnan(unpacked(data["values"])).sum() == 1
    assert np.isfinite(unpacked(data["means"])).all()
    broken = curve(np.arange(1000), np.full(1000, np.nan), 400)
    assert broken is not None
    assert unpacked(broken["steps"], "<u4").tolist() == [0, 999]
    assert len(unpacked(broken["means"])) == 0


def test_value_beyond_float32_stays_finite():
    data = curve(np.arange(3), np.array([1e300, -1e300, np.inf]), 400)
    assert data is not None
    assert unpacked(data["values"]).tolist() == [FLOAT32_MAX, -FLOAT32_MAX, np.inf]
