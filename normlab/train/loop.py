"""The loop of one run: batches to the step, what it saw to the record, and a checkpoint now and then.

At each boundary between two steps things happen in one order: the record is brought up to date, then the
evaluation that is due, then the checkpoint that is due, then a request to stop is looked at. A checkpoint
therefore knows exactly how long the record was, and going on from it repeats nothing.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normlab.config import RunConfig
from normlab.data.batches import Batches, validation_windows
from normlab.data.corpus import Corpus
from normlab.errors import StoreError
from normlab.model.init import build_model, seed_of
from normlab.placements.base import projects
from normlab.stats.profiles import Profiles
from normlab.stats.statistic import CORE
from normlab.store.runs import RunFolder
from normlab.tracking.base import Row, Sink
from normlab.train import checkpoint
from normlab.train.bound import Alone
from normlab.train.evaluate import Validation
from normlab.train.looks import Looks
from normlab.train.optim import branch_step, build_optimizer, hyper_of, is_decayed, learning_rate
from normlab.train.resolve import Resolved
from normlab.train.signals import StopRequest
from normlab.train.step import Step, StepOutput


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


@dataclass(slots=True)
class Loop:
    """One run, from where it stands to its end."""

    config: RunConfig
    resolved: Resolved
    corpus: Corpus
    folder: RunFolder
    sinks: Sequence[Sink]
    progress: Progress = field(default_factory=Progress)
    diverged: dict[str, Any] | None = None

    bound: Alone = field(init=False)
    step: Step = field(init=False)
    batches: Batches = field(init=False)
    validation: Validation = field(init=False)
    looks: Looks = field(init=False)
    _pending: list[StepOutput] = field(default_factory=list)
    _last_finite: dict[str, Any] | None = None
    _saved_step: int | None = None

    def __post_init__(self) -> None:
        """Build the model, its optimiser and its data."""
        config, device = self.config, self.resolved.torch_device
        micro = config.train.batch_size // config.train.accumulation
        # The data first: a corpus that is too short is refused before anything large is made.
        self.batches = Batches(
            self.corpus.train, config.model.context, config.train.batch_size, config.data.seed, device
        )
        tokens, targets = validation_windows(self.corpus.val, config.model.context, config.eval.sequences)
        self.validation = Validation(
            tokens_NT=tokens.to(device),
            targets_NT=targets.to(device),
            batch_size=micro,
            autocast=self.resolved.autocast(),
            batch_statistics=config.norm.batch_statistics,
        )
        model = build_model(config, self.corpus.tokenizer.vocab_size).to(device)
        self.bound = Alone(model, compiled=self.resolved.compile == "on")
        decayed = [name for name, p in self.bound.params.items() if is_decayed(config.optim, p)]
        optimizer = build_optimizer(config.optim, self.bound.params, decayed, self.bound.lead)
        self.looks = Looks(config, self.bound, optimizer, self.validation, self._tell)
        self.step = Step(
            self.bound,
            optimizer,
            accumulation=config.train.accumulation,
            clip=config.optim.clip,
            autocast=self.resolved.autocast(),
            project=config.placement.project if projects(config.placement) else None,
            measure=self.looks.measure,
        )

    # The state, whole.

    def tensors(self) -> dict[str, Tensor]:
        """The state as a flat dictionary: what a checkpoint holds."""
        optimizer = self.step.optimizer
        state = {f"param/{name}": tensor for name, tensor in self.bound.params.items()}
        state |= {f"buffer/{name}": tensor for name, tensor in self.bound.buffers.items()}
        for kind, moments in optimizer.moments.items():
            state |= {f"{kind}/{name}": tensor for name, tensor in moments.items()}
        assert self.step.alive is not None
        return state | {"count": optimizer.count, "alive": self.step.alive}

    @torch.no_grad()
    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Take the state and the progress from a checkpoint of this run.

        Raises:
            StoreError: It is another run's.
        """
        meta = _known_meta(saved)
        if meta["run_id"] != self.folder.run_id:
            raise StoreError(
                f"the checkpoint of step {saved.step} is of run {meta['run_id']}; put back this run's own, or "
                "start another run beside it with run.fresh=true"
            )
        state = self.tensors()
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
        if shapes != {name: (tensor.shape, tensor.dtype) for name, tensor in saved.tensors.items()}:
            raise StoreError(
                f"the checkpoint of step {saved.step} holds other tensors than this run has: it is of another "
                "normlab; put back the run's own, or start another run beside it with run.fresh=true"
            )
        for name, tensor in state.items():
            tensor.copy_(saved.tensors[name])
        self.progress = Progress(**meta["progress"])
        self._saved_step = saved.step
        self._last_finite, self.diverged = meta["last_finite"], meta["diverged"]

    def save(self) -> None:
        """Write a checkpoint of the state as it stands."""
        self.folder.sync()
        meta = {
            "progress": {name: getattr(self.progress, name) for name in Progress.__slots__},
            "last_finite": self._last_finite,
            "diverged": self.diverged,
            "record_bytes": self.folder.size(),
            "run_id": self.folder.run_id,
        }
        # The one before it is known to be whole: this session wrote it, or began from it.
        older = (self._saved_step, branch_step(self.config.optim, self.config.train.steps))
        keep = [step for step in older if step is not None]
        checkpoint.save(self.folder.path / checkpoint.FOLDER, self.progress.step, self.tensors(), meta, keep=keep)
        self._saved_step = self.progress.step

    # The loop.

    def run(self, stop: StopRequest) -> str:
        """Train to the last step, a stop request, or divergence; return the run's state."""
        steps, progress = self.config.train.steps, self.progress
        if self.diverged is not None:  # killed between that checkpoint and the status
            return "diverged"
        if progress.val_loss is None:
            self._evaluate()
        self._write_status("running")
        since = time.perf_counter()
        while progress.step < steps and stop.received is None:
            since += self.looks.before(progress.step)
            self._pending.append(self._one_step(progress.step))
            progress.step += 1
            due_eval, due_checkpoint = self._due(progress.step)
            if not (due_eval or due_checkpoint or stop.received or len(self._pending) == self.config.train.log_every):
                continue
            self._drain(time.perf_counter() - since)
            if self.diverged is not None:
                if progress.step != self._saved_step:
                    self.save()
                return "diverged"
            if due_eval:
                self._evaluate()
            if progress.step == steps:
                self.looks.at_end(steps)
            if due_checkpoint:
                self.save()
            if due_eval or due_checkpoint:
                self._write_status("running")
            since = time.perf_counter()
        if progress.step == steps:
            return "finished"
        if progress.step != self._saved_step:
            self.save()
        return "interrupted"

    def _one_step(self, step: int) -> StepOutput:
        # A norm that draws numbers in its forward draws the same ones after a resume.
        torch.manual_seed(seed_of(self.config.seed, f"step/{step}") % 2**63)
        tokens, targets = self.batches.batch(step)
        hyper = hyper_of(self.config.optim, self.config.train.steps, step)
        return self.step(tokens, targets, hyper, measured=self.looks.is_measured(step))

    def _due(self, step: int) -> tuple[bool, bool]:
        """Whether an evaluation and a checkpoint are due after `step` updates."""
        config, last = self.config, step == self.config.train.steps
        evaluation = last or (config.eval.every > 0 and step % config.eval.every == 0)
        every = config.train.checkpoint_every
        branch = step == branch_step(config.optim, config.train.steps)
        return evaluation, last or branch or (every > 0 and step % every == 0)

    def _drain(self, seconds: float) -> None:
        """Bring the numbers of the pending steps from the device, in one copy, into the record."""
        first = self.progress.step - len(self._pending)
        told = [torch.stack([out.loss, out.grad_norm, out.clip, out.alive.to(out.loss.dtype)]) for out in self._pending]
        measured = {step: out.measured for step, out in enumerate(self._pending, first) if out.measured is not None}
        seen = torch.cat([*told, *(one.values for one in measured.values())]).cpu()
        scalars, inside = seen[: 4 * len(told)].view(-1, 4).tolist(), seen[4 * len(told) :].numpy()
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
                    "last_finite": self._last_finite,
                }
                self.progress.step = step
                self.folder.arrays.cut(step + 1)  # of what a pass between two steps has seen of it since
                break
            self._last_finite = {"step": step, "loss": loss, "grad_norm": grad_norm}
            self.progress.train_loss = loss
        self.progress.seconds += seconds
        tokens = len(self._pending) * self.config.train.batch_size * self.config.model.context
        pace = {"kind": "pace", "step": self.progress.step, "seconds": self.progress.seconds}
        looks: list[Profiles] = []
        for step, one in measured.items():
            if self.diverged is None or step <= self.diverged["step"]:
                looks.append(self.looks.profiles(step, one, inside[: len(one.columns)]))
            inside = inside[len(one.columns) :]
        self._record([*rows, {**pace, "tokens_per_s": tokens / max(seconds, 1e-9)}], looks)
        self._pending.clear()

    def _evaluate(self) -> None:
        losses, progress = self.validation(self.bound), self.progress
        progress.val_loss = losses["loss"]
        progress.val_loss_batch_statistics = losses.get("loss_batch_statistics")
        best = math.inf if progress.best_val_loss is None else progress.best_val_loss
        if losses["loss"] < best:  # never where it is NaN
            progress.best_val_loss, progress.best_val_step = losses["loss"], progress.step
        self._record([{"kind": "eval", "step": progress.step, **losses}])

    def _record(self, rows: Sequence[Row], looks: Sequence[Profiles] = ()) -> None:
        self.folder.append(rows)
        for sink in self.sinks:
            sink.log(rows)
        for look in looks:
            self._tell(CORE, look)

    def _tell(self, tier: str, look: Profiles) -> None:
        self.folder.arrays.append(tier, look)
        for sink in self.sinks:
            sink.look(look)

    def status(self, state: str) -> dict[str, Any]:
        """The content of status.json."""
        progress, train = self.progress, self.config.train
        tokens = progress.step * train.batch_size * self.config.model.context
        return {
            "state": state,
            **{name: getattr(progress, name) for name in Progress.__slots__},
            "steps": train.steps,
            "tokens": tokens,
            "tokens_per_s": tokens / progress.seconds if progress.seconds else None,
            "peak_memory_bytes": _peak_memory(self.resolved.device),
            "checkpoint": self._saved_step,
            **({"diverged": self.diverged} if self.diverged else {}),
        }

    def _write_status(self, state: str) -> None:
        self.folder.write_status(self.status(state))


META = ("progress", "last_finite", "diverged", "record_bytes", "run_id")
"""What a checkpoint's meta.json holds besides the tensors."""


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


def _peak_memory(device: str) -> int | None:
    """Most bytes that torch held on a GPU; on a CPU, the process's largest resident size."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return None
    import resource

    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def copied_rows(folder: RunFolder) -> Sequence[Mapping[str, Any]]:
    """The rows that are in a record before its loop begins."""
    return folder.rows().rows
