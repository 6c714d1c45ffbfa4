"""Spikes of the loss and the gradient norm, by every definition in use: the field has not agreed on one.

The record holds the loss, gradient norm and clip factor of every step, so a report can apply any rule. A rule leaves
out the steps whose window is not full.

Shapes: S steps.
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


class Judgement(NamedTuple):
    """Masks of the steps with a full window, and of the spikes among them; (S,) each."""

    scored: Mask
    spikes: Mask


@dataclass(frozen=True, kw_only=True)
class SpikeRule:
    """One definition of a spike."""

    name: str
    of: str
    """The series that it applies to: loss, grad_norm or clip."""
    formula: str
    source: str
    judge: Callable[[Series], Judgement]


def trailing_moments(values: Series, window: int) -> tuple[Series, Series]:
    """Return mean and standard deviation (over n) of the `window` values before each one; NaN where there are fewer.

    Each window is summed by itself: after a spike, a running sum loses the small values.
    """
    mean, deviation = (np.full(len(values), np.nan) for _ in range(2))
    for start in range(window, len(values), CHUNK):
        chunk = values[start - window : min(start + CHUNK, len(values)) - 1]
        windows = np.lib.stride_tricks.sliding_window_view(chunk, window)
        steps = slice(start, start + len(windows))
        mean[steps], deviation[steps] = windows.mean(axis=1), windows.std(axis=1)
    return mean, deviation


def deviates(values: Series, *, window: int, deviations: float, both_sides: bool) -> Judgement:
    """Find values further than `deviations` standard deviations from the mean of the window before."""
    if len(values) <= window:
        return Judgement(*np.zeros((2, len(values)), dtype=bool))
    mean, deviation = trailing_moments(values, window)
    scored = ~np.isnan(mean)
    distance = np.abs(values - mean) if both_sides else values - mean
    with np.errstate(invalid="ignore"):
        return Judgement(scored, scored & (distance > deviations * deviation) & (deviation > 1e-10))


def triples(values: Series) -> Judgement:
    """Find values at least twice the mean of the last ten above that mean, and above the value before."""
    count, mean = np.arange(len(values)), np.full(len(values), np.nan)
    for step in range(1, min(10, len(values))):
        mean[step] = values[:step].mean()
    if len(values) > 10:  # each window by itself, as in `trailing_moments`
        mean[10:] = np.lib.stride_tricks.sliding_window_view(values[:-1], 10).mean(axis=1)
    rises = np.concatenate([[False], values[1:] > values[:-1]])
    return Judgement(count >= 1, (count >= 1) & rises & (np.abs(values - mean) >= np.abs(2 * mean)))


def exceeds_median(values: Series, *, window: int = 201, margin: float = 0.1) -> Judgement:
    """Find values more than `margin` above the median of the window around them."""
    half = window // 2
    scored, spikes = np.zeros((2, len(values)), dtype=bool)
    if len(values) >= window:
        for start in range(0, len(values) - window + 1, CHUNK):
            chunk = values[start : start + CHUNK + window - 1]
            medians = np.median(np.lib.stride_tricks.sliding_window_view(chunk, window), axis=1)
            steps = slice(start + half, start + half + len(medians))
            scored[steps], spikes[steps] = True, values[steps] > medians + margin
    return Judgement(scored, spikes)


OLMO_2 = partial(deviates, window=1000, deviations=7, both_sides=True)
OLMO_CORE = partial(deviates, window=128, deviations=6, both_sides=False)

# fmt: off
RULES = (
    *(
        SpikeRule(
            name=f"{of}_olmo_core", of=of, judge=OLMO_CORE, formula="above mean + 6 SD of the 128 before",
            source="allenai/OLMo-core, stability_monitor.py, which counts either series",
        )
        for of in ("loss", "grad_norm")
    ),
    *(
        SpikeRule(
            name=f"{of}_olmo_2", of=of, judge=OLMO_2, formula="further than 7 SD from the mean of the 1000 before",
            source="OLMo 2, arXiv:2501.00656, section 3.2",
        )
        for of in ("loss", "grad_norm")
    ),
    SpikeRule(
        name="loss_lightning", of="loss", judge=triples,
        formula="|x - m| >= 2 |m|, m the mean of the 10 before, and above the one before: three times m",
        source="Lightning-AI/pytorch-lightning, fabric/utilities/spike.py",
    ),
    SpikeRule(
        name="loss_median", of="loss", judge=exceeds_median,
        formula="more than 0.1 nats above the median of the 201 around it",
        source="after published reports of the Qwen team's stress tests",
    ),
    SpikeRule(
        name="clipped", of="clip", formula="the gradient was clipped: factor below 1", source="normlab",
        judge=lambda values: Judgement(np.ones(len(values), dtype=bool), values < 1),
    ),
)
# fmt: on


class SpikeCount(NamedTuple):
    """The spikes of a run by one rule."""

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
    """Apply each rule to a run's loss, gradient norm or clip factor, up to the first step that is not finite.

    Args:
        series: loss, grad_norm and clip, (S,) each, from step 0 on.
        rules: The rules to apply.
    """
    counts = []
    arrays = {of: np.asarray(series[of], dtype=np.float64) for of in dict.fromkeys(rule.of for rule in RULES)}
    nonfinite = np.flatnonzero(~np.isfinite(np.stack([*arrays.values()])).all(axis=0))
    for rule in rules:
        values = arrays[rule.of][: nonfinite[0]] if len(nonfinite) else arrays[rule.of]
        scored, spikes = rule.judge(values)
        counts.append(SpikeCount(rule, np.flatnonzero(spikes).tolist(), int(scored.sum())))
    return counts
