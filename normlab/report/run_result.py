"""The result of each run, as the reports that compare runs need it: its state and its losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from normlab.report.settings import LR, SEEDS, Setting, setting, settings_of
from normlab.store.outcome import OUTCOMES, loss_of, outcome_of, references_of
from normlab.store.query import Entry
from normlab.store.reading import HOW_TO_FIX
from normlab.store.schema import COMPLETED_STATES, DAMAGED, DIVERGED, FAILED, FINISHED, STATUS_FILE, number

UNFINISHED = "unfinished"
STATES = (*OUTCOMES, FAILED, DAMAGED, UNFINISHED)
"""The outcome of a run that has finished, or the reason why it has none."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run with its state, its losses and the settings that they depend on."""

    entry: Entry
    state: str
    """One of `STATES`."""
    lr: float
    """Peak learning rate."""
    replicate: tuple[Setting, Setting]
    """The seeds of the weights and of the data order. Runs of two cells with the same replicate form a pair."""
    loss: float
    """Final validation loss, nats/token; infinite if the run diverged, NaN if it has no outcome."""
    best_loss: float
    """Lowest validation loss of any evaluation; infinite if the run diverged, NaN if it has no outcome."""
    has_learned: bool
    """Whether it finished with a loss below the band around the unigram entropy, so that its lr is usable."""
    settings: Mapping[str, Any]
    """What the loss depends on, as `settings_of`."""

    @property
    def has_loss(self) -> bool:
        """Whether the run has an outcome, and with it a loss, finite or infinite."""
        return self.state in OUTCOMES

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.entry.folder.run_id

    @property
    def damage(self) -> str:
        """What is damaged in the run's record; empty if nothing is."""
        if self.state != DAMAGED:
            return ""
        no_loss = f"{self.entry.folder.path / STATUS_FILE}: has no final validation loss; {HOW_TO_FIX[STATUS_FILE]}"
        return self.entry.problem or no_loss


def read_result(entry: Entry) -> RunResult | None:
    """Return a run's result; None where its record names no learning rate."""
    lr = number(setting(entry.run, LR))
    if lr is None or not math.isfinite(lr):
        return None
    state = UNFINISHED
    if entry.state in (FAILED, DAMAGED):
        state = entry.state
    elif entry.state in COMPLETED_STATES:
        state = outcome_of(entry.run, entry.state, entry.status) or DAMAGED  # a record without a final loss
    final, lowest = (loss_of(entry.status.get(key)) for key in ("val_loss", "best_val_loss"))
    loss = best_loss = math.nan
    if state == DIVERGED:
        loss = best_loss = math.inf
    elif state in OUTCOMES and final is not None:
        loss, best_loss = final, final if lowest is None else lowest
    return RunResult(
        entry=entry,
        state=state,
        lr=lr,
        replicate=(setting(entry.run, SEEDS[0]), setting(entry.run, SEEDS[1])),
        loss=loss,
        best_loss=best_loss,
        has_learned=state == FINISHED and references_of(entry.run, entry.status).level(loss) == 0,
        settings=settings_of(entry.run),
    )
