"""Optimisers and learning-rate schedules. Updates are in place.

An optimiser keeps its moments as dictionaries of tensors shaped like the parameters, and one count of the updates
made. An update with `alive` false changes nothing, and the host does not wait to learn that.

Shapes: R runs, the leading axis of every tensor of stacked runs; `...R` marks an axis that only those have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normlab.config.optim import SGD, AdamW, OptimConfig
from normlab.model.small import extra_parameters
from normlab.model.stack import Stack

Tensors = dict[str, Tensor]


def learning_rate(optim: OptimConfig, steps: int, step: int) -> float:
    """Return the learning rate of the update from `step` to `step + 1`, of `steps` in all.

    Warm-up: lr (step + 1) / warmup_steps. Then with progress p from 0 to 1 over what remains and floor f:
    cosine lr (f + (1 - f)(1 + cos(pi p)) / 2), linear lr (1 - (1 - f) p), constant lr; wsd holds lr until
    the last `decay_fraction` of all steps and falls linearly from there. p counts the updates made, so the
    last one is a step short of 1: the floor is what one more update would have (`OptimConfig.final_lr_fraction`).
    """
    assert optim.warmup_steps is not None, "OptimConfig.resolve() sets the warm-up"
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    floor = optim.final_lr_fraction or 0.0
    start = max(decay_start(optim, steps), optim.warmup_steps)
    progress = 0.0 if step < start else (step - start) / max(1, steps - start)
    if optim.schedule == "cosine":
        return optim.lr * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)
    return optim.lr * (1 - (1 - floor) * progress)


def decay_start(optim: OptimConfig, steps: int) -> int:
    """Return the first step whose learning rate depends on the total number of steps."""
    if optim.schedule == "constant":
        return steps
    if optim.schedule == "wsd":
        return steps - round(steps * (optim.decay_fraction or 0.0))
    return optim.warmup_steps or 0


def branch_step(optim: OptimConfig, steps: int) -> int | None:
    """Return the last step before the decay of a wsd schedule, from which longer runs branch; else None."""
    return decay_start(optim, steps) if optim.schedule == "wsd" else None


def is_decayed(optim: OptimConfig, parameter: Tensor) -> bool:
    """Return whether weight decay applies: always to matrices, to gains and biases only with decay=all."""
    return optim.decay == "all" or parameter.dim() >= 2


def decayed_kinds(optim: OptimConfig, model: nn.Module) -> str:
    """Return which parameters of a model have weight decay.

    The matrices of linear layers and embeddings are `matrices`; those of norms and of the placement are named.
    """
    if optim.decay == "all":
        return "all parameters"
    others = {name.rpartition(".")[2] for _, name, parameter in extra_parameters(model) if is_decayed(optim, parameter)}
    return f"matrices with {' and '.join(sorted(others))}" if others else "matrices"


@dataclass(slots=True)
class Hyperparameters:
    """The hyperparameters of one update of a run."""

    lr: float | Tensor
    """Of this step; a tensor for a single run on a GPU, where a CUDA graph must not contain the number."""
    options: OptimConfig
    """Of this run."""


def hyperparameters_at(options: OptimConfig, steps: int, step: int) -> Hyperparameters:
    """Return the hyperparameters of the update from `step` to `step + 1`, of `steps` in all."""
    return Hyperparameters(learning_rate(options, steps, step), options)


@dataclass(slots=True)
class Group:
    """The parameters of a single run that have the same weight decay, and what their update needs."""

    params: list[Tensor]
    grads: list[Tensor]
    moments: list[list[Tensor]]
    """One list for each of the optimiser's `moments`."""
    count: Tensor
    """Updates made, with this one."""
    lr: float | Tensor
    weight_decay: float
    skip: Tensor
    """1 if nothing may change, else 0."""


def adamw(options: AdamW, group: Group) -> None:
    """Update in place by AdamW."""
    mean, square = group.moments
    torch._fused_adamw_(
        group.params, group.grads, mean, square, [], [group.count] * len(group.params), lr=group.lr,
        beta1=options.beta1, beta2=options.beta2, weight_decay=group.weight_decay, eps=options.eps, amsgrad=False,
        maximize=False, found_inf=group.skip,
    )  # fmt: skip


def sgd(options: SGD, group: Group) -> None:
    """Update in place by SGD with momentum."""
    velocity = group.moments[0] if options.momentum else []  # the kernel requires an empty list without momentum
    torch._fused_sgd_(
        group.params, group.grads, velocity, weight_decay=group.weight_decay, momentum=options.momentum,
        lr=group.lr,  # pyright: ignore[reportArgumentType]  # torch's stub has no tensor
        dampening=0.0, nesterov=options.nesterov, maximize=False, is_first_step=False, found_inf=group.skip,
    )  # fmt: skip


UPDATES: dict[type[OptimConfig], Callable[[Any, Group], None]] = {AdamW: adamw, SGD: sgd}
"""The update of each optimiser for a single run, in place, by a fused kernel."""


@dataclass(slots=True)
class StackedGroup:
    """The buffers of stacked runs, (R, N) each, and what their update needs."""

    params: Tensor
    grads: Tensor
    """The update may overwrite them."""
    moments: list[Tensor]
    decayed: int
    """Number of columns with weight decay, the first ones."""
    numbers: Tensor
    """The numbers of the optimiser, (K, R, 1)."""
    alive: Tensor
    """Whether to make the update, (R, 1)."""

    def set(self, buffer: Tensor, values: Tensor) -> None:
        """Write the values of the runs that are alive into a buffer."""
        torch.where(self.alive, values, buffer, out=buffer)


def adamw_numbers(options: AdamW, lr: float, count: int) -> tuple[float, ...]:
    """Return the numbers of the update after which `count` were made."""
    corrections = [1 - beta**count for beta in (options.beta1, options.beta2)]
    return 1 - options.beta1, 1 - options.beta2, lr / corrections[0], 1 / corrections[1], 1 - lr * options.weight_decay


def stacked_adamw(options: AdamW, group: StackedGroup) -> None:
    """Update stacked runs in place by AdamW."""
    (mean, square), (mean_weight, square_weight, rate, correction, kept) = group.moments, group.numbers
    group.set(mean, mean.lerp(group.grads, mean_weight))
    group.set(square, square.lerp(group.grads.square_(), square_weight))
    root = (square * correction).sqrt_().add_(options.eps)
    group.params[:, : group.decayed].mul_(kept.where(group.alive, 1))
    group.set(group.params, torch.addcmul(group.params, mean / root, rate, value=-1))


def sgd_numbers(options: SGD, lr: float, count: int) -> tuple[float, ...]:
    """Return the numbers of the update after which `count` were made."""
    return lr, options.weight_decay, options.momentum


def stacked_sgd(options: SGD, group: StackedGroup) -> None:
    """Update stacked runs in place by SGD with momentum."""
    (velocity,), (lr, decay, momentum), decayed = group.moments, group.numbers, group.decayed
    group.grads[:, :decayed].addcmul_(group.params[:, :decayed], decay)
    group.set(velocity, torch.addcmul(group.grads, velocity, momentum))
    direction = torch.addcmul(group.grads, velocity, momentum) if options.nesterov else velocity
    group.set(group.params, torch.addcmul(group.params, direction, lr, value=-1))


STACKED_UPDATES: dict[type[OptimConfig], Callable[[Any, StackedGroup], None]] = {AdamW: stacked_adamw, SGD: stacked_sgd}
"""The update of each optimiser for stacked runs, in place, in as many operations for any number of them."""
NUMBERS: dict[type[OptimConfig], Callable[[Any, float, int], tuple[float, ...]]] = {
    AdamW: adamw_numbers,
    SGD: sgd_numbers,
}
"""The K numbers of each optimiser that may differ between stacked runs, from a run's options and learning rate."""


def numbers_of(by_run: Sequence[Hyperparameters], count: int) -> Tensor:
    """Return the numbers of an update of stacked runs, (K, R), in float64, after which `count` updates were made."""
    numbers = [NUMBERS[type(each.options)](each.options, float(each.lr), count) for each in by_run]
    return torch.tensor(numbers, dtype=torch.float64).T


class Optimizer:
    """The state of an optimiser, and its updates.

    Args:
        options: Those of the run, or of any of the stacked runs.
        params: The parameters, whose shapes the moments have.
        decayed: The names of the parameters with weight decay.
    """

    def __init__(self, options: OptimConfig, params: Mapping[str, Tensor], decayed: Sequence[str]):
        self.options = options
        self.moments: dict[str, Tensors] = {
            kind: params.zeros()
            if isinstance(params, Stack)
            else {name: torch.zeros_like(p, requires_grad=False) for name, p in params.items()}
            for kind in options.moments
        }
        """By kind and parameter."""
        self.groups = (list(decayed), [name for name in params if name not in set(decayed)])
        self.count = torch.zeros((), dtype=torch.float32, device=next(iter(params.values())).device)
        """Updates made, on the device."""

    def update(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        hyperparameters: Hyperparameters | Tensor,
        alive: Tensor,
    ) -> None:
        """Update the parameters in place where `alive`.

        Args:
            params: The parameters.
            grads: Their gradients, with the same strides: the kernels treat both as flat arrays. Those of stacked runs
                are overwritten.
            hyperparameters: Those of the single run, or `numbers_of` stacked runs.
            alive: Whether to make the update, shape (...R).
        """
        self.count += alive.any()
        if not isinstance(hyperparameters, Hyperparameters):
            assert isinstance(params, Stack)
            assert isinstance(grads, Stack)
            self._update_stack(params, grads, hyperparameters, alive[:, None])
            return
        options = hyperparameters.options
        for names, decays in zip(self.groups, (True, False), strict=True):
            if names:
                states = (params, grads, *self.moments.values())
                tensors, grads_of, *moments = [[state[name].detach() for name in names] for state in states]
                decay = options.weight_decay if decays else 0.0
                group = Group(tensors, grads_of, moments, self.count, hyperparameters.lr, decay, (~alive).float())
                UPDATES[type(options)](options, group)

    def _update_stack(self, params: Stack, grads: Stack, numbers_KR: Tensor, alive: Tensor) -> None:
        numbers = numbers_KR[..., None].to(params.buffer.dtype)
        moments = [each.buffer for each in self.moments.values() if isinstance(each, Stack)]
        group = StackedGroup(params.buffer, grads.buffer, moments, params.columns(self.groups[0]), numbers, alive)
        STACKED_UPDATES[type(self.options)](self.options, group)
