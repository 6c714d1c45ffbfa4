"""The outcome of each run, as what compares runs needs it: one of `ENDINGS`, and a loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from normlab.report.settings import LR, REPLICATE, Setting, setting, told
from normlab.store.outcome import OUTCOMES, loss_of, outcome_of, references_of
from normlab.store.query import Entry
from normlab.store.reading import HOW_TO_FIX
from normlab.store.schema import COMPLETED_STATES, DAMAGED, DIVERGED, FAILED, FINISHED, STATUS_FILE, number

UNFINISHED = "unfinished"
ENDINGS = (*OUTCOMES, FAILED, DAMAGED, UNFINISHED)
"""An outcome of a run that has ended, or what it is instead: its training failed, or its record is damaged, so that how
it ended is not known."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run, and how it came out."""

    entry: Entry
    ending: str
    """One of `ENDINGS`."""
    lr: float
    """Peak learning rate."""
    replicate: tuple[Setting, Setting]
    """Its seeds: of the weights, and of the order of the data. Runs of other cells with the same are its pairs."""
    loss: float
    """Final validation loss, nats/token; infinite where it diverged, NaN where it has not come out."""
    best: float
    """The lowest validation loss of any evaluation; infinite where it diverged, NaN where it has not come out."""
    has_learned: bool
    """Whether it finished with a loss below the band around the unigram entropy: its learning rate is usable."""
    told: Mapping[str, Any]
    """What its loss depends on, by word."""

    @property
    def came_out(self) -> bool:
        """Whether there is a result: a loss, or divergence."""
        return self.ending in OUTCOMES

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.entry.folder.run_id

    @property
    def damage(self) -> str:
        """What is wrong with the run's record; empty where the record is whole."""
        if self.ending != DAMAGED:
            return ""
        no_loss = f"{self.entry.folder.path / STATUS_FILE}: names no final validation loss; {HOW_TO_FIX[STATUS_FILE]}"
        return self.entry.problem or no_loss


def outcome(entry: Entry) -> Outcome | None:
    """How a run came out; None where its record does not even say what it was."""
    lr = number(setting(entry.run, LR))
    if lr is None or not math.isfinite(lr):
        return None
    ending = _ending(entry)
    final, lowest = (loss_of(entry.status.get(key)) for key in ("val_loss", "best_val_loss"))
    loss = best = math.nan
    if ending == DIVERGED:
        loss = best = math.inf
    elif ending in OUTCOMES and final is not None:
        loss, best = final, final if lowest is None else lowest
    return Outcome(
        entry=entry,
        ending=ending,
        lr=lr,
        replicate=(setting(entry.run, REPLICATE[0]), setting(entry.run, REPLICATE[1])),
        loss=loss,
        best=best,
        has_learned=ending == FINISHED and references_of(entry.run, entry.status).level(loss) == 0,
        told=told(entry.run),
    )


def _ending(entry: Entry) -> str:
    if entry.state in (FAILED, DAMAGED):
        return entry.state
    if entry.state not in COMPLETED_STATES:
        return UNFINISHED
    return outcome_of(entry.run, entry.state, entry.status) or DAMAGED  # a record without a final loss
