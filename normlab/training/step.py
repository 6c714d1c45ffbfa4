"""One optimiser step: forward, loss, gradients, clipping, update.

The step changes its state in place (parameters, moments, buffers, `alive`), and returns its measurements as tensors on
the device. The CPU never waits for the device. Two steps without statistics run the same operations on the same memory,
so that a CUDA graph of one could replay the other (`tests/gpu/`).

Shapes: R runs, B batch, T time; `...R` marks an axis that only stacked runs have.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normlab.base.plugins import COUNTER
from normlab.catalogue.statistics.profiles import StatisticColumn
from normlab.model.instrument import StatisticsSelection
from normlab.model.runner import ModelRunner, Tensors
from normlab.model.stack import Stack, norms_of_each, storages
from normlab.system.ranks import Ranks, SumInBackward, sum_in_backward
from normlab.training.average import WeightAverage
from normlab.training.measure.core import CoreStatistics, Measurement
from normlab.training.optim import Hyperparameters, Optimizer

INITIAL_SCALE = 2.0**16
LARGEST_SCORE = ("largest_score", lambda attention: attention.largest_H)
"""The statistic that `qk_clip` needs: its name, and its function of an `AttentionView`."""
GROWTH_INTERVAL = 2000
"""Updates in succession after which the loss scale doubles; a gradient that is not finite halves it."""
SMALLEST_SCALE = 1.0
"""With a smaller scale, the run counts as diverged: its gradients overflow without any scale."""


class LossScale:
    """The dynamic factor of the loss in float16, whose smallest numbers are larger than many gradients.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; rule and numbers of `torch.amp.GradScaler`.

    It changes in place on the device. `GradScaler` reads on the host whether to call the optimiser, so a CUDA graph
    could not replay it.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL_SCALE, device=device)
        """Shape (), a power of two: multiplying by it rounds nothing."""
        self._updates = torch.zeros((), dtype=torch.int32, device=device)
        """Updates since the scale last changed."""
        self._overflow = torch.zeros((), device=device)
        """1 if a gradient of this step is not finite, else 0."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by name."""
        return {"loss_scale": self.scale, "loss_scale_updates": self._updates}

    @torch.no_grad()
    def unscale_(self, gradients: list[Tensor]) -> None:
        """Divide the gradients of all parameters by the scale, in place, and note whether all are finite."""
        self._overflow.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._overflow, self.scale.reciprocal())

    @torch.no_grad()
    def adjust(self) -> Tensor:
        """Change the scale after the gradients of a step are known; return whether they are finite, shape ()."""
        torch._amp_update_scale_(self.scale, self._updates, self._overflow, 2.0, 0.5, GROWTH_INTERVAL)
        return self._overflow == 0


def _pop_largest_scores(statistics: dict[StatisticColumn, Tensor]) -> Tensor:
    """Remove the largest attention scores from the statistics of a forward pass, and return them by layer."""
    columns = [column for column in statistics if column.statistic == LARGEST_SCORE[0]]
    columns.sort(key=lambda column: column.layer)
    return torch.stack([statistics.pop(column) for column in columns])


@dataclass(slots=True)
class StepOutput:
    scalars: Tensor
    """Four numbers of each run, (4, ...R).

    - the loss before the update, nats/token;
    - the L2 norm of the whole gradient before clipping;
    - the factor by which clipping multiplied the gradient, at most 1; 0 where float16 overflowed: no update;
    - whether the run is still trained: 0 from its first non-finite loss or gradient on. With a loss scale, 0 from its
      first non-finite loss on, or from the step that makes the scale less than 1.
    """
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
    average: WeightAverage | None = None
    """The mean of the parameters over the updates; part of the state."""
    qk_clip: float | None = None
    """Largest attention score of a head (`OptimConfig.qk_clip`), or None."""
    loss_scale: LossScale | None = None
    """The loss scale of a single run in float16; part of the state."""
    alive: Tensor = field(init=False)
    """Whether each run is still updated, shape (...R); part of the state."""

    def __post_init__(self) -> None:
        device = next(iter(self.runner.params.values())).device
        self.alive = torch.ones(self.runner.run_shape, dtype=torch.bool, device=device)

    def __call__(
        self,
        tokens: Tensor,
        targets: Tensor,
        hyperparameters: Sequence[Hyperparameters] | Tensor,
        *,
        measured: bool = False,
    ) -> StepOutput:
        """Make one update from tokens and targets, shape (...R, B, T).

        Args:
            hyperparameters: Those of the single run, one for each family of parameters, or `coefficients_of` stacked
                runs.
            measured: Whether to compute the core statistics.
        """
        old_buffers = self.runner.buffers
        measure = self.measure if measured else None
        try:
            return self._compute(tokens, targets, hyperparameters, old_buffers, measure)
        except RuntimeError:
            # A failed capture of a CUDA graph has computed nothing: the step is computed again, from the old buffers.
            self.runner.set_buffers(old_buffers)
            raise

    def measure_batch(self, tokens: Tensor, targets: Tensor) -> Measurement:
        """Return the core statistics of a batch, shape (...R, B, T), without an update; nothing changes."""
        assert self.measure is not None
        buffers = self.runner.buffers
        self.runner.train(True)
        _, grads, micro_batches, _ = self._gradients(tokens, targets, self.measure)
        _, norms = self._norms(grads, of_each="grad_norm" in self.measure.names)
        measurement = self.measure.after_update(micro_batches, self.measure.before_update(norms))
        self.runner.set_buffers(buffers)
        return measurement

    def _compute(
        self, tokens: Tensor, targets: Tensor, hyperparameters: Sequence[Hyperparameters] | Tensor,
        old_buffers: Tensors, measure: CoreStatistics | None,
    ) -> StepOutput:  # fmt: skip
        self.runner.train(True)

        # Gradients of all micro-batches.
        loss, grads, micro_batches, scores_LRH = self._gradients(tokens, targets, measure)

        # Statistics from before the update; they see the gradient before it is clipped.
        grad_norm, norms = self._norms(grads, of_each=measure is not None and "grad_norm" in measure.names)
        before = [] if measure is None else measure.before_update(norms)

        # Clipping.
        clip_factor = self._clip(grads, grad_norm)

        # Which runs are updated: a run whose loss or gradient is not finite keeps its state from now on. With a loss
        # scale, gradients that are not finite only skip the update, until the scale cannot be halved any more.
        if self.loss_scale is None:
            self.alive &= loss.isfinite() & grad_norm.isfinite()
            updated = self.alive
        else:
            is_finite = self.loss_scale.adjust()
            self.alive &= loss.isfinite() & (self.loss_scale.scale >= SMALLEST_SCALE)
            updated = self.alive & is_finite
            clip_factor = clip_factor.where(updated, 0.0)

        # The update of the parameters, and what depends on the new ones.
        with torch.no_grad():
            self.optimizer.update(self.runner.params, grads, hyperparameters, updated)
            if self.project is not None:
                self._project(self.project, updated)
            if scores_LRH is not None:
                self._clip_scores(scores_LRH, updated)
            if self.average is not None:
                self.average.add(self.runner.params, self.optimizer.count, updated)

        # Statistics of the update, and running statistics.
        measurement = None if measure is None else measure.after_update(micro_batches, before)
        self._write_buffers(old_buffers)
        return StepOutput(torch.stack([loss, grad_norm, clip_factor, self.alive.to(loss.dtype)]), measurement)

    def _gradients(
        self, tokens: Tensor, targets: Tensor, measure: CoreStatistics | None
    ) -> tuple[Tensor, Tensors, list[Measurement], Tensor | None]:
        """Return the mean loss and gradient over the micro-batches of all ranks, and the measurements of this rank's.

        With `qk_clip` also the largest attention score of each head, (L, ...R, H) for L blocks.

        The gradients are summed over ranks while the backward pass of the last micro-batch goes on.
        """
        runner, parts = self.runner, self.accumulation
        token_count, all_parts = tokens.shape[-2] * tokens.shape[-1] * self.ranks.count, parts * self.ranks.count
        params, batch_axis = list(runner.params.values()), len(runner.run_shape)
        scale = None if self.loss_scale is None else self.loss_scale.scale
        selection, has_taps = self._selection(measure), measure is not None and measure.taps

        loss: Tensor | None = None
        sums: Tensors = {}
        micro_batches: list[Measurement] = []
        largest_scores: list[Tensor] = []
        batches = zip(tokens.chunk(parts, batch_axis), targets.chunk(parts, batch_axis), strict=True)
        for part, batch in enumerate(batches, 1):
            # Forward pass.
            with self.autocast():
                part_loss, statistics, taps = runner.loss(*batch, selection, taps=has_taps, scale=scale)
            if self.qk_clip is not None:
                largest_scores.append(_pop_largest_scores(statistics))

            # Backward pass.
            scaled_loss = part_loss.sum() if scale is None else part_loss * scale
            inputs = [*params, *taps]
            gradients, in_backward = self._backward(scaled_loss / all_parts, inputs, sums, is_last=part == parts)

            # Statistics of the micro-batch; then only the gradients of the parameters are left.
            tap_grads = gradients[len(params) :]
            del gradients[len(params) :]
            if measure is not None:
                micro_batches.append(measure.of_micro_batch(statistics, tap_grads, token_count, scale))

            # Sums over the micro-batches. Those over the ranks have the earlier micro-batches in them.
            if in_backward:
                sums = {}
                for segment in in_backward:
                    sums |= segment.wait()
                gradients = [sums[name] for name in runner.params]
            grads = runner.name_gradients(gradients)
            del gradients
            part_loss = part_loss.detach()
            loss = part_loss if loss is None else loss + part_loss
            if in_backward or not sums:
                sums = grads
            else:
                torch._foreach_add_(storages(sums), storages(grads))

        assert loss is not None
        loss = loss / all_parts
        self.ranks.sum_(loss)
        if self.loss_scale is not None:
            self.loss_scale.unscale_(storages(sums))
        scores_LRH = self.ranks.largest(torch.stack(largest_scores).amax(0)) if largest_scores else None
        return loss, sums, micro_batches, scores_LRH

    def _backward(
        self, loss: Tensor, inputs: Sequence[Tensor], sums: Tensors, *, is_last: bool
    ) -> tuple[list[Tensor], list[SumInBackward]]:
        """Return the gradients of one micro-batch's share of the loss, and the sums over ranks that are under way.

        In the backward pass of the last micro-batch, the gradients of each segment and `sums`, those of the
        micro-batches before it, are summed over the ranks.
        """
        segments = self.runner.params_by_segment() if is_last and self.ranks.count > 1 else []
        with sum_in_backward(segments, sums) as in_backward:
            gradients = torch.autograd.grad(loss, inputs, materialize_grads=True)
        return list(gradients), in_backward

    def _selection(self, measure: CoreStatistics | None) -> StatisticsSelection | None:
        """Return the statistics that the forward pass computes: those of a measured step, and that of `qk_clip`."""
        selection = None if measure is None else measure.selection
        if self.qk_clip is None:
            return selection
        selection = selection or {}
        return {**selection, "attention": (*selection.get("attention", ()), LARGEST_SCORE)}

    @torch.no_grad()
    def _norms(self, grads: Tensors, *, of_each: bool) -> tuple[Tensor, Tensor | None]:
        """Return the norm of the whole gradient, (...R), and that of each parameter's, (P, ...R).

        For stacked runs, the second is None unless `of_each`, because it needs more operations.
        """
        if isinstance(grads, Stack):
            norm = torch.linalg.vector_norm(grads.buffer, dim=1)
            if not of_each:
                return norm, None
            return norm, norms_of_each(grads)
        norms = norms_of_each(grads)
        return torch.linalg.vector_norm(norms, dim=0), norms

    @torch.no_grad()
    def _clip(self, grads: Tensors, norm: Tensor) -> Tensor:
        """Clip the gradients in place; return the clip factor, (...R)."""
        if self.clip is None:
            return torch.ones_like(norm)
        factor = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        if isinstance(grads, Stack):
            grads.buffer.mul_(factor[:, None])
        else:
            torch._foreach_mul_(list(grads.values()), factor)
        return factor

    def _clip_scores(self, scores_LRH: Tensor, updated: Tensor) -> None:
        """Scale queries and keys of each head whose largest score is above `qk_clip`, so that it would be `qk_clip`.

        Both have the factor sqrt(qk_clip / score). Source: Kimi Team 2025, arXiv:2507.20534, section 2.1 (QK-Clip).
        """
        assert self.qk_clip is not None
        factors_LRH = (self.qk_clip / scores_LRH.clamp(min=self.qk_clip)).sqrt().where(updated[..., None], 1)
        for layer, factors_RH in enumerate(factors_LRH):
            for leaf in ("q.weight", "q.bias", "k.weight", "k.bias"):
                parameter = self.runner.params.get(f"blocks.{layer}.attn.{leaf}")
                if parameter is None:
                    continue
                # The rows of a matrix, and the numbers of a bias, are those of one head after the other.
                by_head = parameter.unflatten(updated.dim(), (scores_LRH.shape[-1], -1))
                ones = [1] * (by_head.dim() - factors_RH.dim())
                by_head.mul_(factors_RH.view(*factors_RH.shape, *ones))

    def _project(self, project: Callable[[Mapping[str, Tensor]], None], updated: Tensor) -> None:
        """Project the parameters of the runs that were updated; the other runs keep their bits."""
        params = self.runner.params
        projected = {name: p.detach().clone() for name, p in params.items()}
        project(projected)
        for name, p in params.items():
            p.copy_(torch.where(self._mask(updated, p), projected[name], p))

    @torch.no_grad()
    def _write_buffers(self, old: dict[str, Tensor]) -> None:
        """Write running statistics and the number of updates into the old tensors, for the runs that are alive."""
        changed = {name: new for name, new in self.runner.buffers.items() if new is not old[name]}
        for name, new in changed.items():
            torch.where(self._mask(self.alive, new), new.to(old[name].dtype), old[name], out=old[name])
        self.runner.set_buffers({name: old[name] for name in changed})
        for name, buffer in old.items():
            if name.endswith(COUNTER):
                torch.where(self.alive, self.optimizer.count.to(buffer.dtype), buffer, out=buffer)

    def _mask(self, by_run: Tensor, tensor: Tensor) -> Tensor:
        """Return a mask of the runs, (...R), in a shape that broadcasts against the tensor."""
        if not self.runner.run_shape:
            return by_run
        ones = [1] * (tensor.dim() - 1)
        return by_run.view(-1, *ones)
