"""Draw numbers as a line of bars in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
_FLAT = 0.01
"""Relative difference up to which numbers are drawn at the same height."""


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """Draw at most `width` of the numbers, evenly spaced; `?` for one that is not finite.

    The scale is logarithmic where all finite numbers are positive, else linear. Numbers within 1 % of each other are
    all drawn at half height.
    """
    count = min(width, len(values))
    heights = [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]
    finite = [value for value in heights if math.isfinite(value)]
    flat = _FLAT * max(map(abs, finite), default=0.0)
    if finite and min(finite) > 0:
        heights, flat = [math.log(value) if math.isfinite(value) else value for value in heights], _FLAT
    finite = [height for height in heights if math.isfinite(height)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)

    def bar(height: float) -> str:
        if not math.isfinite(height):
            return "?"
        return BARS[3] if span <= flat else BARS[round((height - low) / span * (len(BARS) - 1))]

    return "".join(map(bar, heights))
