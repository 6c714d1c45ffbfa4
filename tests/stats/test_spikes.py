"""Every spike rule against a loop over steps, and on known series."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from normlab.stats.spikes import RULES, count_spikes

Values = Sequence[float]


def by_deviation(window: int, deviations: float, both: bool) -> Callable[[Values, int], bool | None]:
    def judge(values: Values, step: int) -> bool | None:
        if step < window:
            return None
        last = values[step - window : step]
        mean, deviation = statistics.fmean(last), statistics.pstdev(last)
        away = values[step] - mean
        return (abs(away) if both else away) > deviations * deviation and deviation > 1e-10

    return judge


def by_lightning(values: Values, step: int) -> bool | None:
    if step < 1:
        return None
    mean = statistics.fmean(values[max(0, step - 10) : step])
    return values[step] > values[step - 1] and abs(values[step] - mean) >= abs(2 * mean)


def by_median(values: Values, step: int) -> bool | None:
    if not 100 <= step < len(values) - 100:
        return None
    return values[step] > statistics.median(values[step - 100 : step + 101]) + 0.1


SLOW = {
    "loss_olmo_core": by_deviation(128, 6, False),
    "grad_norm_olmo_core": by_deviation(128, 6, False),
    "loss_olmo_2": by_deviation(1000, 7, True),
    "grad_norm_olmo_2": by_deviation(1000, 7, True),
    "loss_lightning": by_lightning,
    "loss_median": by_median,
    "clipped": lambda values, step: values[step] < 1,
}


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


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", [1, 2, 11, 128, 129, 200, 201, 202, 1000, 1001, 2500])
def test_every_rule_equals_a_loop_over_steps(steps: int) -> None:
    given = series(steps)
    found = {result.rule.name: result for result in count_spikes(given)}
    assert found.keys() == SLOW.keys() == {rule.name for rule in RULES}
    for name, result in found.items():
        judged = [SLOW[name](given[result.rule.of].tolist(), step) for step in range(steps)]
        assert result.spikes == [step for step, spike in enumerate(judged) if spike], name
        assert result.scored == sum(spike is not None for spike in judged), name
    if steps == 2500:
        assert all(result.spikes for result in found.values())


def test_long_series_is_judged_in_chunks() -> None:
    given = series(10_500)
    (found,) = (result for result in count_spikes(given) if result.rule.name == "loss_median")
    loss = given["loss"].tolist()
    assert found.spikes == [step for step in range(len(loss)) if by_median(loss, step)]


def test_constant_series_has_no_spikes_and_diverged_series_is_cut() -> None:
    quiet = {"loss": np.full(3000, 2.5), "grad_norm": np.full(3000, 0.5), "clip_factor": np.ones(3000)}
    assert [result.spikes for result in count_spikes(quiet)] == [[]] * len(RULES)
    broken = series(600)
    broken["loss"][500] = math.nan
    found = {result.rule.name: result for result in count_spikes(broken)}
    assert found["loss_olmo_core"].scored == 500 - 128
    assert found["grad_norm_olmo_core"].scored == 500 - 128  # the update of step 500 was not made
    assert found["loss_olmo_2"].share is None


def test_huge_value_does_not_affect_later_windows() -> None:
    loss = 3 + 0.01 * np.random.default_rng(1).standard_normal(500)
    loss[100] = 1e17
    (found,) = (
        result for result in count_spikes({**series(500), "loss": loss}) if result.rule.name == "loss_lightning"
    )
    assert found.spikes == [step for step in range(500) if by_lightning(loss.tolist(), step)] == [100]
