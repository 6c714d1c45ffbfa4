"""The status of a run: `Status`. Training writes it to status.json; everything else reads it by attribute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from normlab.store.files import is_file_name
from normlab.store.format import DIVERGED, FINISHED, STATES
from normlab.store.outcome import LARGEST_LOSS, MARGIN, OUTCOMES, STUCK, References, format_loss, outcome
from normlab.store.reading import Count

YEAR_10000 = 253402300800
"""The first Unix time, in seconds, that no date of Python's holds."""

State = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(STATES)})$")]
Outcome = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(OUTCOMES)})$")]


@dataclass(frozen=True, slots=True)
class RecordedPack:
    sweep: str | None = None
    number: int | None = None
    runs: tuple[str, ...] = ()
    """The ids of its runs; empty for a run that trained alone."""

    def __post_init__(self) -> None:
        # They become parts of paths, and the record may be a stranger's.
        names = list(self.runs)
        if self.sweep is not None:
            names.append(self.sweep)
        for name in names:
            if not is_file_name(name):
                raise ValueError(f"{name!r:.40} is not the name of a run or a sweep")


@dataclass(frozen=True, slots=True)
class StepNumbers:
    step: Count
    loss: float
    grad_norm: float

    def __str__(self) -> str:
        return f"loss {format_loss(self.loss)}, gradient norm {self.grad_norm:.4g}"


@dataclass(frozen=True, slots=True)
class Divergence:
    step: Count
    loss: float | None = None
    grad_norm: float | None = None
    reason: str | None = None
    """None where the loss or the gradient was NaN or infinite."""
    last_finite: StepNumbers | None = None

    def __post_init__(self) -> None:
        if self.reason is None and (self.loss is None or self.grad_norm is None):
            raise ValueError("a divergence has neither a reason nor a loss and a gradient norm")

    def __str__(self) -> str:
        text = self.reason or f"loss {format_loss(self.loss)}, gradient norm {self.grad_norm:.4g}"
        last = self.last_finite
        if last is None:
            return text
        return f"{text}; last finite at step {last.step}: {last}"


@dataclass(frozen=True, slots=True)
class RowsDigest:
    """The number of rows and the SHA-256 of a file of a completed run; readers compare them."""

    rows: Count
    sha256: str


@dataclass(frozen=True, slots=True)
class SpikeCount:
    """The spikes of a run by one rule."""

    spikes: Count
    of_steps: Count
    """Number of steps that the rule judges."""


@dataclass(frozen=True, slots=True)
class Status:
    """The content of status.json. Losses are in nats/token."""

    state: State
    """A reader uses `RunRecord.state`, which knows killed runs too."""
    run_id: str = ""
    """The id of the run; empty if there is no status.json."""
    step: Count = 0
    """Updates made."""
    train_loss: float | None = None
    val_loss: float | None = None
    val_loss_batch_statistics: float | None = None
    """Validation loss in training mode, for a norm that computes something else in that mode."""
    val_loss_ema: float | None = None
    """Validation loss of the mean of the weights (`eval.ema`)."""
    best_val_loss: float | None = None
    best_val_step: Count | None = None
    seconds: float = 0.0
    """Time in steps, without evaluations and checkpoints, over all processes of the run."""
    changes_at_resume: tuple[str, ...] = ()
    """Each resume with other code or on another machine: the step, and what differed."""
    graph_problem: str | None = None
    """Why its steps could not be captured as CUDA graphs, where `train.graph` is on; it trains without them."""
    steps: Count = 0
    tokens: Count = 0
    tokens_per_s: float | None = None
    peak_memory_bytes: Count | None = None
    checkpoint: Count | None = None
    pack: RecordedPack = RecordedPack()
    diverged: Divergence | None = None
    error: str | None = None
    initial_val_loss: float | None = None
    """Validation loss before the first update; None before the run is completed."""
    outcome: Outcome | None = None
    """None before the run is completed."""
    metrics: RowsDigest | None = None
    """None before the run is completed."""
    statistics: Mapping[str, RowsDigest] | None = None
    """By the name of each file; None before the run is completed."""
    spikes: Mapping[str, SpikeCount] | None = None
    """Spikes by rule; None if they could not be counted."""
    updated: float | None = None
    """Unix time of the file, seconds."""

    def __post_init__(self) -> None:
        # Training in float32 has no larger finite loss, so the file is not a run's. An infinite one is: it diverged.
        for loss in (self.train_loss, self.val_loss, self.best_val_loss, self.initial_val_loss):
            if loss is not None and LARGEST_LOSS < abs(loss) < math.inf:
                raise ValueError(f"{loss} is no loss")
        if self.updated is not None and not 0 <= self.updated < YEAR_10000:
            raise ValueError(f"{self.updated} is no time")

    @property
    def pack_size(self) -> int:
        """Number of runs that trained together with this one, itself included."""
        return max(1, len(self.pack.runs))

    @property
    def missing(self) -> str:
        """The field that a completed run must have and that this status lacks; empty if it has all."""
        required = {FINISHED: ("outcome", "val_loss", "best_val_loss"), DIVERGED: ("diverged",)}
        for name in required.get(self.state, ()):
            if getattr(self, name) is None:
                return name
        return ""

    def completed(self, references: References, last_finite: StepNumbers | None) -> Status:
        """Return the last status of a run with its outcome; a final loss that is a divergence makes it diverged.

        Args:
            references: The run's reference losses.
            last_finite: The last training step with finite loss and gradient norm.
        """
        final = self.val_loss
        if self.state == DIVERGED:
            return replace(self, initial_val_loss=references.initial, outcome=DIVERGED)
        if self.state != FINISHED or final is None:
            return self
        best = final if self.best_val_loss is None else min(self.best_val_loss, final)
        name = outcome(final, best, references)
        if name == STUCK and self.steps == 0:
            name = FINISHED  # an untrained model is not stuck
        result = replace(self, initial_val_loss=references.initial, outcome=name)
        if name != DIVERGED:
            return result
        divergence = Divergence(
            self.step, self.train_loss, reason=_reason_of_divergence(final, references), last_finite=last_finite
        )
        return replace(result, state=DIVERGED, diverged=divergence)


def _reason_of_divergence(final: float, references: References) -> str:
    """Return why a final validation loss is a divergence."""
    reason = f"its final validation loss is {format_loss(final)}"
    if not math.isfinite(final):
        return reason
    start = f"ln V {references.uniform:.4f}"
    if references.initial is not None:
        start += f" and the initial loss {references.initial:.4f}"
    return f"{reason}, more than {MARGIN:g} nat above {start}: worse than a uniform guess"
