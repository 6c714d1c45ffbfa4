"""How a run came out, as what compares runs needs it: one outcome a run, divergence being one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from normlab.report.settings import LR, REPLICATE, Setting, dig, setting, told
from normlab.store.query import Entry
from normlab.store.reading import MENDING
from normlab.store.schema import DAMAGED, DIVERGED, FAILED, FINISHED, STATUS_FILE, number

ENDED, UNFINISHED = "ended", "unfinished"
"""Ended: to its last step, with a loss that is a number. Beside these two a run has diverged, or its training has
failed, or its record is damaged, so that how it ended is not known."""

LARGEST = 3.5e38
"""What no finite loss is above: the largest float32 is just below."""
PLATEAU = 0.99
"""A loss from this share of the corpus's unigram cross entropy on is no lower than the plateau.

One in a hundred below it, since the baseline is of the whole validation text, and a run is judged on windows of it.
"""
PLATEAU_RULE = (
    f"never left the unigram plateau: no validation loss of it was below {PLATEAU:g} of the corpus's unigram cross "
    "entropy (it has learned how often tokens occur, and nothing of their context), though none was infinite or NaN; "
    "fell back: one was, and the last is not"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run, and how it came out."""

    entry: Entry
    ending: str
    lr: float
    """Peak learning rate."""
    replicate: tuple[Setting, ...]
    """Its seeds: of the weights, and of the order of the data. Runs of other cells with the same are its pairs."""
    loss: float
    """Final validation loss, nats a token; infinite where it diverged, NaN where it has not come out."""
    best: float
    """The lowest validation loss of any evaluation; infinite where it diverged, NaN where it has not come out."""
    on_plateau: bool
    fell_back: bool
    told: Mapping[str, Any]
    """What its loss depends on, by word."""

    @property
    def came_out(self) -> bool:
        """Whether there is a result: a loss, or divergence."""
        return self.ending in (ENDED, DIVERGED)

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.entry.folder.run_id

    @property
    def damage(self) -> str:
        """What is wrong with the run's record; empty where the record is whole."""
        if self.ending != DAMAGED:
            return ""
        no_loss = f"{self.entry.folder.path / STATUS_FILE}: names no final validation loss; {MENDING[STATUS_FILE]}"
        return self.entry.problem or no_loss


def outcome(entry: Entry) -> Outcome | None:
    """How a run came out; None where its record does not even say what it was."""
    lr = number(setting(entry.run, LR))
    if lr is None or not math.isfinite(lr):
        return None
    status = entry.status
    ending = _ending(entry)
    final, best, unigram = (
        loss_of(value)
        for value in (status.get("val_loss"), status.get("best_val_loss"), dig(entry.run, "corpus.baselines.unigram"))
    )
    loss = {ENDED: final, DIVERGED: math.inf}.get(ending)
    lowest = {ENDED: final if best is None else best, DIVERGED: math.inf}.get(ending)
    on_plateau = fell_back = False
    if ending == ENDED and unigram is not None and loss is not None and lowest is not None:
        on_plateau = lowest >= PLATEAU * unigram
        fell_back = not on_plateau and loss >= PLATEAU * unigram
    return Outcome(
        entry=entry,
        ending=ending,
        lr=lr,
        replicate=tuple(setting(entry.run, word) for word in REPLICATE),
        loss=math.nan if loss is None else loss,
        best=math.nan if lowest is None else lowest,
        on_plateau=on_plateau,
        fell_back=fell_back,
        told=told(entry.run),
    )


def loss_of(value: Any) -> float | None:
    """A loss of the record; None for what is none, and for a number that no training in float32 can give."""
    known = number(value)
    return None if known is None or LARGEST < abs(known) < math.inf else known


def _ending(entry: Entry) -> str:
    if entry.state in (FAILED, DAMAGED):
        return entry.state
    if entry.state == DIVERGED:
        return DIVERGED
    if entry.state != FINISHED:
        return UNFINISHED
    final = loss_of(entry.status.get("val_loss"))
    if final is None:
        return DAMAGED
    # Trained to its end on finite losses, and is none where it is judged (running statistics can do that).
    return ENDED if math.isfinite(final) else DIVERGED
