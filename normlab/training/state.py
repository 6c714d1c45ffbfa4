"""The state of training: the tensors of all runs and the number of updates, saved as checkpoints and restored.

A checkpoint is written by another thread (`writer.py`) while the next steps are taken. It is therefore written from a
copy of the state on the host, which no step changes.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from normlab.model.runner import ModelRunner
from normlab.model.stack import empty_on_host, storages
from normlab.system.ranks import Ranks
from normlab.training.checkpoint import Checkpoint
from normlab.training.step import Step
from normlab.training.training_run import TrainingRun
from normlab.training.writer import Writer

StateTensors = Mapping[str, Mapping[str, Tensor]]
"""Tensors by the prefix of their names in a checkpoint, then by the rest of the name."""


class TrainingState:
    """The state of a single run, or of the runs of a pack, whose tensors have the axis of runs first."""

    def __init__(
        self, runs: Sequence[TrainingRun], runner: ModelRunner, step: Step, writer: Writer, ranks: Ranks
    ) -> None:
        self.runs, self.runner, self.step = runs, runner, step
        self.step_count = 0
        """Updates made by the runs that have not diverged."""
        self._writer, self._ranks = writer, ranks
        self._is_single = len(runs) == 1
        self._copy: dict[str, dict[str, Tensor]] = {}
        """The copy on the host; empty before the first checkpoint."""
        self._last_save: Future[None] | None = None

    # The tensors.

    def of_run(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of one run by name, as its checkpoint holds them; of stacked runs, views of the stacks."""
        return self._of_run(index, self._tensors(), self.runs[index].progress.step)

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        optimizer, loss_scale, average = self.step.optimizer, self.step.loss_scale, self.step.average
        tensors = {"param/": self.runner.params, "buffer/": self.runner.buffers}
        for kind, moments in optimizer.moments.items():
            tensors[f"{kind}/"] = moments
        if average is not None:
            tensors["average/"] = average.tensors
        tensors[""] = {"alive": self.step.alive, "count": optimizer.count}
        if loss_scale is not None:
            tensors[""] |= loss_scale.tensors()
        return tensors

    def _of_run(self, index: int, state: StateTensors, step: int) -> dict[str, Tensor]:
        by_name: dict[str, Tensor] = {}
        for prefix, tensors in state.items():
            for name, tensor in tensors.items():
                by_name[prefix + name] = tensor
        if self._is_single:
            return by_name
        # The stack has one count of updates. A run that diverged has made fewer than the stack.
        count = torch.full_like(by_name.pop("count"), step)
        return {name: tensor[index] for name, tensor in by_name.items()} | {"count": count}

    # Restore.

    @torch.no_grad()
    def restore(self, saved: Sequence[Checkpoint]) -> None:
        """Restore each run from its checkpoint; all must be of one step, except those of diverged runs.

        Raises:
            StoreError: A checkpoint belongs to another run.
        """
        for index, (run, checkpoint) in enumerate(zip(self.runs, saved, strict=True)):
            run.restore(checkpoint, self.of_run(index))
        steps = [run.progress.step for run in self.runs if run.diverged is None]
        self.step_count = max(steps, default=self.runs[0].progress.step)
        if not self._is_single:
            # Each run has restored a copy of the count, not the one of the stack.
            self.step.optimizer.count.fill_(self.step_count)

    def share(self) -> None:
        """Give the state that rank 0 has restored to the other ranks."""
        run = self.runs[0]
        numbers = (self.step_count, run.progress, run.last_finite, run.diverged, run.saved_step)
        numbers = self._ranks.broadcast(numbers, list(self.of_run(0).values()))
        self.step_count, run.progress, run.last_finite, run.diverged, run.saved_step = numbers

    # Save.

    def save(self) -> None:
        """Copy the state, and add a checkpoint of each run that has made updates since its last one."""
        if self._last_save is not None:
            self._writer.wait(self._last_save)  # the copy is free, and `saved_step` is that of the last checkpoint
        due = [index for index, run in enumerate(self.runs) if run.saved_step != run.progress.step]
        if not due or self._ranks.rank:
            return
        self._copy_to_host()
        jobs: list[Callable[[], None]] = []
        for index in due:
            run = self.runs[index]
            step = run.progress.step
            jobs.append(partial(run.save, step, run.meta(), partial(self._of_run, index, self._copy, step)))
        self._last_save = self._writer.add(*jobs)

    @torch.no_grad()
    def _copy_to_host(self) -> None:
        """Copy the state to the host, one copy for each buffer of a pack."""
        state = self._tensors()
        # All checkpoints use the memory of the first copy: page-locked memory is slow to allocate.
        if not self._copy:
            self._copy = {prefix: empty_on_host(tensors) for prefix, tensors in state.items()}
        for prefix, tensors in state.items():
            for copy, tensor in zip(storages(self._copy[prefix]), storages(tensors), strict=True):
                copy.copy_(tensor, non_blocking=True)
        if self.step.alive.is_cuda:
            torch.cuda.current_stream().synchronize()  # here, so that the time of the next steps is theirs alone

    @torch.no_grad()
    def keep_weights(self) -> None:
        """Copy the weights to the host, and keep those of each run that has not diverged."""
        if self._ranks.rank:
            return
        weights = {f"param/{name}": tensor for name, tensor in self.runner.params.items()}
        weights |= {f"buffer/{name}": tensor for name, tensor in self.runner.buffers.items()}
        jobs: list[Callable[[], None]] = []
        for index, run in enumerate(self.runs):
            if run.diverged is not None:
                continue
            copies: dict[str, Tensor] = {}
            for name, tensor in weights.items():
                of_run = tensor if self._is_single else tensor[index]
                copies[name] = of_run.to("cpu", copy=True)
            jobs.append(partial(run.keep, self.step_count, copies))
        self._writer.add(*jobs)
