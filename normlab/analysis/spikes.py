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


class SpikesOfRule(NamedTuple):
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
        if not self.scored:
            return None
        return len(self.spikes) / self.scored


def count_spikes(series: Mapping[str, Series]) -> list[SpikesOfRule]:
    """Count the spikes of a run's series and its clipped steps, up to the first step that is not finite.

    Steps without an update are left out: their gradient overflowed in float16, and their clip factor is 0.

    Args:
        series: loss, grad_norm and clip_factor, (S,) each for S steps from step 0 on.
    """
    loss = np.asarray(series["loss"], dtype=np.float64)
    grad_norm = np.asarray(series["grad_norm"], dtype=np.float64)
    clip_factor = np.asarray(series["clip_factor"], dtype=np.float64)
    steps = np.flatnonzero(clip_factor != 0)
    # After the first value that is not finite the run has diverged, and its values tell nothing of spikes.
    values_of_steps = np.stack([loss, grad_norm, clip_factor])[:, steps]
    nonfinite = np.flatnonzero(~np.isfinite(values_of_steps).all(axis=0))
    if len(nonfinite):
        steps = steps[: nonfinite[0]]
    scored = max(0, len(steps) - WINDOW)
    counts: list[SpikesOfRule] = []
    for name, values in (("loss", loss), ("grad_norm", grad_norm)):
        spikes = steps[_spikes(values[steps])].tolist()
        counts.append(SpikesOfRule(f"{name}_olmo_core", FORMULA, OLMO_CORE, spikes, scored))
    clipped = steps[clip_factor[steps] < 1].tolist()
    formula = "the gradient was clipped: factor below 1"
    return [*counts, SpikesOfRule("clipped", formula, "normlab", clipped, len(steps))]


def _spikes(values: Series) -> NDArray[np.intp]:
    """Return the indices of the spikes.

    Each window is summed by itself: after a spike, a running sum loses the small values.
    """
    indices: list[NDArray[np.intp]] = [np.empty(0, dtype=np.intp)]
    for start in range(0, len(values) - WINDOW, CHUNK):
        # Chunks overlap by a window, so that each value is judged by the values before it, once.
        chunk = values[start : start + CHUNK + WINDOW]
        windows = np.lib.stride_tricks.sliding_window_view(chunk, WINDOW + 1)
        before, last = windows[:, :-1], windows[:, -1]
        deviation = before.std(axis=1)
        is_far_above = last - before.mean(axis=1) > DEVIATIONS * deviation
        is_spike = is_far_above & (deviation > SMALLEST_DEVIATION)
        indices.append(np.flatnonzero(is_spike) + WINDOW + start)
    return np.concatenate(indices)
