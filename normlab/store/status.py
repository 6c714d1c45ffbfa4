"""The status of a run, typed: `Status`. Training writes it to status.json; everything else reads it by attribute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from normlab.store.format import DIVERGED, FINISHED
from normlab.store.outcome import MARGIN, OUTCOMES, STUCK, References, format_loss, outcome
from normlab.store.parts import finite, json_field, json_part, mapping_or_none, number, parse_part, text, texts


@dataclass(frozen=True, slots=True)
class RecordedPack:
    """The pack in which the run trained."""

    sweep: str | None = json_field(text)
    number: float | None = json_field(finite)
    runs: tuple[str, ...] = json_field(texts)
    """The ids of its runs; empty for a run that trained alone."""


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """A training step."""

    step: float | None = json_field(finite)
    loss: float | None = json_field(number)
    grad_norm: float | None = json_field(number)

    def __str__(self) -> str:
        grad_norm = "?" if self.grad_norm is None else f"{self.grad_norm:.4g}"
        return f"loss {format_loss(self.loss)}, gradient norm {grad_norm}"


@dataclass(frozen=True, slots=True)
class Divergence(StepNumbers):
    """The step that diverged."""

    reason: str | None = json_field(text, optional=True)
    """None where the loss or the gradient was NaN or infinite."""
    last_finite: StepNumbers | None = json_field(lambda tree: parse_part(StepNumbers, tree) if tree else None)
    """The last step with finite loss and gradient norm."""

    def __str__(self) -> str:
        text = self.reason or StepNumbers.__str__(self)
        last = self.last_finite
        return text if last is None else f"{text}; last finite at step {or_unknown(last.step)}: {last}"


@dataclass(frozen=True, slots=True)
class Status:
    """The content of status.json. Losses are in nats/token."""

    state: str | None = json_field(text)
    """One of `format.STATES`; a reader uses `RunRecord.state`, which knows killed runs too."""
    step: float | None = json_field(finite)
    """Updates made."""
    train_loss: float | None = json_field(number)
    val_loss: float | None = json_field(number)
    val_loss_batch_statistics: float | None = json_field(number)
    """Validation loss in training mode, for a norm that computes something else in that mode."""
    best_val_loss: float | None = json_field(number)
    best_val_step: float | None = json_field(finite)
    seconds: float | None = json_field(finite)
    """Time in steps, without evaluations and checkpoints, over all processes of the run."""
    changes_at_resume: tuple[str, ...] = json_field(texts)
    """Each resume with other code or on another machine: the step, and what differed."""
    steps: float | None = json_field(finite)
    tokens: float | None = json_field(finite)
    tokens_per_s: float | None = json_field(finite)
    peak_memory_bytes: float | None = json_field(finite)
    checkpoint: float | None = json_field(finite)
    """Step of the newest checkpoint."""
    pack: RecordedPack = json_part(RecordedPack, optional=True)
    """The pack in which the run last trained."""
    diverged: Divergence = json_part(Divergence, optional=True)
    error: str | None = json_field(text, optional=True)
    initial_val_loss: float | None = json_field(number, optional=True)
    """Validation loss before the first update; None before the run is completed."""
    outcome: str | None = json_field(lambda value: value if value in OUTCOMES else None, optional=True)
    """None before the run is completed."""
    metrics: Mapping[str, Any] | None = json_field(mapping_or_none, optional=True)
    """Number of rows and SHA-256 of the metrics of a completed run, by which readers notice a changed file."""
    spikes: Mapping[str, Any] | None = json_field(mapping_or_none, optional=True)
    """Spikes by rule; None if they could not be counted."""
    updated: float | None = json_field(finite, optional=True)
    """Unix time of the file, seconds."""

    @property
    def pack_size(self) -> int:
        """Number of runs that trained together with this one, itself included."""
        return max(1, len(self.pack.runs))

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
        reason = _reason_of_divergence(final, references)
        divergence = Divergence(self.step, self.train_loss, reason=reason, last_finite=last_finite)
        return replace(result, state=DIVERGED, diverged=divergence)


def _reason_of_divergence(final: float, references: References) -> str:
    """Return why a final validation loss is a divergence."""
    reason = f"its final validation loss is {format_loss(final)}"
    if math.isfinite(final):
        losses = {"ln V": references.uniform, "the initial loss": references.initial}
        start = " and ".join(f"{name} {value:.4f}" for name, value in losses.items() if value is not None)
        reason += f", more than {MARGIN:g} nat above {start}: worse than a uniform guess"
    return reason


def or_unknown(value: float | None) -> str:
    """Return a number as text, and a question mark for None."""
    return "?" if value is None else f"{value}"
