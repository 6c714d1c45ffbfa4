"""Spikes of the loss and of the gradient's norm, by each definition that is in use: none of them is the definition.

Every step's loss, gradient norm and clip factor are in the record, so that they are counted when a run is read, by
any of these. A step that cannot be judged yet (its window is not full) is not counted as quiet but left out.

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
PART = 2000
"""Windows that are looked at at a time: they are copied."""


class Judged(NamedTuple):
    """Which steps could be judged, and which of them are spikes; (S,) each."""

    scored: Mask
    spikes: Mask


@dataclass(frozen=True, kw_only=True)
class SpikeRule:
    """One definition of a spike."""

    name: str
    of: str
    """The series that it looks at: loss, grad_norm or clip."""
    formula: str
    source: str
    judge: Callable[[Series], Judged]


def before(values: Series, window: int) -> tuple[Series, Series]:
    """Mean and standard deviation (over n) of the `window` values before each one; NaN where there are fewer.

    Of each window by itself: sums that run on lose what is small beside a spike of long ago.
    """
    mean, deviation = (np.full(len(values), np.nan) for _ in range(2))
    for start in range(window, len(values), PART):
        some = values[start - window : min(start + PART, len(values)) - 1]
        windows = np.lib.stride_tricks.sliding_window_view(some, window)
        here = slice(start, start + len(windows))
        mean[here], deviation[here] = windows.mean(axis=1), windows.std(axis=1)
    return mean, deviation


def deviating(values: Series, *, window: int, deviations: float, both_sides: bool) -> Judged:
    """Further than so many standard deviations from the mean of the values before."""
    if len(values) <= window:
        return Judged(*np.zeros((2, len(values)), dtype=bool))
    mean, deviation = before(values, window)
    scored = ~np.isnan(mean)
    away = np.abs(values - mean) if both_sides else values - mean
    with np.errstate(invalid="ignore"):
        return Judged(scored, scored & (away > deviations * deviation) & (deviation > 1e-10))


def tripled(values: Series) -> Judged:
    """At least twice the mean of the last ten above it, and more than the value before."""
    count, mean = np.arange(len(values)), np.full(len(values), np.nan)
    for step in range(1, min(10, len(values))):
        mean[step] = values[:step].mean()
    if len(values) > 10:  # of each window by itself, as `before`
        mean[10:] = np.lib.stride_tricks.sliding_window_view(values[:-1], 10).mean(axis=1)
    rises = np.concatenate([[False], values[1:] > values[:-1]])
    return Judged(count >= 1, (count >= 1) & rises & (np.abs(values - mean) >= np.abs(2 * mean)))


def above_median(values: Series, *, window: int = 201, above: float = 0.1) -> Judged:
    """So far above the median of the steps around it."""
    half = window // 2
    scored, spikes = np.zeros((2, len(values)), dtype=bool)
    if len(values) >= window:
        for start in range(0, len(values) - window + 1, PART):
            some = values[start : start + PART + window - 1]
            medians = np.median(np.lib.stride_tricks.sliding_window_view(some, window), axis=1)
            middle = slice(start + half, start + half + len(medians))
            scored[middle], spikes[middle] = True, values[middle] > medians + above
    return Judged(scored, spikes)


OLMO_2 = partial(deviating, window=1000, deviations=7, both_sides=True)
OLMO_CORE = partial(deviating, window=128, deviations=6, both_sides=False)

RULES = (
    *(
        SpikeRule(
            name=f"{of}_olmo_core",
            of=of,
            formula="above mean + 6 SD of the 128 before",
            source="allenai/OLMo-core, stability_monitor.py, which counts either series",
            judge=OLMO_CORE,
        )
        for of in ("loss", "grad_norm")
    ),
    *(
        SpikeRule(
            name=f"{of}_olmo_2",
            of=of,
            formula="further than 7 SD from the mean of the 1000 before",
            source="OLMo 2, arXiv:2501.00656, section 3.2",
            judge=OLMO_2,
        )
        for of in ("loss", "grad_norm")
    ),
    SpikeRule(
        name="loss_lightning",
        of="loss",
        formula="|x - m| >= 2 |m|, m the mean of the 10 before, and above the one before: three times m",
        source="Lightning-AI/pytorch-lightning, fabric/utilities/spike.py",
        judge=tripled,
    ),
    SpikeRule(
        name="loss_median",
        of="loss",
        formula="more than 0.1 nats above the median of the 201 around it",
        source="after stress tests of Qwen's team, as others tell of them",
        judge=above_median,
    ),
    SpikeRule(
        name="clipped",
        of="clip",
        formula="the gradient was clipped: factor below 1",
        source="normlab",
        judge=lambda values: Judged(np.ones(len(values), dtype=bool), values < 1),
    ),
)


class Count(NamedTuple):
    """What a rule found in a run."""

    rule: SpikeRule
    spikes: list[int]
    """The steps."""
    scored: int
    """How many steps could be judged."""

    @property
    def share(self) -> float | None:
        """Spikes over the steps that were judged; None where none was."""
        return len(self.spikes) / self.scored if self.scored else None


def count(series: Mapping[str, Series], rules: Sequence[SpikeRule] = RULES) -> list[Count]:
    """What each rule finds in a run's loss, gradient norm and clip factor, up to the first where one is not finite.

    Args:
        series: By name, (S,) each, from step 0 on.
        rules: The rules that are asked.
    """
    found = []
    arrays = {of: np.asarray(series[of], dtype=np.float64) for of in dict.fromkeys(rule.of for rule in RULES)}
    broken = np.flatnonzero(~np.isfinite(np.stack([*arrays.values()])).all(axis=0))
    for rule in rules:
        values = arrays[rule.of][: broken[0]] if len(broken) else arrays[rule.of]
        scored, spikes = rule.judge(values)
        found.append(Count(rule, np.flatnonzero(spikes).tolist(), int(scored.sum())))
    return found
