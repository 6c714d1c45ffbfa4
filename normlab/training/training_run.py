"""A training run: its folder, its trackers and its progress. A loop trains one, or those of a pack.

The loop updates the progress and gives the rows to the trackers; the writer's thread writes the record. What it writes
is therefore a copy: the loop may be some steps ahead.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from torch import Tensor

from normlab.base.errors import StoreError
from normlab.catalogue.statistics.profiles import Profiles
from normlab.config.schema import RunConfig
from normlab.model.groups import ParameterRow
from normlab.store.format import CLIP_FACTOR_KEY, DIVERGED
from normlab.store.run_json import Identity, Run
from normlab.store.runs import RunFolder
from normlab.store.status import Divergence, RecordedPack, Status, StepNumbers
from normlab.tracking.console import MetricsRow, Tracker
from normlab.training import checkpoint
from normlab.training.optim import kept_step, learning_rate
from normlab.training.writer import Writer

PLUGINS = "plugins"
"""The folder of the copies of plugins in a run's folder."""
FRESH = "start another run beside it with run.fresh=true"


@dataclass(slots=True)
class Progress:
    """The part of status.json that grows with the run; a checkpoint holds a copy."""

    step: int = 0
    """Updates made."""
    train_loss: float | None = None
    val_loss: float | None = None
    val_loss_batch_statistics: float | None = None
    val_loss_ema: float | None = None
    best_val_loss: float | None = None
    best_val_step: int | None = None
    seconds: float = 0.0
    """Time in steps, without evaluations and checkpoints, over all processes of the run."""
    changes_at_resume: list[str] = field(default_factory=list)
    """Each resume with other code or on another machine: the step, and what differed."""
    graph_problem: str | None = None
    """Why its steps could not be captured as CUDA graphs, where `train.graph` is on; it trains without them."""


@dataclass(slots=True)
class TrainingRun:
    """The state of one run beside its tensors, and its record."""

    config: RunConfig
    folder: RunFolder

    # What the run is: a start sets these one after the other. Only rank 0 has them, since only it writes.
    identity: Identity = field(init=False)
    described: Run = field(init=False)
    """The run.json that a start today writes; since the model is built."""
    on_record: Run = field(init=False)
    """The run.json that the folder holds: `described`, or that of the first start; since the folder is prepared."""

    pack: RecordedPack = RecordedPack()
    warnings: list[str] = field(default_factory=list)
    parameters: Sequence[ParameterRow] = ()
    """The table of the parameters of its initial model."""
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    """The weights of a new run that does not draw them, by name, until its first checkpoint holds them."""
    trackers: Sequence[Tracker] = ()
    writer: Writer = field(default_factory=Writer)
    """The writer of all runs of the loop."""
    progress: Progress = field(default_factory=Progress)
    diverged: Divergence | None = None
    divergence_written: bool = False
    """Whether status.json already has the state diverged, which no later state of the pack replaces."""
    saved_step: int | None = None
    """The step of the newest checkpoint that this process wrote or resumed from."""
    last_finite: StepNumbers | None = None
    """The last step with finite loss and gradient norm."""
    recorded: tuple[Progress, Divergence | None] = field(default_factory=lambda: (Progress(), None))
    """`progress` and `diverged` after the rows that were written last."""

    # The record. The loop calls these methods; the writer's thread writes.

    def add_steps(self, first: int, scalars: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
        """Update the progress by some steps and return their rows, up to the step that diverged, if one did.

        Args:
            scalars: For each step the loss, the gradient norm, the clip factor, and whether the run is still trained.
        """
        rows: list[dict[str, Any]] = []
        for step, (loss, grad_norm, clip_factor, alive) in enumerate(scalars, first):
            lr = learning_rate(self.config.optim, self.config.train.steps, step)
            values = {"loss": loss, "grad_norm": grad_norm, CLIP_FACTOR_KEY: clip_factor, "lr": lr}
            rows.append({"kind": "train", "step": step, **values})
            if not alive:
                # The update was not made: the state is that after `step` updates.
                self.diverged = Divergence(step, loss, grad_norm, last_finite=self.last_finite)
                self.progress.step = step
                self.cut_statistics(step + 1)  # passes between later steps measured a run that had diverged
                return rows
            if math.isfinite(grad_norm):  # an overflow in float16 makes no update, and the run goes on
                self.last_finite = StepNumbers(step, loss, grad_norm)
            self.progress.train_loss = loss
        self.progress.step = first + len(scalars)
        return rows

    def record_evaluation(self, losses: Mapping[str, float]) -> None:
        progress = self.progress
        progress.val_loss = losses["loss"]
        progress.val_loss_batch_statistics = losses.get("loss_batch_statistics")
        progress.val_loss_ema = losses.get("loss_ema")
        best = progress.best_val_loss
        if best is None:
            best = math.inf
        if losses["loss"] < best:  # false for NaN
            progress.best_val_loss, progress.best_val_step = losses["loss"], progress.step
        self.record_rows([{"kind": "eval", "step": progress.step, **losses}])

    def record_rows(self, rows: Sequence[MetricsRow]) -> None:
        """Add rows to the record, and give them to the trackers."""
        self.writer.add(partial(self.write_rows, rows, replace(self.progress), self.diverged))
        for tracker in self.trackers:
            tracker.log(rows)

    def record_statistics(self, tier: str, profiles: Profiles) -> None:
        self.writer.add(partial(self.write_statistics, self.folder.statistics.append, tier, profiles))

    def cut_statistics(self, step: int) -> None:
        self.writer.add(partial(self.write_statistics, self.folder.statistics.truncate, step))

    def status(self, state: str, peak_memory_bytes: int | None) -> Status:
        progress, train = self.progress, self.config.train
        numbers: dict[str, Any] = asdict(progress) | {"changes_at_resume": tuple(progress.changes_at_resume)}
        tokens = progress.step * train.batch_size * self.config.model.context
        return Status(
            state=state,
            **numbers,
            steps=train.steps,
            tokens=tokens,
            tokens_per_s=tokens / progress.seconds if progress.seconds else None,
            peak_memory_bytes=peak_memory_bytes,
            checkpoint=self.saved_step,
            pack=self.pack,
            diverged=self.diverged,
        )

    def meta(self) -> dict[str, Any]:
        """Return the content of meta.json of a checkpoint, but for the length of the record."""
        meta: dict[str, Any] = {"progress": asdict(self.progress), "last_finite": None, "diverged": None}
        if self.last_finite is not None:
            meta["last_finite"] = asdict(self.last_finite)
        if self.diverged is not None:
            meta["diverged"] = asdict(self.diverged)
        return meta

    def use_recorded(self) -> None:
        """Go back to the progress that the record has: after an error, the loop may be ahead of it."""
        self.progress, self.diverged = self.recorded

    # What the writer's thread does.

    def write_rows(self, rows: Sequence[MetricsRow], progress: Progress, diverged: Divergence | None) -> None:
        """Append rows to the record; `progress` and `diverged` are those of the last one."""
        self.folder.append(rows)
        self.recorded = progress, diverged

    def write_statistics(self, write: Callable[..., None], *arguments: Any) -> None:
        self.folder.check_place()
        write(*arguments)

    def write_status(self, status: Status) -> None:
        """Write status.json, with the newest checkpoint that is written by now."""
        self.folder.write_status(asdict(replace(status, checkpoint=self.saved_step)))
        self.divergence_written = status.state == DIVERGED

    def save(self, step: int, meta: Mapping[str, Any], tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Write a checkpoint."""
        self.folder.check_place()
        self.folder.sync()
        # The previous checkpoint is intact: this process wrote it, or resumed from it.
        kept: list[int] = []
        for kept_of in (self.saved_step, kept_step(self.config.optim, self.config.train.steps)):
            if kept_of is not None:
                kept.append(kept_of)
        # With the length of the record, a resume cuts off the rows of later steps.
        meta = {**meta, "metrics_bytes": self.folder.size()}
        checkpoint.save(self.folder.path / checkpoint.FOLDER, step, tensors(), meta, keep=kept)
        self.saved_step = step

    def keep(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the weights of a step, beside all those kept before."""
        self.folder.check_place()
        meta = {"diverged": None}
        checkpoint.save(self.folder.path / checkpoint.WEIGHTS_FOLDER, step, tensors, meta, keep=range(step))

    def restore(self, saved: checkpoint.Checkpoint, tensors: Mapping[str, Tensor]) -> None:
        """Restore the progress, and the state into `tensors` in place, from a checkpoint of this run.

        Raises:
            StoreError: The checkpoint belongs to another run.
        """
        meta = saved.meta
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        saved_shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in saved.tensors.items()}
        if shapes != saved_shapes:
            raise StoreError(
                f"the checkpoint of step {saved.step} holds other tensors than this run; restore this run's own, or "
                f"{FRESH}"
            )
        for name, tensor in tensors.items():
            tensor.copy_(saved.tensors[name])
        self.progress = Progress(**meta["progress"])
        self.saved_step = saved.step
        self.last_finite = msgspec.convert(meta["last_finite"], StepNumbers | None)
        self.diverged = msgspec.convert(meta["diverged"], Divergence | None)
