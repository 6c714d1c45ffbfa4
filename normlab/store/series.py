"""A run's metrics over training: every training step as arrays, and the evaluations.

Shapes: S steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from normlab.base.errors import StoreError
from normlab.store.format import CLIP_FACTOR_KEY, COMPLETED_STATES
from normlab.store.runs import RunFolder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NAMES = ("step", "loss", "grad_norm", "clip_factor")


def series(folder: RunFolder) -> dict[str, NDArray[np.float64]]:
    """Return each of `NAMES` for every step of a run, (S,), oldest first.

    Raises:
        StoreError: The run has taken no step yet, its rows are gone, or its record cannot be read.
    """
    rows = folder.rows("train").rows
    if not rows:
        status = folder.read_status()
        if status.state in COMPLETED_STATES and status.steps == 0:
            raise StoreError(f"run {folder.run_id} has no steps (train.steps=0); choose another run")
        if status.step or status.state in COMPLETED_STATES:
            raise StoreError(steps_are_gone(folder))
        raise StoreError(f"run {folder.run_id} has taken no step yet; try again when it has")
    return series_of(rows)


def steps_are_gone(folder: RunFolder) -> str:
    """Return the problem of a run that has taken steps and has no row of one."""
    return f"{folder.metrics_path}: the steps of run {folder.run_id} are gone; restore a copy"


def series_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[np.float64]]:
    """Return each of `NAMES` for some training rows, (S,), in their order."""
    import numpy as np  # slow to import, and a summary of runs reads evaluations alone

    series: dict[str, NDArray[np.float64]] = {}
    for name in NAMES:
        key = CLIP_FACTOR_KEY if name == "clip_factor" else name
        series[name] = np.array([row[key] for row in rows], dtype=np.float64)
    return series


class Evaluation(NamedTuple):
    """A validation loss after `step` updates."""

    step: int
    seconds: float | None
    """Training time until then, without evaluations and checkpoints; None if its row was damaged."""
    loss: float
    """Nats/token."""
    loss_ema: float | None = None
    """With the average of the weights (`eval.ema`)."""


def evaluations(folder: RunFolder) -> list[Evaluation]:
    """Return every evaluation of a run, oldest first."""
    return evaluations_of(folder.rows("eval", "pace").rows)


def evaluations_of(rows: Iterable[Mapping[str, Any]]) -> list[Evaluation]:
    # The pace of a step is recorded before the evaluation at it, so that its seconds are known then.
    result: list[Evaluation] = []
    seconds: dict[int, float] = {0: 0.0}
    for row in rows:
        if row["kind"] == "pace":
            seconds[row["step"]] = row["seconds"]
        elif row["kind"] == "eval":
            result.append(Evaluation(row["step"], seconds.get(row["step"]), row["loss"], row.get("loss_ema")))
    return result
