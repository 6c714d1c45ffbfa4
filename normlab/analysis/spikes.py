"""Spikes of the loss and the gradient norm, and clipped steps.

A spike is a value more than six standard deviations above the mean of the 128 values before it, as in OLMo-core's
stability_monitor.py (github.com/allenai/OLMo-core), which counts either series.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

WINDOW = 128
"""Values before the judged one."""
DEVIATIONS = 6
SMALLEST_DEVIATION = 1e-10
"""Standard deviation below which a series is constant and has no spikes."""
CHUNK = 2000
"""Windows per chunk, which bounds the memory of their copies."""

FORMULA = f"above mean + {DEVIATIONS} SD of the {WINDOW} before"
OLMO_CORE = "allenai/OLMo-core, stability_monitor.py"


class SpikeCount(NamedTuple):
    rule: str
    formula: str
    source: str
    spikes: list[int]
    """The steps with a spike."""
    scored: int
    """The number of judged steps."""

    @property
    def share(self) -> float | None:
        """Spikes divided by judged steps; None without judged steps."""
        return len(self.spikes) / self.scored if self.scored else None


def count_spikes(series: Mapping[str, Series]) -> list[SpikeCount]:
    """Count the spikes of a run's series and its clipped steps, up to the first step that is not finite.

    Steps without an update are left out: their gradient overflowed in float16, and their clip factor is 0.

    Args:
        series: loss, grad_norm and clip_factor, (S,) each for S steps from step 0 on.
    """
    loss, grad_norm, clip_factor = (
        np.asarray(series[of], dtype=np.float64) for of in ("loss", "grad_norm", "clip_factor")
    )
    steps = np.flatnonzero(clip_factor != 0)
    nonfinite = np.flatnonzero(~np.isfinite(np.stack([loss, grad_norm, clip_factor])[:, steps]).all(axis=0))
    steps = steps[: nonfinite[0]] if len(nonfinite) else steps
    counts = [
        SpikeCount(
            f"{of}_olmo_core", FORMULA, OLMO_CORE, steps[_spikes(values[steps])].tolist(), max(0, len(steps) - WINDOW)
        )
        for of, values in (("loss", loss), ("grad_norm", grad_norm))
    ]
    clipped = steps[clip_factor[steps] < 1].tolist()
    return [*counts, SpikeCount("clipped", "the gradient was clipped: factor below 1", "normlab", clipped, len(steps))]


def _spikes(values: Series) -> NDArray[np.intp]:
    """Return the indices of the spikes.

    Each window is summed by itself: after a spike, a running sum loses the small values.
    """
    found: list[NDArray[np.intp]] = [np.empty(0, dtype=np.intp)]
    for start in range(0, len(values) - WINDOW, CHUNK):
        windows = np.lib.stride_tricks.sliding_window_view(values[start : start + CHUNK + WINDOW], WINDOW + 1)
        before, last = windows[:, :-1], windows[:, -1]
        deviation = before.std(axis=1)
        is_spike = (last - before.mean(axis=1) > DEVIATIONS * deviation) & (deviation > SMALLEST_DEVIATION)
        found.append(np.flatnonzero(is_spike) + WINDOW + start)
    return np.concatenate(found)
