"""One optimiser step: forward, loss, gradients, clipping, update. The only maths of training.

The state is donated: parameters, moments and buffers are changed in place. What the step saw is returned, as
tensors on the device; it never asks the host.

Shapes: R runs (absent for a lone run), B batch, T time, `...R` marks an axis that only a pack has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normlab.stats.tap import mean_squares
from normlab.train.bound import Bound
from normlab.train.measure import Measure, Measured, Pass
from normlab.train.optim import Hyper, Optimizer, lengths


@dataclass(slots=True)
class StepOutput:
    """What one step saw."""

    loss: Tensor
    """Nats per token, shape (...R), before the update."""
    grad_norm: Tensor
    """L2 norm of the whole gradient before clipping, shape (...R)."""
    clip: Tensor
    """Factor that the gradient was clipped by, at most 1, shape (...R)."""
    alive: Tensor
    """Whether the update was made: false from the first non-finite loss or gradient on, shape (...R)."""
    measured: Measured | None = None
    """Measured steps only: every statistic that is read in the step."""


@dataclass(slots=True)
class Step:
    """A training step over a bound model. Call it with a batch; it changes the state and returns what it saw."""

    bound: Bound
    optimizer: Optimizer
    accumulation: int = 1
    clip: float | Tensor | None = None
    """Largest gradient norm; one for each run of a pack, or none."""
    autocast: Callable[[], AbstractContextManager] = nullcontext
    project: Callable[[Mapping[str, Tensor]], None] | None = None
    """Brings the parameters back to where the placement wants them, after the update."""
    measure: Measure | None = None
    """Takes the statistics of the steps that are measured."""
    alive: Tensor | None = None
    """Sticky: once false, nothing changes any more. Part of the state."""
    _spent: list[Tensor] = field(default_factory=list, init=False, repr=False)
    """The last step's gradients, kept until the next backward pass so that it writes where they lay: freed any
    earlier, on a CPU, their pages go back to the system and are faulted in again, 6 % of a step at 6x384."""

    def __post_init__(self) -> None:
        """Everything is alive at first."""
        if self.alive is None:
            device = next(iter(self.bound.params.values())).device
            self.alive = torch.ones(self.bound.lead, dtype=torch.bool, device=device)

    def __call__(
        self, tokens: Tensor, targets: Tensor, hyper: Hyper | Sequence[Hyper], *, measured: bool = False
    ) -> StepOutput:
        """One update from tokens and targets, shape (...R, B, T), by the numbers of the run or of each in the pack.

        With `measured` it also returns what was seen inside.
        """
        bound, old_buffers = self.bound, self.bound.buffers
        look = self.measure if measured else None
        bound.train(True)
        loss, grads, passes = self._gradients(tokens, targets, look)
        norms = lengths(list(grads.values()), bound.lead)
        norm, factor = self._clip(list(grads.values()), norms)
        assert self.alive is not None
        self.alive = self.alive & loss.isfinite() & norm.isfinite()
        before = None if look is None else look.before(norms)
        with torch.no_grad():
            self.optimizer.update(bound.params, grads, hyper, self.alive)
            if self.project is not None:
                self._project()
        seen = None if look is None or before is None else look.after(passes, before)
        self._keep_buffers(old_buffers)
        self._spent = list(grads.values())
        return StepOutput(loss, norm, factor, self.alive, seen)

    def _gradients(
        self, tokens: Tensor, targets: Tensor, look: Measure | None
    ) -> tuple[Tensor, dict[str, Tensor], list[Pass]]:
        """Mean loss and gradient over the micro-batches; where measured, what was seen of each."""
        bound, parts, count = self.bound, self.accumulation, tokens.shape[-2] * tokens.shape[-1]
        names, params = list(bound.params), list(bound.params.values())
        batch_axis = len(bound.lead)
        loss: Tensor | None = None
        sums: list[Tensor] = []
        passes: list[Pass] = []
        for some_tokens, some_targets in zip(
            tokens.chunk(parts, batch_axis), targets.chunk(parts, batch_axis), strict=True
        ):
            with self.autocast():
                part, reports, taps = (
                    bound.loss(some_tokens, some_targets)
                    if look is None
                    else bound.loss(some_tokens, some_targets, look.wanted, taps=look.taps)
                )
            self._spent.clear()
            found = list(torch.autograd.grad(part.sum() / parts, [*params, *taps], materialize_grads=True))
            for index, parameter in enumerate(params):  # one at a time: there are never two of all of them
                found[index] = _laid_out_as(found[index], parameter)
            grads, of_taps = found[: len(params)], found[len(params) :]
            del found
            # Of the step's loss summed over its tokens, which is as many times their mean as there are.
            passes.append(Pass(reports, mean_squares(of_taps, batch_axis) * count**2 if of_taps else None))
            part = part.detach()
            if loss is None:
                loss, sums = part, grads
            else:
                loss = loss + part
                torch._foreach_add_(sums, grads)
        assert loss is not None
        return loss / parts, dict(zip(names, sums, strict=True)), passes

    @torch.no_grad()
    def _clip(self, grads: list[Tensor], norms: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient's norm, and the factor that it was then multiplied by, in place."""
        norm = torch.linalg.vector_norm(norms, dim=0)
        if self.clip is None:
            return norm, torch.ones_like(norm)
        factor = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        if self.bound.lead:
            for grad in grads:
                grad.mul_(factor.view(-1, *[1] * (grad.dim() - 1)))
        else:
            torch._foreach_mul_(grads, factor)
        return norm, factor

    def _project(self) -> None:
        """Project what was updated; a run that is frozen keeps its bits."""
        assert self.project is not None
        params = self.bound.params
        projected = {name: p.detach().clone() for name, p in params.items()}
        self.project(projected)
        for name, p in params.items():
            p.copy_(torch.where(self._alive_for(p), projected[name], p))

    def _alive_for(self, tensor: Tensor) -> Tensor:
        """`alive`, shaped to choose between tensors like this one."""
        assert self.alive is not None
        return self.alive.view(-1, *[1] * (tensor.dim() - 1)) if self.bound.lead else self.alive

    @torch.no_grad()
    def _keep_buffers(self, old: dict[str, Tensor]) -> None:
        """Undo what a spoiled forward did to running statistics."""
        moved = {name: new for name, new in self.bound.buffers.items() if new is not old[name]}
        if moved:
            kept = {name: torch.where(self._alive_for(new), new, old[name]) for name, new in moved.items()}
            self.bound.set_buffers(kept)


def _laid_out_as(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in the parameter's order in memory, which whatever goes over both as flat arrays relies on.

    What is used transposed has a transposed gradient; `backward` would see to it, `autograd.grad` does not.
    """
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
