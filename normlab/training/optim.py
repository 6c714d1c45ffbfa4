"""Optimisers and learning-rate schedules. Updates are in place, by fused kernels or, for stacked runs, on one buffer.

An optimiser keeps its moments as tensors by the names of the parameters, like these in a `Stack` for stacked runs, and
one count of the updates made. An update with `alive` false changes nothing; the host does not read `alive`.

Shapes: R runs, the leading axis of every tensor of stacked runs; `...R` marks an axis that only those have.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normlab.config.optim import SGD, AdamW, OptimConfig
from normlab.data.batches import send
from normlab.model.small import extra_parameters
from normlab.model.stack import Stack, storages, zeros_like

Tensors = dict[str, Tensor]

STEPS_AT_ONCE = 256
"""Steps whose hyperparameters are copied to a device together."""


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


def kept_step(optim: OptimConfig, steps: int) -> int | None:
    """Return the step before the decay of a wsd schedule, from which runs of other lengths can start; else None."""
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
    """Of this step: a Python number, or a tensor, which a graph of the step reads again."""
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
    mean, square = group.moments
    torch._fused_adamw_(
        group.params, group.grads, mean, square, [], [group.count] * len(group.params), lr=group.lr,
        beta1=options.beta1, beta2=options.beta2, weight_decay=group.weight_decay, eps=options.eps, amsgrad=False,
        maximize=False, found_inf=group.skip,
    )  # fmt: skip


def sgd(options: SGD, group: Group) -> None:
    velocity = group.moments[0] if options.momentum else []  # the kernel requires an empty list without momentum
    torch._fused_sgd_(
        group.params, group.grads, velocity, weight_decay=group.weight_decay, momentum=options.momentum,
        lr=group.lr,  # pyright: ignore[reportArgumentType]  # torch's stub has no tensor
        dampening=0.0, nesterov=options.nesterov, maximize=False, is_first_step=False, found_inf=group.skip,
    )  # fmt: skip


@dataclass(slots=True)
class StackedGroup:
    """The buffers of stacked runs, (R, N) each, and what their update needs."""

    params: Tensor
    grads: Tensor
    """The update may overwrite them."""
    moments: list[Tensor]
    decayed: int
    """Number of columns with weight decay, the first ones."""
    coefficients: Tensor
    """(K, R, 1)."""
    alive: Tensor
    """Whether to make the update, (R, 1)."""

    def set(self, buffer: Tensor, values: Tensor) -> None:
        """Write the values of the runs that are alive into a buffer."""
        torch.where(self.alive, values, buffer, out=buffer)


def adamw_coefficients(options: AdamW, lr: float, count: int) -> tuple[float, ...]:
    """Return the coefficients of update number `count`, from 1."""
    corrections = [1 - beta**count for beta in (options.beta1, options.beta2)]
    decay_factor = 1 - lr * options.decay_per_lr
    return 1 - options.beta1, 1 - options.beta2, lr / corrections[0], 1 / corrections[1], decay_factor


def stacked_adamw(options: AdamW, group: StackedGroup) -> None:
    (mean, square), (mean_weight, square_weight, rate, correction, decay_factor) = group.moments, group.coefficients
    params, grads = group.params, group.grads
    group.set(mean, mean.lerp(grads, mean_weight))
    group.set(square, square.lerp(grads.square_(), square_weight))
    step = torch.mul(square, correction, out=grads).sqrt_().add_(options.eps)
    torch.div(mean, step, out=step)
    params[:, : group.decayed].mul_(decay_factor.where(group.alive, 1))
    group.set(params, torch.addcmul(params, step, rate, value=-1, out=step))


def sgd_coefficients(options: SGD, lr: float, count: int) -> tuple[float, ...]:
    """Return the coefficients of update number `count`, from 1."""
    return lr, options.decay_per_lr, options.momentum


def stacked_sgd(options: SGD, group: StackedGroup) -> None:
    (velocity,), (lr, decay, momentum), decayed = group.moments, group.coefficients, group.decayed
    group.grads[:, :decayed].addcmul_(group.params[:, :decayed], decay)
    group.set(velocity, torch.addcmul(group.grads, velocity, momentum))
    direction = torch.addcmul(group.grads, velocity, momentum) if options.nesterov else velocity
    group.set(group.params, torch.addcmul(group.params, direction, lr, value=-1))


class Update(NamedTuple):
    single: Callable[[Any, Group], None]
    """Of a single run, by a fused kernel."""
    stacked: Callable[[Any, StackedGroup], None]
    """Of stacked runs, in as many operations for any number of them."""
    coefficients: Callable[[Any, float, int], tuple[float, ...]]
    """The K coefficients of a stacked run, from its options, the learning rate and the number of the update."""


UPDATES: dict[type[OptimConfig], Update] = {
    AdamW: Update(adamw, stacked_adamw, adamw_coefficients),
    SGD: Update(sgd, stacked_sgd, sgd_coefficients),
}


def coefficients_of(by_run: Sequence[Hyperparameters], count: int) -> Tensor:
    """Return the coefficients of update number `count` (from 1) of stacked runs, (K, R), in float64."""
    rows = [UPDATES[type(each.options)].coefficients(each.options, float(each.lr), count) for each in by_run]
    return torch.tensor(rows, dtype=torch.float64).T


class HyperparameterTable:
    """The hyperparameters of every step of a run or a pack. They are copied to a device for many steps at once.

    Args:
        like: A tensor with the device and the dtype of the parameters.
        numbers: Whether a single run's learning rate is a Python number, which a graph of the step would freeze.
    """

    def __init__(self, options: Sequence[OptimConfig], steps: int, like: Tensor, *, numbers: bool) -> None:
        self._options, self._steps, self._like, self._numbers = options, steps, like, numbers
        self._first = -1
        self._rows = like
        """Of the steps from `_first` on: the learning rate of a single run, or the coefficients of a pack."""
        self._row: Tensor | None = None
        self.now: Hyperparameters | Tensor = like
        """Those of the loaded step: of a single run, or the coefficients of a pack, (K, R), always in one memory."""

    def load(self, step: int) -> None:
        """Make `now` those of a step."""
        is_single, device = len(self._options) == 1, self._like.device
        if is_single and self._numbers:
            self.now = hyperparameters_at(self._options[0], self._steps, step)
            return
        first = step - step % STEPS_AT_ONCE
        if first != self._first:
            numbers = range(first, min(first + STEPS_AT_ONCE, self._steps))
            by_step = [[hyperparameters_at(each, self._steps, number) for each in self._options] for number in numbers]
            if is_single:
                rows = torch.tensor([each.lr for (each,) in by_step], dtype=torch.float32)  # as the kernel reads it
            else:
                rows = torch.stack([coefficients_of(each, count) for count, each in enumerate(by_step, first + 1)])
                rows = rows.to(self._like.dtype)
            self._first, self._rows = first, send(rows, device)
        if self._row is None:
            self._row = torch.empty_like(self._rows[0])
            self.now = Hyperparameters(self._row, self._options[0]) if is_single else self._row
        self._row.copy_(self._rows[step - first])


class Optimizer:
    """The state of an optimiser, and its updates.

    Args:
        options: Those of the run, or of any of the stacked runs.
        params: The parameters, whose shapes the moments have.
    """

    def __init__(self, options: OptimConfig, params: Mapping[str, Tensor]):
        self.options = options
        self.moments: dict[str, Tensors] = {kind: zeros_like(params) for kind in options.moments}
        """By kind and parameter."""
        first = {name: p[0] for name, p in params.items()} if isinstance(params, Stack) else params
        decayed = [name for name, p in first.items() if is_decayed(options, p)]
        self.groups = (decayed, [name for name in params if name not in set(decayed)])
        self.count = torch.zeros((), dtype=torch.float32, device=next(iter(params.values())).device)
        """Updates made, on the device."""

    @torch.no_grad()
    def update(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        hyperparameters: Hyperparameters | Tensor,
        alive: Tensor,
    ) -> None:
        """Update the parameters in place where `alive`.

        Args:
            grads: Their gradients, with the same strides: the kernels treat both as flat arrays. Those of stacked runs
                are overwritten.
            hyperparameters: Those of the single run, or `coefficients_of` stacked runs.
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
                tensors, gradients, *moments = [[state[name] for name in names] for state in states]
                decay = options.decay_per_lr if decays else 0.0
                group = Group(tensors, gradients, moments, self.count, hyperparameters.lr, decay, (~alive).float())
                UPDATES[type(options)].single(options, group)

    def _update_stack(self, params: Stack, grads: Stack, coefficients_KR: Tensor, alive: Tensor) -> None:
        coefficients = coefficients_KR[..., None].to(params.buffer.dtype)
        moments = [buffer for kind in self.moments.values() for buffer in storages(kind)]
        decayed = params.columns(self.groups[0])
        group = StackedGroup(params.buffer, grads.buffer, moments, decayed, coefficients, alive)
        UPDATES[type(self.options)].stacked(self.options, group)
