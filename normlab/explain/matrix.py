"""The matrix that the page normalises: four tokens as rows, six channels as columns.

Each token differs from the first in one way, so that what a norm takes away can be seen: the second is small, the
third large, the fourth shifted. The fifth channel is large in all of them.
"""

from __future__ import annotations

TOKENS, CHANNELS = 4, 6

ORIGINAL: tuple[tuple[float, ...], ...] = (
    (0.5, -1.1, 0.2, 1.3, 6.0, -0.4),
    (0.1, 0.3, -0.2, 0.4, 4.5, -0.1),
    (4.0, -6.5, 2.5, 7.0, 15.0, -3.0),
    (3.2, 2.6, 3.5, 2.9, 9.0, 3.1),
)
LIMIT = 1e12
"""The largest absolute value that may be typed in: its square, and sums of such, keep their digits in float64."""

PRESETS: tuple[dict[str, object], ...] = (
    {"label": "add 3 to every value", "add": 3.0},
    {"label": "ten times token 2", "row": 1, "times": 10.0},
    {"label": "ten times channel 4", "column": 3, "times": 10.0},
    {"label": "token 3 constant", "row": 2, "value": 2.0},
)
"""What the buttons do to the matrix as it is: to one row or column, or to all of it."""
