"""Optimisers and learning-rate schedules. Updates are in place, by fused kernels, one stacked run after the other.

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


def tensor_norms(tensors: Sequence[Tensor], run_shape: tuple[int, ...]) -> Tensor:
    """Return the L2 norm of each of P tensors, shape (P, ...R)."""
    if run_shape:
        return torch.stack([torch.linalg.vector_norm(tensor.reshape(len(tensor), -1), dim=1) for tensor in tensors])
    return torch.stack(torch._foreach_norm(list(tensors)))


@dataclass(slots=True)
class Hyperparameters:
    """The hyperparameters of one update of a run."""

    lr: float
    """Of this step."""
    options: OptimConfig
    """Of this run."""


def hyperparameters_at(options: OptimConfig, steps: int, step: int) -> Hyperparameters:
    """Return the hyperparameters of the update from `step` to `step + 1`, of `steps` in all."""
    return Hyperparameters(learning_rate(options, steps, step), options)


@dataclass(slots=True)
class Group:
    """The parameters of one run that have the same weight decay, and what their update needs."""

    params: list[Tensor]
    grads: list[Tensor]
    moments: list[list[Tensor]]
    """One list for each of the optimiser's `moments`."""
    count: Tensor
    """Updates made, with this one."""
    lr: float
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
        group.params, group.grads, velocity, weight_decay=group.weight_decay, momentum=options.momentum, lr=group.lr,
        dampening=0.0, nesterov=options.nesterov, maximize=False, is_first_step=False, found_inf=group.skip,
    )  # fmt: skip


UPDATES: dict[type[OptimConfig], Callable[[Any, Group], None]] = {AdamW: adamw, SGD: sgd}
"""The update of each optimiser, in place: a function of one run's options and tensors (`Group`)."""


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
            kind: {name: torch.zeros_like(p, requires_grad=False) for name, p in params.items()}
            for kind in options.moments
        }
        """By kind and parameter."""
        self.groups = (list(decayed), [name for name in params if name not in set(decayed)])
        device = next(iter(params.values())).device
        self.count = torch.zeros((), dtype=torch.float32, device=device)
        """Updates made, on the device."""

    def update(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        hyperparameters: Hyperparameters | Sequence[Hyperparameters],
        alive: Tensor,
    ) -> None:
        """Update the parameters in place where `alive`.

        Args:
            params: The parameters.
            grads: Their gradients, with the same strides: the kernels treat both as flat arrays.
            hyperparameters: Those of the single run, or of each stacked run.
            alive: Whether to make the update, shape (...R).
        """
        self.count += alive.any()
        skip = (~alive).float()
        for names, decays in zip(self.groups, (True, False), strict=True):
            if not names:
                continue
            tensors = [[state[name].detach() for name in names] for state in (params, grads, *self.moments.values())]
            if isinstance(hyperparameters, Hyperparameters):
                self._update_group(tensors, hyperparameters, decays, skip)
                continue
            stacked = [[tensor.unbind() for tensor in kind] for kind in tensors]
            for run, values in enumerate(hyperparameters):
                run_tensors = [[tensor[run] for tensor in kind] for kind in stacked]
                self._update_group(run_tensors, values, decays, skip[run])

    def _update_group(self, tensors: list[list[Tensor]], values: Hyperparameters, decays: bool, skip: Tensor) -> None:
        params, grads, *moments = tensors
        weight_decay = values.options.weight_decay if decays else 0.0
        group = Group(params, grads, moments, self.count, values.lr, weight_decay, skip)
        UPDATES[type(values.options)](values.options, group)
