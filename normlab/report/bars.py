"""Numbers as a line of bars, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
FLAT = 0.01
"""How much numbers must differ, as a share of their size, to be drawn as differing."""


def bars(values: Sequence[float], width: int = 12) -> str:
    """At most `width` of the numbers, evenly spaced: on a logarithmic scale where all are above 0, else linear.

    What is not finite is a question mark; numbers within 1 % of each other are all half as high.
    """
    count = min(width, len(values))
    picked = [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]
    finite = [value for value in picked if math.isfinite(value)]
    if finite and min(finite) > 0:
        heights, least = [math.log(value) if math.isfinite(value) else value for value in picked], FLAT
    else:
        heights, least = picked, FLAT * max(map(abs, finite), default=0.0)
    known = [height for height in heights if math.isfinite(height)]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    if span <= least:
        return "".join(BARS[3] if math.isfinite(height) else "?" for height in heights)
    return "".join(
        BARS[round((height - low) / span * (len(BARS) - 1))] if math.isfinite(height) else "?" for height in heights
    )
