"""Optimisers and learning-rate schedules. Updates are in place, by fused kernels, one stacked run after the other.

An optimiser keeps its moments as dictionaries of tensors shaped like the parameters, and one count of the updates
made. An update with `alive` false changes nothing, and the host does not wait to learn that.

Shapes: R runs, the leading axis of every tensor of stacked runs; `...R` marks an axis that only those have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normlab.config.schema import SGD, AdamW, OptimConfig

Tensors = dict[str, Tensor]


def learning_rate(optim: OptimConfig, steps: int, step: int) -> float:
    """Return the learning rate of the update from `step` to `step + 1`, of `steps` in all.

    Warm-up: lr (step + 1) / warmup_steps. Then with progress p from 0 to 1 over what remains and floor f:
    cosine lr (f + (1 - f)(1 + cos(pi p)) / 2), linear lr (1 - (1 - f) p), constant lr; wsd holds lr until
    the last `decay_fraction` of all steps and falls linearly from there. p counts the updates made, so the
    last one is a step short of 1: the floor is what one more update would have.
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


def tensor_norms(tensors: Sequence[Tensor], run_shape: tuple[int, ...]) -> Tensor:
    """Return the L2 norm of each of P tensors, shape (P, ...R)."""
    if run_shape:
        return torch.stack([torch.linalg.vector_norm(tensor.reshape(len(tensor), -1), dim=1) for tensor in tensors])
    return torch.stack(torch._foreach_norm(list(tensors)))


@dataclass(slots=True)
class Hyperparameters:
    """The hyperparameters of one update of a run."""

    lr: float
    weight_decay: float
    beta1: float
    """The momentum for SGD."""
    beta2: float
    """Unused by SGD."""


class Optimizer:
    """The state and the update of AdamW or SGD with momentum.

    Args:
        options: `config.AdamW` or `config.SGD`.
        params: The parameters, whose shapes the moments have.
        decayed: The names of the parameters with weight decay.
    """

    def __init__(self, options: OptimConfig, params: Mapping[str, Tensor], decayed: Sequence[str]):
        self.options = options
        self.moments: dict[str, Tensors] = {
            kind: {name: torch.zeros_like(p, requires_grad=False) for name, p in params.items()}
            for kind in (("mean", "square") if isinstance(options, AdamW) else ("velocity",))
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
                self._update_group(tensors, hyperparameters, hyperparameters.weight_decay if decays else 0.0, skip)
                continue
            stacked = [[tensor.unbind() for tensor in kind] for kind in tensors]
            for run, values in enumerate(hyperparameters):
                run_tensors = [[tensor[run] for tensor in kind] for kind in stacked]
                self._update_group(run_tensors, values, values.weight_decay if decays else 0.0, skip[run])

    def _update_group(
        self, tensors: list[list[Tensor]], hyper: Hyperparameters, weight_decay: float, skip: Tensor
    ) -> None:
        """Update one run's parameters of a group in one kernel, unless `skip` is 1.

        Args:
            tensors: The parameters, their gradients, and the moments of each kind.
            hyper: The run's hyperparameters.
            weight_decay: The group's weight decay.
            skip: 1 or 0.
        """
        if isinstance(self.options, AdamW):
            params, grads, mean, square = tensors
            torch._fused_adamw_(
                params, grads, mean, square, [], [self.count] * len(params), lr=hyper.lr, beta1=hyper.beta1,
                beta2=hyper.beta2, weight_decay=weight_decay, eps=self.options.eps, amsgrad=False, maximize=False,
                found_inf=skip,
            )  # fmt: skip
        else:
            assert isinstance(self.options, SGD)
            params, grads, velocity = tensors
            velocity = velocity if hyper.beta1 else []  # the kernel requires an empty list without momentum
            torch._fused_sgd_(
                params, grads, velocity, weight_decay=weight_decay, momentum=hyper.beta1, lr=hyper.lr, dampening=0.0,
                nesterov=self.options.nesterov, maximize=False, is_first_step=False, found_inf=skip,
            )  # fmt: skip


def hyperparameters_at(options: OptimConfig, steps: int, step: int) -> Hyperparameters:
    """Return the hyperparameters of the update from `step` to `step + 1`, of `steps` in all."""
    lr = learning_rate(options, steps, step)
    if isinstance(options, AdamW):
        return Hyperparameters(lr, options.weight_decay, options.beta1, options.beta2)
    assert isinstance(options, SGD)
    return Hyperparameters(lr, options.weight_decay, options.momentum, 0.0)
