"""Validation loss over training, with the training time it took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from normlab.store.runs import RunFolder
from normlab.store.schema import number


class Evaluation(NamedTuple):
    """A validation loss after `step` updates."""

    step: int
    seconds: float | None
    """Training time until then, without evaluations and checkpoints; None where the record has none."""
    loss: float
    """Nats/token."""


def evaluations(folder: RunFolder) -> list[Evaluation]:
    """Return every evaluation of a run, oldest first.

    Raises:
        StoreError: The metrics exist and cannot be read.
    """
    return evaluations_of(folder.rows(exclude="train").rows)


def evaluations_of(rows: Iterable[Mapping[str, Any]]) -> list[Evaluation]:
    """Return every evaluation among the rows of a run, in their order."""
    result: list[Evaluation] = []
    seconds: dict[float, float | None] = {0: 0.0}
    for row in rows:
        step, loss = number(row.get("step")), number(row.get("loss"))
        if step is None or not math.isfinite(step):
            continue
        if row.get("kind") == "pace":
            seconds[step] = number(row.get("seconds"))
        elif row.get("kind") == "eval" and loss is not None:
            result.append(Evaluation(int(step), seconds.get(step), loss))
    return result
