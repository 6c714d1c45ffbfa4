"""One run of a loop: what it is, where its record goes, who listens, and how far it has come."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from normlab.config import RunConfig
from normlab.errors import StoreError
from normlab.stats.profiles import Profiles
from normlab.store.runs import RunFolder
from normlab.tracking.base import Row, Sink
from normlab.train import checkpoint
from normlab.train.optim import branch_step, learning_rate


@dataclass(slots=True)
class Progress:
    """What status.json says of a run, as it grows; a checkpoint holds a copy."""

    step: int = 0
    """Updates made."""
    train_loss: float | None = None
    val_loss: float | None = None
    val_loss_batch_statistics: float | None = None
    best_val_loss: float | None = None
    best_val_step: int | None = None
    seconds: float = 0.0
    """Time in steps, without evaluations and checkpoints, over all sessions of the run."""
    elsewhere: list[str] = field(default_factory=list)
    """Where it was gone on with by other code or on another machine than it began with: the step, and what differed."""


META = ("progress", "last_finite", "diverged", "record_bytes", "run_id")
"""What a checkpoint's meta.json holds besides the tensors."""


@dataclass(slots=True)
class Member:
    """One run: a loop has one, or those of a pack."""

    config: RunConfig
    folder: RunFolder
    sinks: Sequence[Sink] = ()
    pack: Mapping[str, Any] | None = None
    """The pack of a sweep that it trains in now: `sweep`, `number`, and `runs`, the ids of all its members."""
    progress: Progress = field(default_factory=Progress)
    diverged: dict[str, Any] | None = None
    """Where it did, and what was seen."""
    settled: bool = False
    """Whether its status says that it diverged: then nothing that happens to the others changes it."""
    saved_step: int | None = None
    """The step of the newest checkpoint that this session wrote, or began from."""
    last_finite: dict[str, Any] | None = None
    """The last step whose loss and gradient norm were finite, with both."""

    # What was seen, into the record.

    def drain(self, first: int, scalars: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
        """Rows of the steps from `first` on, up to the one in which the run diverged, if it did.

        Args:
            first: The first step.
            scalars: Of each step the loss, the gradient's norm, the clip factor, and whether the update was made.
        """
        rows: list[dict[str, Any]] = []
        for step, (loss, grad_norm, clip, alive) in enumerate(scalars, first):
            lr = learning_rate(self.config.optim, self.config.train.steps, step)
            rows.append({"kind": "train", "step": step, "loss": loss, "grad_norm": grad_norm, "clip": clip, "lr": lr})
            if not alive:
                # Seen before the update that it would have spoiled: the state is that after `step` updates.
                self.diverged = {
                    "step": step,
                    "loss": loss,
                    "grad_norm": grad_norm,
                    "last_finite": self.last_finite,
                }
                self.progress.step = step
                self.folder.statistics.truncate(step + 1)  # of what a pass between two steps has seen of it since
                return rows
            self.last_finite = {"step": step, "loss": loss, "grad_norm": grad_norm}
            self.progress.train_loss = loss
        self.progress.step = first + len(scalars)
        return rows

    def evaluated(self, losses: Mapping[str, float]) -> None:
        """Note what an evaluation found, and record it."""
        progress = self.progress
        progress.val_loss = losses["loss"]
        progress.val_loss_batch_statistics = losses.get("loss_batch_statistics")
        best = math.inf if progress.best_val_loss is None else progress.best_val_loss
        if losses["loss"] < best:  # never where it is NaN
            progress.best_val_loss, progress.best_val_step = losses["loss"], progress.step
        self.record([{"kind": "eval", "step": progress.step, **losses}])

    def record(self, rows: Sequence[Row]) -> None:
        """Rows, to the record and to whoever listens."""
        self.folder.append(rows)
        for sink in self.sinks:
            sink.log(rows)

    def tell(self, tier: str, look: Profiles) -> None:
        """What was seen inside, to the record and to whoever listens."""
        self.folder.statistics.append(tier, look)
        for sink in self.sinks:
            sink.log_statistics(look)

    def status(self, state: str, peak_memory_bytes: int | None) -> dict[str, Any]:
        """The content of status.json."""
        progress, train = self.progress, self.config.train
        tokens = progress.step * train.batch_size * self.config.model.context
        return {
            "state": state,
            **{name: getattr(progress, name) for name in Progress.__slots__},
            "steps": train.steps,
            "tokens": tokens,
            "tokens_per_s": tokens / progress.seconds if progress.seconds else None,
            "peak_memory_bytes": peak_memory_bytes,
            "checkpoint": self.saved_step,
            **({"pack": self.pack} if self.pack else {}),
            **({"diverged": self.diverged} if self.diverged else {}),
        }

    # Checkpoints.

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Write a checkpoint of the run's state as it stands."""
        self.folder.sync()
        meta = {
            "progress": {name: getattr(self.progress, name) for name in Progress.__slots__},
            "last_finite": self.last_finite,
            "diverged": self.diverged,
            "record_bytes": self.folder.size(),
            "run_id": self.folder.run_id,
        }
        # The one before it is known to be whole: this session wrote it, or began from it.
        older = (self.saved_step, branch_step(self.config.optim, self.config.train.steps))
        keep = [step for step in older if step is not None]
        checkpoint.save(self.folder.path / checkpoint.FOLDER, self.progress.step, tensors, meta, keep=keep)
        self.saved_step = self.progress.step

    def take(self, saved: checkpoint.Checkpoint, tensors: Mapping[str, Tensor]) -> None:
        """Go to where a checkpoint of this run stands: its state into `tensors`, in place, and its progress.

        Raises:
            StoreError: It is another run's.
        """
        meta = _known_meta(saved)
        if meta["run_id"] != self.folder.run_id:
            raise StoreError(
                f"the checkpoint of step {saved.step} is of run {meta['run_id']}; put back this run's own, or "
                "start another run beside it with run.fresh=true"
            )
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if shapes != {name: (tensor.shape, tensor.dtype) for name, tensor in saved.tensors.items()}:
            raise StoreError(
                f"the checkpoint of step {saved.step} holds other tensors than this run has: it is of another "
                "normlab; put back the run's own, or start another run beside it with run.fresh=true"
            )
        for name, tensor in tensors.items():
            tensor.copy_(saved.tensors[name])
        self.progress = Progress(**meta["progress"])
        self.saved_step = saved.step
        self.last_finite, self.diverged = meta["last_finite"], meta["diverged"]


def _known_meta(saved: checkpoint.Checkpoint) -> dict[str, Any]:
    """A checkpoint's meta without the fields that only another normlab knows, which are named."""
    try:
        meta = {name: saved.meta[name] for name in META}
        progress = {name: meta["progress"][name] for name in Progress.__slots__}
    except (KeyError, TypeError) as error:
        raise StoreError(
            f"the checkpoint of step {saved.step} has no {error} in its meta.json: it is of another normlab; put "
            "back the run's own, or start another run beside it with run.fresh=true"
        ) from error
    if unknown := sorted({*saved.meta} - {*META} | {*meta["progress"]} - {*progress}):
        print(
            f"normlab: the checkpoint of step {saved.step} has fields that this normlab does not know: "
            f"{', '.join(unknown)}",
            file=sys.stderr,
        )
    return meta | {"progress": progress}
