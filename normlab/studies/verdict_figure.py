"""The picture of the verdicts of a study: each estimate with its interval, and its criterion as a shaded range."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from normlab.report.figure_draw import SETTINGS as STYLE
from normlab.report.figure_draw import render_figure
from normlab.studies.base import AT_BEST
from normlab.studies.judge import Judgement
from normlab.studies.report_format import LEVELS

FORMATS = ("svg", "pdf")
COLOURS = {"supported": "#1f7a3d", "refuted": "#b3261e", "undecided": "#8a6d00", "void": "#5a6472"}
WIDTHS = (1.2, 3.0)
"""Widths of the lines of the intervals, in points, in the order of `LEVELS`."""
AT_BEST_HEIGHT = -0.6
"""Where the estimate at the best learning rates is drawn; the other one is at 0, and a row goes from -1 to 1."""
CAPTION = (
    "Each estimate with its 95% interval (thick: 90%). The criterion is the shaded range. Open circle: the same "
    f"{AT_BEST}, where that is another number; with its 95% interval (90% for two one-sided tests)."
)


def draw_verdicts(judgements: Sequence[Judgement]) -> dict[str, bytes]:
    """Return the picture of all estimates, one row for each claim with its own scale, in each of `FORMATS`."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        titles: list[str] = []
        for judgement in judgements:
            titles.append(textwrap.fill(f"{judgement.verdict_in_words}: {judgement.claim.text}", 130))
        # A title of several lines needs more height, or it would cover the row above.
        more_lines = sum(title.count("\n") for title in titles)
        canvas = Figure(figsize=(7.0, 0.3 + 0.8 * len(judgements) + 0.12 * more_lines), layout="constrained")
        axes = canvas.subplots(len(judgements), 1, squeeze=False)[:, 0]
        for axis, judgement, title in zip(axes, judgements, titles, strict=True):
            _draw_verdict(axis, judgement)
            axis.set_title(title, loc="left", fontsize=7, pad=2)
            axis.set_xlabel(judgement.claim.estimator.quantity, fontsize=6, labelpad=1)
        return {format: render_figure(canvas, format) for format in FORMATS}


def _draw_verdict(axis: Any, judgement: Judgement) -> None:
    estimate, best = judgement.estimate, judgement.at_best
    least, most = judgement.claim.criterion.limits
    intervals = [estimate.interval(alpha) for alpha in LEVELS]
    # The axis has 0 and every finite number that is drawn, with some room; infinite bounds end at its ends.
    values = [0.0, estimate.value, *intervals[0], least, most]
    if best is not None:
        values += [best.estimate, best.low, best.high]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    room = 0.08 * (high - low or 1.0)
    low, high = low - room, high + room
    axis.axvspan(max(least, low), min(most, high), color="#e3e7ec", linewidth=0)
    axis.axvline(0, color="#9aa4b1", linewidth=0.6)
    colour = COLOURS[judgement.verdict]
    for (bottom, top), width in zip(intervals, WIDTHS, strict=True):
        axis.plot([max(bottom, low), min(top, high)], [0, 0], color=colour, linewidth=width, solid_capstyle="butt")
    if math.isfinite(estimate.value):
        axis.plot([estimate.value], [0], marker="o", color=colour)
    if best is not None and math.isfinite(best.estimate):
        ends, heights = [max(best.low, low), min(best.high, high)], [AT_BEST_HEIGHT, AT_BEST_HEIGHT]
        axis.plot(ends, heights, color=colour, linewidth=0.8)
        axis.plot([best.estimate], [AT_BEST_HEIGHT], marker="o", color=colour, markerfacecolor="white")
    axis.set_xlim(low, high)
    axis.set_ylim(-1, 1)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
