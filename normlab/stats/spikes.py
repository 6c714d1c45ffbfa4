"""Spikes of the loss and the gradient norm, by several published definitions.

The record holds the loss, gradient norm and clip factor of every step, so a report can apply any rule. A rule leaves
out the steps whose window is not full.

Shapes: S steps with a full window, W values of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]
Mask = NDArray[np.bool_]
CHUNK = 2000
"""Windows per chunk, which bounds the memory of their copies."""


@dataclass(frozen=True, kw_only=True)
class SpikeRule:
    name: str
    of: str
    """The series that it applies to: loss, grad_norm or clip_factor."""
    formula: str
    source: str
    window: int
    """W, the number of values that `judge` needs."""
    position: int
    """The index of the judged value in its window."""
    judge: Callable[[Series], Mask]
    """Finds the spikes of windows: maps (S, W) to (S,). Each window is summed by itself: after a spike, a running sum
    loses the small values."""
    fills_window: bool = False
    """Whether NaN fills the windows of the first steps, all except step 0, so that these steps are judged too."""


def deviates(windows: Series, *, deviations: float, both_sides: bool) -> Mask:
    """Find values further than `deviations` standard deviations (over n) from the earlier mean."""
    before, values = windows[:, :-1], windows[:, -1]
    distance, deviation = values - before.mean(axis=1), before.std(axis=1)
    return ((np.abs(distance) if both_sides else distance) > deviations * deviation) & (deviation > 1e-10)


def triples(windows: Series) -> Mask:
    """Find values that exceed the value before, and the earlier mean m by at least 2 |m|."""
    before, values = windows[:, :-1], windows[:, -1]
    mean = np.nanmean(before, axis=1)
    return (values > before[:, -1]) & (np.abs(values - mean) >= np.abs(2 * mean))


def exceeds_median(windows: Series) -> Mask:
    """Find values more than 0.1 above the median of the window around them."""
    return windows[:, windows.shape[1] // 2] > np.median(windows, axis=1) + 0.1


# fmt: off
RULES = (
    *(
        SpikeRule(
            name=f"{of}_olmo_core", of=of, window=129, position=128,
            judge=partial(deviates, deviations=6, both_sides=False),
            formula="above mean + 6 SD of the 128 before",
            source="allenai/OLMo-core, stability_monitor.py, which counts either series",
        )
        for of in ("loss", "grad_norm")
    ),
    *(
        SpikeRule(
            name=f"{of}_olmo_2", of=of, window=1001, position=1000,
            judge=partial(deviates, deviations=7, both_sides=True),
            formula="further than 7 SD from the mean of the 1000 before",
            source="OLMo 2, arXiv:2501.00656, section 3.2",
        )
        for of in ("loss", "grad_norm")
    ),
    SpikeRule(
        name="loss_lightning", of="loss", window=11, position=10, judge=triples, fills_window=True,
        formula="|x - m| >= 2 |m|, m the mean of the 10 before, and above the one before: three times m",
        source="Lightning-AI/pytorch-lightning, fabric/utilities/spike.py",
    ),
    SpikeRule(
        name="loss_median", of="loss", window=201, position=100, judge=exceeds_median,
        formula="more than 0.1 nats above the median of the 201 around it",
        source="after published reports of the Qwen team's stress tests",
    ),
    SpikeRule(
        name="clipped", of="clip_factor", formula="the gradient was clipped: factor below 1", source="normlab",
        window=1, position=0, judge=lambda windows: windows[:, 0] < 1,
    ),
)
# fmt: on


class SpikeCount(NamedTuple):
    rule: SpikeRule
    spikes: list[int]
    """The steps with a spike."""
    scored: int
    """The number of steps with a full window."""

    @property
    def share(self) -> float | None:
        """Spikes divided by scored steps; None without scored steps."""
        return len(self.spikes) / self.scored if self.scored else None


def count_spikes(series: Mapping[str, Series], rules: Sequence[SpikeRule] = RULES) -> list[SpikeCount]:
    """Apply each rule to a run's series, up to the first step that is not finite.

    Steps without an update are left out: their gradient overflowed in float16, and their clip factor is 0.

    Args:
        series: loss, grad_norm and clip_factor, (S,) each, from step 0 on.
        rules: The rules to apply.
    """
    counts = []
    arrays = {of: np.asarray(series[of], dtype=np.float64) for of in dict.fromkeys(rule.of for rule in RULES)}
    steps = np.flatnonzero(arrays["clip_factor"] != 0)
    arrays = {of: values[steps] for of, values in arrays.items()}
    nonfinite = np.flatnonzero(~np.isfinite(np.stack([*arrays.values()])).all(axis=0))
    for rule in rules:
        values = arrays[rule.of][: nonfinite[0]] if len(nonfinite) else arrays[rule.of]
        first = rule.position
        if rule.fills_window:
            values, first = np.concatenate([np.full(first - 1, np.nan), values]), 1
        windows = np.empty((0, rule.window))
        if len(values) >= rule.window:
            windows = np.lib.stride_tricks.sliding_window_view(values, rule.window)
        chunks = (windows[start : start + CHUNK] for start in range(0, len(windows), CHUNK))
        spikes = [np.flatnonzero(rule.judge(chunk)) + first + CHUNK * index for index, chunk in enumerate(chunks)]
        found = steps[np.concatenate(spikes)].tolist() if spikes else []
        counts.append(SpikeCount(rule, found, len(windows)))
    return counts
