"""A record's evaluations: the validation loss over training, with the time in steps that it took to get there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from normlab.store.runs import RunFolder
from normlab.store.schema import number


class Evaluation(NamedTuple):
    """A validation loss, after so many updates."""

    step: int
    seconds: float | None
    """Time in steps until then, without evaluations and checkpoints; None where the record does not say."""
    loss: float
    """Nats a token."""


def evaluations(folder: RunFolder) -> list[Evaluation]:
    """Every evaluation of a run, oldest first.

    Raises:
        StoreError: The metrics are there and cannot be opened.
    """
    return evaluations_of(folder.rows(without="train").rows)


def evaluations_of(rows: Iterable[Mapping[str, Any]]) -> list[Evaluation]:
    """Every evaluation among the rows of a run, oldest first."""
    found: list[Evaluation] = []
    seconds: dict[float, float | None] = {0: 0.0}
    for row in rows:
        step, loss = number(row.get("step")), number(row.get("loss"))
        if step is None or not math.isfinite(step):
            continue
        if row.get("kind") == "pace":
            seconds[step] = number(row.get("seconds"))
        elif row.get("kind") == "eval" and loss is not None:
            found.append(Evaluation(int(step), seconds.get(step), loss))
    return found
