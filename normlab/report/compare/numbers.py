"""What a run's metrics say, read once: every step's loss and gradient norm, the evaluations, the pace, the spikes.

Shapes: S steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normlab.errors import StoreError
from normlab.report.summary import damaged_lines
from normlab.stats.spikes import RULES, count_spikes
from normlab.store.evaluations import Evaluation, evaluations_of
from normlab.store.reading import Rows
from normlab.store.runs import RunFolder
from normlab.store.schema import number
from normlab.store.series import series_of

Series = NDArray[np.float64]

SPIKE_RULES = {"loss": "loss_olmo_core", "grad_norm": "grad_norm_olmo_core"}
"""The rule by which spikes are marked, of each series."""
_RULES = [rule for rule in RULES if rule.name in SPIKE_RULES.values()]
_LAST_STEP = 2**32 - 1
"""What a curve's step can be at most."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A run's numbers over training."""

    record: Rows = field(default_factory=lambda: Rows([], 0, False))
    steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """(S,), never falling."""
    loss: Series = field(default_factory=lambda: np.zeros(0))
    """(S,), nats a token."""
    grad_norm: Series = field(default_factory=lambda: np.zeros(0))
    """(S,), before clipping."""
    evaluations: list[Evaluation] = field(default_factory=list)
    paces: list[tuple[float, float]] = field(default_factory=list)
    """After how many updates, and the seconds in steps until then."""
    spikes: dict[str, list[int]] = field(default_factory=dict)
    """The steps that are spikes, by series and `SPIKE_RULES`."""
    problem: str = ""
    """What could not be read."""

    def rows(self) -> Rows:
        """The rows that this was read of."""
        return self.record


def read_numbers(folder: RunFolder) -> Numbers:
    """A run's numbers; what could not be read is in `problem`, and never raised."""
    try:
        record = folder.rows()
    except StoreError as error:
        return Numbers(problem=str(error))
    trained = [row for row in record.rows if row.get("kind") == "train"]
    others = [row for row in record.rows if row.get("kind") != "train"]
    seen = series_of(trained)
    known = (seen["step"] >= 0) & (seen["step"] <= _LAST_STEP) & (np.floor(seen["step"]) == seen["step"])
    seen = {name: values[known] for name, values in seen.items()}
    if (np.diff(seen["step"]) < 0).any():  # a damaged row may say another step than its own
        order = np.argsort(seen["step"], kind="stable")
        seen = {name: values[order] for name, values in seen.items()}
    steps, lost = seen["step"].astype(np.int64), int((~known).sum())
    strange = f"{lost} rows of the metrics name no step" if lost else ""
    return Numbers(
        record=record,
        steps=steps,
        loss=seen["loss"],
        grad_norm=seen["grad_norm"],
        evaluations=evaluations_of(others),
        paces=_paces(others),
        spikes={found.rule.of: steps[found.spikes].tolist() for found in count_spikes(seen, _RULES)}
        if len(steps)
        else {},
        problem="; ".join(filter(None, [folder.metrics_problem(), damaged_lines(record), strange])),
    )


def _paces(rows: list[dict[str, Any]]) -> list[tuple[float, float]]:
    told = [(number(row.get("step")), number(row.get("seconds"))) for row in rows if row.get("kind") == "pace"]
    return [(step, seconds) for step, seconds in told if step is not None and seconds is not None]
