"""A run's metrics over training, read once: losses, gradient norms, evaluations, times and spikes.

Shapes: S steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normlab.errors import StoreError
from normlab.report.summary import unreadable_lines_note
from normlab.stats.spikes import RULES, count_spikes
from normlab.store.evaluations import Evaluation, evaluations_of
from normlab.store.reading import Rows
from normlab.store.runs import RunFolder
from normlab.store.schema import number
from normlab.store.series import series_of

Series = NDArray[np.float64]

SPIKE_RULES = {"loss": "loss_olmo_core", "grad_norm": "grad_norm_olmo_core"}
"""The rule that finds the spikes of each series."""
MAX_STEP = 2**32 - 1
"""The largest step that the page can hold."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """The metrics of a run."""

    rows: Rows = field(default_factory=lambda: Rows([], 0, False))
    """The rows of the metrics file."""
    steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """(S,), non-decreasing."""
    loss: Series = field(default_factory=lambda: np.zeros(0))
    """(S,), nats/token."""
    grad_norm: Series = field(default_factory=lambda: np.zeros(0))
    """(S,), before clipping."""
    evaluations: list[Evaluation] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)
    """Pairs of a step and the seconds of training until then."""
    spikes: dict[str, list[int]] = field(default_factory=dict)
    """The steps of the spikes, by series."""
    problem: str = ""
    """What could not be read."""


def read_metrics(folder: RunFolder) -> Metrics:
    """Read a run's metrics; a file that cannot be read sets `problem` instead of raising."""
    try:
        rows = folder.rows()
    except StoreError as error:
        return Metrics(problem=str(error))
    trained = [row for row in rows.rows if row.get("kind") == "train"]
    others = [row for row in rows.rows if row.get("kind") != "train"]
    series = series_of(trained)
    valid = (series["step"] >= 0) & (series["step"] <= MAX_STEP) & (np.floor(series["step"]) == series["step"])
    order = np.flatnonzero(valid)
    order = order[np.argsort(series["step"][order], kind="stable")]  # a damaged row can have the step of another
    series = {name: values[order] for name, values in series.items()}
    steps, invalid = series["step"].astype(np.int64), int((~valid).sum())
    without_step = f"{invalid} rows of the metrics have no step" if invalid else ""
    rules = [rule for rule in RULES if rule.name in SPIKE_RULES.values()]
    return Metrics(
        rows=rows,
        steps=steps,
        loss=series["loss"],
        grad_norm=series["grad_norm"],
        evaluations=evaluations_of(others),
        times=_times(others),
        spikes={found.rule.of: steps[found.spikes].tolist() for found in count_spikes(series, rules)}
        if len(steps)
        else {},
        problem="; ".join(filter(None, [folder.metrics_problem(), unreadable_lines_note(rows), without_step])),
    )


def _times(rows: list[dict[str, Any]]) -> list[tuple[float, float]]:
    times = [(number(row.get("step")), number(row.get("seconds"))) for row in rows if row.get("kind") == "pace"]
    return [(step, seconds) for step, seconds in times if step is not None and seconds is not None]
