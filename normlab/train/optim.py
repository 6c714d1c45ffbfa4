"""Optimisers over a flat state, in place: fused kernels for a lone run, broadcast formulas for a pack.

An optimiser keeps its moments as dictionaries of tensors shaped like the parameters, and one count of the
updates made. An update that would be spoiled (`alive` false) changes nothing, without asking the host.

Shapes: R runs; every tensor of a pack has it as its leading axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normlab.config import SGD, AdamW, OptimConfig

Tensors = dict[str, Tensor]
Number = float | Tensor
"""A number for all runs, or one for each, shape (R,)."""


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
    """The numbers of one update: floats for a lone run, tensors of shape (R,) for a pack."""

    lr: Number
    weight_decay: Number
    first: Number
    """beta1, or momentum."""
    second: Number
    """beta2; unused by SGD."""


class Optimizer:
    """An optimiser's state and its update. `moments[kind][name]` is shaped like the parameter `name`."""

    kinds: tuple[str, ...]

    def __init__(
        self,
        options: OptimConfig,
        params: Mapping[str, Tensor],
        decayed: Sequence[str],
        lead: tuple[int, ...],
    ):
        self.options = options
        self.lead = lead
        self.moments: dict[str, Tensors] = {
            kind: {name: torch.zeros_like(p, requires_grad=False) for name, p in params.items()} for kind in self.kinds
        }
        self.groups = (list(decayed), [name for name in params if name not in set(decayed)])
        device = next(iter(params.values())).device
        self.count = torch.zeros((), dtype=torch.float32, device=device)
        """Updates made, on the device."""

    def update(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], hyper: Hyper, alive: Tensor) -> None:
        """Move the parameters, in place, where `alive`."""
        self.count += alive.any()  # a spoiled update is none
        for names, weight_decay in zip(self.groups, (hyper.weight_decay, 0.0), strict=True):
            if not names:
                continue
            tensors = [params[name] for name in names], [grads[name] for name in names]
            moments = [[self.moments[kind][name] for name in names] for kind in self.kinds]
            if self.lead:
                for p, g, *own in zip(*tensors, *moments, strict=True):
                    self._stacked(p, g, own, weight_decay, hyper, alive)
            else:
                self._fused(*tensors, moments, weight_decay, hyper, (~alive).float())

    def _fused(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        moments: list[list[Tensor]],
        weight_decay: Any,
        hyper: Any,
        spoiled: Tensor,
    ) -> None:
        """A lone run: all parameters of a group in one kernel, which does nothing where `spoiled` is 1."""
        raise NotImplementedError

    def _stacked(
        self, p: Tensor, g: Tensor, moments: list[Tensor], weight_decay: Number, hyper: Hyper, alive: Tensor
    ) -> None:
        """A pack: one stacked parameter, every number broadcast over its runs."""
        raise NotImplementedError


def _per_run(value: Number, like: Tensor) -> Tensor:
    """A number for each run, shaped to multiply a stacked tensor."""
    value = value if isinstance(value, Tensor) else like.new_tensor([value])
    return value.view(-1, *[1] * (like.dim() - 1))


class AdamWOptimizer(Optimizer):
    """AdamW: see `config.AdamW`."""

    kinds = ("mean", "square")

    def _fused(self, params, grads, moments, weight_decay, hyper, spoiled) -> None:
        assert isinstance(self.options, AdamW)
        torch._fused_adamw_(
            params, grads, moments[0], moments[1], [], [self.count] * len(params),
            lr=hyper.lr, beta1=hyper.first, beta2=hyper.second, weight_decay=weight_decay,
            eps=self.options.eps, amsgrad=False, maximize=False, found_inf=spoiled,
        )  # fmt: skip

    def _stacked(self, p, g, moments, weight_decay, hyper, alive) -> None:
        assert isinstance(self.options, AdamW)
        mean, square = moments
        lr, decay, first, second = (_per_run(n, p) for n in (hyper.lr, weight_decay, hyper.first, hyper.second))
        new_mean = mean + (1 - first) * (g - mean)
        new_square = second * square + (1 - second) * g * g
        count = self.count.to(p.dtype)
        root = (new_square / (1 - second**count)).sqrt() + self.options.eps
        new_p = p * (1 - lr * decay) - lr / (1 - first**count) * new_mean / root
        keep = _per_run(alive, p)
        for old, new in ((p, new_p), (mean, new_mean), (square, new_square)):
            old.copy_(torch.where(keep, new, old))


class SGDOptimizer(Optimizer):
    """SGD with momentum: see `config.SGD`."""

    kinds = ("velocity",)

    def _fused(self, params, grads, moments, weight_decay, hyper, spoiled) -> None:
        assert isinstance(self.options, SGD)
        velocity = moments[0] if hyper.first else []  # the kernel insists on none where there is no momentum
        torch._fused_sgd_(
            params, grads, velocity, weight_decay=weight_decay, momentum=hyper.first, lr=hyper.lr, dampening=0.0,
            nesterov=self.options.nesterov, maximize=False, is_first_step=False, found_inf=spoiled,
        )  # fmt: skip

    def _stacked(self, p, g, moments, weight_decay, hyper, alive) -> None:
        assert isinstance(self.options, SGD)
        (velocity,) = moments
        lr, decay, momentum = (_per_run(n, p) for n in (hyper.lr, weight_decay, hyper.first))
        g = g + decay * p
        new_velocity = momentum * velocity + g
        step = g + momentum * new_velocity if self.options.nesterov else new_velocity
        keep = _per_run(alive, p)
        for old, new in ((p, p - lr * step), (velocity, new_velocity)):
            old.copy_(torch.where(keep, new, old))


def build_optimizer(
    options: OptimConfig, params: Mapping[str, Tensor], decayed: Sequence[str], lead: tuple[int, ...]
) -> Optimizer:
    """The optimiser that the options name, with its moments at zero."""
    return {"adamw": AdamWOptimizer, "sgd": SGDOptimizer}[options.name](options, params, decayed, lead)


def hyper_of(options: OptimConfig, steps: int, step: int) -> Hyper:
    """The numbers of the update from `step` to `step + 1`."""
    lr = learning_rate(options, steps, step)
    if isinstance(options, AdamW):
        return Hyper(lr=lr, weight_decay=options.weight_decay, first=options.beta1, second=options.beta2)
    assert isinstance(options, SGD)
    return Hyper(lr=lr, weight_decay=options.weight_decay, first=options.momentum, second=0.0)


def stack_hyper(hypers: Sequence[Hyper], device: torch.device, dtype: torch.dtype) -> Hyper:
    """The numbers of a pack's update, each of shape (R,)."""

    def stacked(name: str) -> Tensor:
        return torch.tensor([getattr(hyper, name) for hyper in hypers], dtype=dtype).to(device)

    return Hyper(
        lr=stacked("lr"),
        weight_decay=stacked("weight_decay"),
        first=stacked("first"),
        second=stacked("second"),
    )
