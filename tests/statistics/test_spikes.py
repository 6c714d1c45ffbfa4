"""Spikes against a loop over steps, and on known series."""

import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from normlab.analysis.spikes import SpikesOfRule, count_spikes

SERIES = {"loss_olmo_core": "loss", "grad_norm_olmo_core": "grad_norm"}


def spikes_of(values: Sequence[float]) -> list[int]:
    found = []
    for step in range(128, len(values)):
        before = values[step - 128 : step]
        deviation = statistics.pstdev(before)
        if values[step] - statistics.fmean(before) > 6 * deviation and deviation > 1e-10:
            found.append(step)
    return found


def counts_of(series: dict[str, np.ndarray]) -> dict[str, SpikesOfRule]:
    return {counts.rule: counts for counts in count_spikes(series)}


def series(steps: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    base = 2 + 3 * np.exp(-np.arange(steps) / 300)
    loss = base + 0.02 * generator.standard_normal(steps)
    for step in range(0, steps, 97):
        loss[step] *= generator.choice([0.5, 1.05, 1.1, 2, 5])
    grad_norm = np.exp(0.3 * generator.standard_normal(steps)) * base
    grad_norm[::211] *= 8
    grad_norm[500::3000] *= 1e8
    return {"loss": loss, "grad_norm": grad_norm, "clip_factor": np.minimum(1, 3 / grad_norm)}


@pytest.mark.few(2)
@pytest.mark.parametrize("steps", [1, 128, 129, 2128, 2129, 4500])
def test_spikes_equal_a_loop_over_steps(steps: int) -> None:
    given = series(steps)
    found = counts_of(given)
    for rule, of in SERIES.items():
        assert found[rule].spikes == spikes_of(given[of].tolist())
        assert found[rule].scored == max(0, steps - 128)
    assert found["clipped"].spikes == np.flatnonzero(given["clip_factor"] < 1).tolist()
    if steps == 4500:
        assert all(counts.spikes for counts in found.values())


def test_constant_series_has_no_spikes_and_diverged_series_is_cut() -> None:
    quiet = {"loss": np.full(3000, 2.5), "grad_norm": np.full(3000, 0.5), "clip_factor": np.ones(3000)}
    assert [counts.spikes for counts in count_spikes(quiet)] == [[]] * 3
    broken = series(600)
    broken["loss"][500] = math.nan
    found = counts_of(broken)
    assert found["loss_olmo_core"].scored == 500 - 128
    assert found["grad_norm_olmo_core"].scored == 500 - 128  # the update of step 500 was not made
    assert counts_of(series(128))["loss_olmo_core"].share is None


def test_huge_value_does_not_affect_later_windows() -> None:
    loss = 3 + 0.01 * np.random.default_rng(1).standard_normal(500)
    loss[130] = 1e17
    loss[400] = 4.0
    assert counts_of({**series(500), "loss": loss})["loss_olmo_core"].spikes == spikes_of(loss.tolist()) == [130, 400]


def test_step_without_an_update_is_not_judged() -> None:
    given = series(20)
    given["grad_norm"][7], given["clip_factor"][:], given["clip_factor"][7] = math.inf, 0.5, 0.0
    found = counts_of(given)["clipped"]
    assert (found.spikes, found.scored) == ([step for step in range(20) if step != 7], 19)
