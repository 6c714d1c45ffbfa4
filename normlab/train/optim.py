"""Optimisers over a flat state, in place: fused kernels, which go over the runs of a pack one after the other.

An optimiser keeps its moments as dictionaries of tensors shaped like the parameters, and one count of the
updates made. An update that would be spoiled (`alive` false) changes nothing, without asking the host.

Shapes: R runs; every tensor of a pack has it as its leading axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normlab.config import SGD, AdamW, OptimConfig

Tensors = dict[str, Tensor]


def learning_rate(optim: OptimConfig, steps: int, step: int) -> float:
    """The learning rate of the update from `step` to `step + 1`, of `steps` in all.

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
    """The step from which the learning rate depends on how many steps there are in all."""
    if optim.schedule == "constant":
        return steps
    if optim.schedule == "wsd":
        return steps - round(steps * (optim.decay_fraction or 0.0))
    return optim.warmup_steps or 0


def branch_step(optim: OptimConfig, steps: int) -> int | None:
    """The step whose checkpoint a longer run goes on from, where that is not the last: wsd's, before the decay."""
    return decay_start(optim, steps) if optim.schedule == "wsd" else None


def is_decayed(optim: OptimConfig, parameter: Tensor) -> bool:
    """Whether weight decay applies: matrices and embeddings always, gains and biases only if asked."""
    return optim.decay == "all" or parameter.dim() >= 2


def lengths(tensors: Sequence[Tensor], lead: tuple[int, ...]) -> Tensor:
    """The L2 norm of each tensor, shape (P, ...R), P their number."""
    if lead:
        return torch.stack([torch.linalg.vector_norm(tensor.reshape(len(tensor), -1), dim=1) for tensor in tensors])
    return torch.stack(torch._foreach_norm(list(tensors)))


@dataclass(slots=True)
class Hyper:
    """The numbers of one update of a run."""

    lr: float
    weight_decay: float
    first: float
    """beta1, or momentum."""
    second: float
    """beta2; unused by SGD."""


class Optimizer:
    """An optimiser's state and its update. `moments[kind][name]` is shaped like the parameter `name`."""

    kinds: tuple[str, ...]

    def __init__(
        self,
        options: OptimConfig,
        params: Mapping[str, Tensor],
        decayed: Sequence[str],
    ):
        self.options = options
        self.moments: dict[str, Tensors] = {
            kind: {name: torch.zeros_like(p, requires_grad=False) for name, p in params.items()} for kind in self.kinds
        }
        self.groups = (list(decayed), [name for name in params if name not in set(decayed)])
        device = next(iter(params.values())).device
        self.count = torch.zeros((), dtype=torch.float32, device=device)
        """Updates made, on the device."""

    def update(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        hyper: Hyper | Sequence[Hyper],
        alive: Tensor,
    ) -> None:
        """Move the parameters, in place, where `alive`.

        Args:
            params: What is moved.
            grads: The gradient of each, laid out in memory as it is: the kernels take both for flat arrays.
            hyper: The numbers of a lone run, or those of each run of a pack.
            alive: Whether the update is to be made, shape (...R).
        """
        self.count += alive.any()  # a spoiled update is none
        spoiled = (~alive).float()
        for names, decays in zip(self.groups, (True, False), strict=True):
            if not names:
                continue
            tensors = [[of[name].detach() for name in names] for of in (params, grads, *self.moments.values())]
            if isinstance(hyper, Hyper):
                self._fused(tensors, hyper.weight_decay if decays else 0.0, hyper, spoiled)
                continue
            of_runs = [[tensor.unbind() for tensor in kind] for kind in tensors]
            for run, own in enumerate(hyper):
                its = [[tensor[run] for tensor in kind] for kind in of_runs]
                self._fused(its, own.weight_decay if decays else 0.0, own, spoiled[run])

    def _fused(self, tensors: list[list[Tensor]], weight_decay: float, hyper: Hyper, spoiled: Tensor) -> None:
        """Move one run's parameters of a group in one kernel, which does nothing where `spoiled` is 1.

        Args:
            tensors: The parameters, their gradients, and the moments of each kind.
            weight_decay: Of this group.
            hyper: The run's numbers.
            spoiled: 1 or 0.
        """
        raise NotImplementedError


class AdamWOptimizer(Optimizer):
    """AdamW: see `config.AdamW`."""

    kinds = ("mean", "square")

    def _fused(self, tensors, weight_decay, hyper, spoiled) -> None:
        assert isinstance(self.options, AdamW)
        params, grads, mean, square = tensors
        torch._fused_adamw_(
            params, grads, mean, square, [], [self.count] * len(params),
            lr=hyper.lr, beta1=hyper.first, beta2=hyper.second, weight_decay=weight_decay,
            eps=self.options.eps, amsgrad=False, maximize=False, found_inf=spoiled,
        )  # fmt: skip


class SGDOptimizer(Optimizer):
    """SGD with momentum: see `config.SGD`."""

    kinds = ("velocity",)

    def _fused(self, tensors, weight_decay, hyper, spoiled) -> None:
        assert isinstance(self.options, SGD)
        params, grads, velocity = tensors
        velocity = velocity if hyper.first else []  # the kernel insists on none where there is no momentum
        torch._fused_sgd_(
            params, grads, velocity, weight_decay=weight_decay, momentum=hyper.first, lr=hyper.lr, dampening=0.0,
            nesterov=self.options.nesterov, maximize=False, is_first_step=False, found_inf=spoiled,
        )  # fmt: skip


def build_optimizer(options: OptimConfig, params: Mapping[str, Tensor], decayed: Sequence[str]) -> Optimizer:
    """The optimiser that the options name, with its moments at zero."""
    return {"adamw": AdamWOptimizer, "sgd": SGDOptimizer}[options.name](options, params, decayed)


def hyper_of(options: OptimConfig, steps: int, step: int) -> Hyper:
    """The numbers of the update from `step` to `step + 1`."""
    lr = learning_rate(options, steps, step)
    if isinstance(options, AdamW):
        return Hyper(lr=lr, weight_decay=options.weight_decay, first=options.beta1, second=options.beta2)
    assert isinstance(options, SGD)
    return Hyper(lr=lr, weight_decay=options.weight_decay, first=options.momentum, second=0.0)
