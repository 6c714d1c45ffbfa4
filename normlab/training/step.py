"""One optimiser step: forward, loss, gradients, clipping, update.

The step changes parameters, moments and buffers in place, and returns its measurements as tensors on the device. The
CPU never waits for the device.

Shapes: R runs, B batch, T time; `...R` marks an axis that only stacked runs have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normlab.model.runner import ModelRunner
from normlab.ranks import Ranks
from normlab.stats.measure.core import CoreStatistics, Measurement, MicroBatch
from normlab.training.optim import Hyperparameters, Optimizer, tensor_norms


@dataclass(slots=True)
class StepOutput:
    """The measurements of one step."""

    loss: Tensor
    """Loss before the update, nats/token, shape (...R)."""
    grad_norm: Tensor
    """L2 norm of the whole gradient before clipping, shape (...R)."""
    clip_factor: Tensor
    """Factor by which clipping multiplied the gradient, at most 1, shape (...R)."""
    alive: Tensor
    """Whether each run was updated, shape (...R); false from its first non-finite loss or gradient on."""
    measured: Measurement | None = None
    """The core statistics of a measured step."""


@dataclass(slots=True)
class Step:
    """A training step of a model runner. Calling it with a batch updates the state and returns a `StepOutput`."""

    runner: ModelRunner
    optimizer: Optimizer
    accumulation: int = 1
    clip: float | Tensor | None = None
    """Largest gradient norm: one number, one for each stacked run, or None."""
    autocast: Callable[[], AbstractContextManager] = nullcontext
    project: Callable[[Mapping[str, Tensor]], None] | None = None
    """The placement's projection of the parameters after each update, in place."""
    measure: CoreStatistics | None = None
    """Computes the core statistics of measured steps."""
    ranks: Ranks = Ranks()
    """The ranks that share each batch."""
    alive: Tensor = field(init=False)
    """Whether each run is still updated, shape (...R); part of the state."""
    _old_grads: list[Tensor] = field(default_factory=list, init=False, repr=False)
    """The last step's gradients, kept until the next backward pass reuses their memory. If they were freed earlier on a
    CPU, the system would take back the pages and fault them in again: 6 % of a step at depth 6, width 384."""

    def __post_init__(self) -> None:
        """Start with all runs alive."""
        device = next(iter(self.runner.params.values())).device
        self.alive = torch.ones(self.runner.run_shape, dtype=torch.bool, device=device)

    def __call__(
        self,
        tokens: Tensor,
        targets: Tensor,
        hyperparameters: Hyperparameters | Sequence[Hyperparameters],
        *,
        measured: bool = False,
    ) -> StepOutput:
        """Make one update from tokens and targets, shape (...R, B, T).

        Args:
            tokens: The inputs.
            targets: The next tokens.
            hyperparameters: The hyperparameters of the single run, or of each stacked run.
            measured: Whether to compute the core statistics.
        """
        old_buffers = self.runner.buffers
        measure = self.measure if measured else None
        self.runner.train(True)
        loss, grads, micro_batches = self._gradients(tokens, targets, measure)
        norms = tensor_norms(list(grads.values()), self.runner.run_shape)
        grad_norm, factor = self._clip(list(grads.values()), norms)
        self.alive = self.alive & loss.isfinite() & grad_norm.isfinite()
        before = None if measure is None else measure.before_update(norms)
        with torch.no_grad():
            self.optimizer.update(self.runner.params, grads, hyperparameters, self.alive)
            if self.project is not None:
                self._project(self.project)
        measurement = None if measure is None or before is None else measure.after_update(micro_batches, before)
        self._restore_buffers(old_buffers)
        self._old_grads = list(grads.values())
        return StepOutput(loss, grad_norm, factor, self.alive, measurement)

    def _gradients(
        self, tokens: Tensor, targets: Tensor, measure: CoreStatistics | None
    ) -> tuple[Tensor, dict[str, Tensor], list[MicroBatch]]:
        """Return the mean loss and gradient over the micro-batches of all ranks, and the measurements of this rank's.

        The gradients are summed over ranks after the backward pass. `DistributedDataParallel` would sum them during the
        backward pass, but its hooks work only with `backward`, and this step calls `autograd.grad`.
        """
        runner, parts = self.runner, self.accumulation
        token_count, all_parts = tokens.shape[-2] * tokens.shape[-1] * self.ranks.count, parts * self.ranks.count
        names, params = list(runner.params), list(runner.params.values())
        batch_axis = len(runner.run_shape)
        loss: Tensor | None = None
        sums: list[Tensor] = []
        micro_batches: list[MicroBatch] = []
        for part_tokens, part_targets in zip(
            tokens.chunk(parts, batch_axis), targets.chunk(parts, batch_axis), strict=True
        ):
            with self.autocast():
                part_loss, statistics, taps = (
                    runner.loss(part_tokens, part_targets)
                    if measure is None
                    else runner.loss(part_tokens, part_targets, measure.selection, taps=measure.taps)
                )
            self._old_grads.clear()
            gradients = list(torch.autograd.grad(part_loss.sum() / all_parts, [*params, *taps], materialize_grads=True))
            for index, parameter in enumerate(
                params
            ):  # one at a time, so that memory never holds two copies of all gradients
                gradients[index] = _with_strides_of(parameter, gradients[index])
            grads, tap_grads = gradients[: len(params)], gradients[len(params) :]
            del gradients
            if measure is not None:
                micro_batches.append(measure.of_micro_batch(statistics, tap_grads, token_count))
            part_loss = part_loss.detach()
            if loss is None:
                loss, sums = part_loss, grads
            else:
                loss = loss + part_loss
                torch._foreach_add_(sums, grads)
        assert loss is not None
        loss = loss / all_parts
        self.ranks.sum_([*sums, loss])
        return loss, dict(zip(names, sums, strict=True)), micro_batches

    @torch.no_grad()
    def _clip(self, grads: list[Tensor], norms: Tensor) -> tuple[Tensor, Tensor]:
        """Clip the gradients in place; return the total norm and the clip factor, (...R) each."""
        norm = torch.linalg.vector_norm(norms, dim=0)
        if self.clip is None:
            return norm, torch.ones_like(norm)
        factor = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        if self.runner.run_shape:
            for grad in grads:
                grad.mul_(factor.view(-1, *[1] * (grad.dim() - 1)))
        else:
            torch._foreach_mul_(grads, factor)
        return norm, factor

    def _project(self, project: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Project the parameters of the runs that are alive; the other runs keep their bits."""
        params = self.runner.params
        projected = {name: p.detach().clone() for name, p in params.items()}
        project(projected)
        for name, p in params.items():
            p.copy_(torch.where(self._alive_mask(p), projected[name], p))

    @torch.no_grad()
    def _restore_buffers(self, old: dict[str, Tensor]) -> None:
        """Undo the forward pass's updates of running statistics in runs that are not alive."""
        changed = {name: new for name, new in self.runner.buffers.items() if new is not old[name]}
        if changed:
            kept = {name: torch.where(self._alive_mask(new), new, old[name]) for name, new in changed.items()}
            self.runner.set_buffers(kept)

    def _alive_mask(self, tensor: Tensor) -> Tensor:
        """Return `alive` in a shape that broadcasts against the tensor."""
        return self.alive.view(-1, *[1] * (tensor.dim() - 1)) if self.runner.run_shape else self.alive


def _with_strides_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient with the parameter's memory layout, which the fused kernels require.

    A transposed use of a parameter gives a transposed gradient: `backward` corrects it, `autograd.grad` does not.
    """
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
