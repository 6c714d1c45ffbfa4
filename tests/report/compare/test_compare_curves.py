"""Curves: short ones whole, and of long ones every extreme where it was."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from normlab.report.compare.curves import FEWEST_POINTS, LARGEST, MOST_POINTS, curve, moments_for, points_for, sample


def unpacked(text: str, kind: str = "<f4"):
    return np.frombuffer(base64.b64decode(text), kind)


def test_how_many_points_a_curve_has():
    assert [points_for(runs) for runs in (0, 1, 40, 80, 200, 1000)] == [2000, 2000, 2000, 1000, 400, 400]
    assert [moments_for(runs) for runs in (0, 50, 200, 1000)] == [200, 200, 50, 20]
    assert (MOST_POINTS, FEWEST_POINTS) == (2000, 400)


@pytest.mark.parametrize("total", [0, 1, 2, 399, 400])
def test_a_short_curve_is_whole_and_exact(total):
    values = np.random.default_rng(1).normal(size=total).astype(np.float32).astype(np.float64)
    found = curve(np.arange(total), values, 400)
    if not total:
        assert found is None
        return
    assert found is not None
    assert set(found) == {"n", "steps", "values"}
    assert found["n"] == total
    assert unpacked(found["steps"], "<u4").tolist() == list(range(total))
    assert unpacked(found["values"]).tolist() == values.tolist()


@pytest.mark.parametrize("total", [401, 1000, 12_345, 200_001])
@pytest.mark.parametrize("most", [4, 100, 400])
def test_extremes_and_ends_survive_at_their_steps(total, most):
    chance = np.random.default_rng(total + most)
    values = 5 - np.arange(total) / total + chance.normal(0, 0.1, total)
    steps = np.arange(total) + 7
    kept, size = sample(values, most)
    assert len(kept) <= most
    assert kept[0] == 0
    assert kept[-1] == total - 1
    assert (np.diff(kept) > 0).all()
    for start in range(0, total, size):
        own = values[start : start + size]
        assert start + own.argmin() in kept
        assert start + own.argmax() in kept
    found = curve(steps, values, most)
    assert found is not None
    assert (found["n"], found["count"]) == (total, size)
    assert (unpacked(found["steps"], "<u4") == steps[kept]).all()
    assert (unpacked(found["values"]) == values[kept].astype(np.float32)).all()
    means = [values[start : start + size].mean() for start in range(0, total, size)]
    assert unpacked(found["means"]) == pytest.approx(np.array(means), rel=1e-6)
    assert unpacked(found["mean_steps"])[0] == pytest.approx(7 + (min(size, total) - 1) / 2)


def test_every_spike_survives():
    chance = np.random.default_rng(0)
    values = chance.normal(3, 0.01, 100_000)
    spikes = np.arange(50, 100_000, 997)
    values[spikes] += 1 + chance.random(len(spikes))
    kept, _ = sample(values, 600)
    assert set(spikes.tolist()) <= set(kept.tolist())


def test_what_is_not_finite_is_kept_with_both_ends():
    values = np.linspace(5, 2, 10_000)
    values[5000] = np.nan
    values[6000:6100] = np.inf
    values[-1] = -np.inf
    kept, _ = sample(values, 400)
    assert {5000, 6000, 6099, 9999} <= set(kept.tolist())
    assert not {6001, 6050} & set(kept.tolist())
    assert np.isfinite(values[[4999, 5001]]).all()
    found = curve(np.arange(10_000), values, 400)
    assert found is not None
    assert np.isnan(unpacked(found["values"])).sum() == 1
    assert np.isfinite(unpacked(found["means"])).all()
    broken = curve(np.arange(1000), np.full(1000, np.nan), 400)
    assert broken is not None
    assert unpacked(broken["steps"], "<u4").tolist() == [0, 999]
    assert len(unpacked(broken["means"])) == 0


def test_what_a_float32_does_not_hold_stays_finite():
    found = curve(np.arange(3), np.array([1e300, -1e300, np.inf]), 400)
    assert found is not None
    assert unpacked(found["values"]).tolist() == [LARGEST, -LARGEST, np.inf]
