"""Optimisers and learning-rate schedules. Updates are in place, by fused kernels or, for stacked runs, on one buffer.

The parameters whose updates have the same hyperparameters are a family, which is updated by the same operations.

An optimiser keeps its moments as tensors by the names of the parameters, like these in a `Stack` for stacked runs, and
one count of the updates made. An update with `alive` false changes nothing; the host does not read `alive`.

Shapes: R runs, the leading axis of every tensor of stacked runs; `...R` marks an axis that only those have. F families,
K coefficients of an update.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normlab.catalogue.optimizers.options import GROUPS, UNSCALED, GroupFactors, OptimConfig
from normlab.catalogue.optimizers.updates import (
    COEFFICIENTS,
    ROWS,
    UPDATES,
    Group,
    StackedGroup,
    Update,
    decay_cautiously,
    flat,
    unflatten,
)
from normlab.data.batches import send
from normlab.model.stack import Stack, zeros_like

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


@dataclass(frozen=True, slots=True)
class Family:
    """Parameters with the same hyperparameters, except that some may have no weight decay."""

    decayed: list[str]
    """The names of those with weight decay."""
    undecayed: list[str]
    options: list[OptimConfig]
    """For each run those of the decayed parameters, or of all if none is decayed."""

    @property
    def update(self) -> Update:
        return UPDATES[self.options[0].name]

    @property
    def names(self) -> list[str]:
        return [*self.decayed, *self.undecayed]


Factors = Callable[[str], GroupFactors]
"""`ModelConfig.factors_of`."""


def unscaled(group: str) -> GroupFactors:
    return UNSCALED


def families(options: Sequence[OptimConfig], groups: Mapping[str, str], factors: Factors = unscaled) -> list[Family]:
    """Return the families of a model's parameters.

    Args:
        options: Those of each run.
        groups: The group of each parameter by its name (`model.groups.groups_of`).
        factors: Those on the options of a group.
    """
    by_group = {
        group: [each.of_group(group, factors(group)) for each in options] for group in dict.fromkeys(groups.values())
    }
    rates = {group: repr([replace(each, weight_decay=0.0) for each in runs]) for group, runs in by_group.items()}
    decays = {group: tuple(each.weight_decay for each in runs) for group, runs in by_group.items()}
    found: list[Family] = []
    for rate in dict.fromkeys(rates.values()):
        same = {group: decays[group] for group in by_group if rates[group] == rate}
        undecayed = [group for group, decay in same.items() if not any(decay)]
        for decay in dict.fromkeys(decay for decay in same.values() if any(decay)) or [decays[undecayed[0]]]:
            decayed = [group for group in same if any(decay) and same[group] == decay]
            chosen, others = ([name for name in groups if groups[name] in each] for each in (decayed, undecayed))
            found.append(Family(chosen, others, by_group[(decayed or undecayed)[0]]))
            undecayed = []
    return found


def decayed_groups(options: OptimConfig, groups: Mapping[str, str]) -> str:
    """Return the names of the groups of a model that have weight decay, or `none`."""
    present = [group for group in GROUPS if group in groups.values()]
    return ", ".join(group for group in present if options.of_group(group).weight_decay) or "none"


@dataclass(slots=True)
class Hyperparameters:
    """The hyperparameters of one update of a run."""

    lr: float | Tensor
    """Of this step: a Python number, or a tensor, which a graph of the step reads again."""
    options: OptimConfig
    """Of this run."""


def hyperparameters_at(options: OptimConfig, steps: int, step: int) -> Hyperparameters:
    """Return those of the update of a family of one run from `step` to `step + 1`, of `steps` in all."""
    return Hyperparameters(learning_rate(options, steps, step), options)


def coefficients_of(by_family: Sequence[Sequence[Hyperparameters]], count: int) -> Tensor:
    """Return the coefficients of update number `count` (from 1) of stacked runs, (F, K, R), in float64."""
    rows = [[_coefficients(each.options, float(each.lr), count) for each in by_run] for by_run in by_family]
    return torch.tensor(rows, dtype=torch.float64).mT


def _coefficients(options: OptimConfig, lr: float, count: int) -> list[float]:
    """Return the coefficients of a run, padded with 0; the last one is that of the cautious decay."""
    own = UPDATES[options.name].coefficients(options, lr, count)
    return [*own, *[0.0] * (COEFFICIENTS - len(own)), lr * options.cautious_decay]


class HyperparameterTable:
    """The hyperparameters of every step of a run or a pack. They are copied to a device for many steps at once.

    Args:
        families: Those of the optimiser.
        like: A tensor with the device and the dtype of the parameters.
        numbers: Whether a single run's learning rates are Python numbers, which a graph of the step would freeze.
    """

    def __init__(self, families: Sequence[Family], steps: int, like: Tensor, *, numbers: bool) -> None:
        self._options, self._steps, self._like, self._numbers = [f.options for f in families], steps, like, numbers
        self._first = -1
        self._rows = like
        """Of the steps from `_first` on: the learning rates of a single run, or the coefficients of a pack."""
        self._row: Tensor | None = None
        self.now: Sequence[Hyperparameters] | Tensor = like
        """Those of the loaded step: of a single run, one for each family, or the coefficients of a pack, (F, K, R),
        always in one memory."""

    def load(self, step: int) -> None:
        """Make `now` those of a step."""
        is_single, device = len(self._options[0]) == 1, self._like.device
        if is_single and self._numbers:
            self.now = [by_run[0] for by_run in self._at(step)]
            return
        first = step - step % STEPS_AT_ONCE
        if first != self._first:
            by_step = [self._at(number) for number in range(first, min(first + STEPS_AT_ONCE, self._steps))]
            if is_single:  # float32, as the kernel reads it
                rows = torch.tensor([[by_run[0].lr for by_run in each] for each in by_step], dtype=torch.float32)
            else:
                rows = torch.stack([coefficients_of(each, count) for count, each in enumerate(by_step, first + 1)])
                rows = rows.to(self._like.dtype)
            self._first, self._rows = first, send(rows, device)
        if self._row is None:
            self._row = torch.empty_like(self._rows[0])
            options = [by_run[0] for by_run in self._options]
            self.now = list(map(Hyperparameters, self._row, options)) if is_single else self._row
        self._row.copy_(self._rows[step - first])

    def _at(self, step: int) -> list[list[Hyperparameters]]:
        """Return the hyperparameters of a step by family and run."""
        return [[hyperparameters_at(each, self._steps, step) for each in by_run] for by_run in self._options]


class Optimizer:
    """The state of an optimiser, and its updates.

    Args:
        options: Those of each run.
        params: The parameters, whose shapes the moments have.
        groups: The group of each parameter by its name (`model.groups.groups_of`). The buffers of stacked runs have
            the order of the families.
        factors: Those on the options of a group.
    """

    def __init__(
        self, options: Sequence[OptimConfig], params: Mapping[str, Tensor], groups: Mapping[str, str],
        factors: Factors = unscaled,
    ):  # fmt: skip
        self.families = families(options, groups, factors)
        names = [name for family in self.families for name in family.names]
        assert not isinstance(params, Stack) or params.order == names, "a family's columns must be adjacent"
        self.moments: dict[str, Tensors] = {}
        """By kind and parameter, for the parameters whose update has the kind."""
        for kind in dict.fromkeys(kind for family in self.families for kind in family.update.moments):
            kept = [name for family in self.families if kind in family.update.moments for name in family.names]
            of_kind = params.only(kept) if isinstance(params, Stack) else {name: params[name] for name in kept}
            if kind == ROWS:
                rows = {name: tensor[..., :1] for name, tensor in of_kind.items()}
                of_kind = Stack(rows, order=kept) if isinstance(params, Stack) else rows
            self.moments[kind] = zeros_like(of_kind)
        self.count = torch.zeros((), dtype=torch.float32, device=next(iter(params.values())).device)
        """Updates made, on the device."""

    @torch.no_grad()
    def update(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        hyperparameters: Sequence[Hyperparameters] | Tensor,
        alive: Tensor,
    ) -> None:
        """Update the parameters in place where `alive`.

        Args:
            grads: Their gradients, with the same strides: the kernels treat both as flat arrays. Those of stacked runs
                are overwritten.
            hyperparameters: Those of the single run, one for each family, or `coefficients_of` stacked runs.
            alive: Whether to make the update, shape (...R).
        """
        self.count += alive.any()
        if isinstance(hyperparameters, Tensor):
            assert isinstance(params, Stack)
            assert isinstance(grads, Stack)
            self._update_stack(params, grads, hyperparameters, alive[:, None])
            return
        for family, now in zip(self.families, hyperparameters, strict=True):
            states = (params, grads, *(self.moments[kind] for kind in family.update.moments))
            for names, decay in ((family.decayed, now.options.decay_per_lr), (family.undecayed, 0.0)):
                if names:
                    tensors, gradients, *moments = [[state[name] for name in names] for state in states]
                    group = Group(names, tensors, gradients, moments, self.count, now.lr, decay, alive)
                    cautious = now.options.cautious_decay if names is family.decayed else 0.0
                    old = flat(tensors) if cautious else None
                    family.update.single(now.options, group)
                    if old is not None:
                        new = flat(tensors)
                        decay_cautiously(new, old, now.lr * cautious, alive)
                        unflatten(tensors, new)

    def _update_stack(self, params: Stack, grads: Stack, coefficients_FKR: Tensor, alive: Tensor) -> None:
        coefficients_FKR1 = coefficients_FKR[..., None].to(params.buffer.dtype)
        for family, coefficients_KR1 in zip(self.families, coefficients_FKR1, strict=True):
            states = [params, grads, *(self.moments[kind] for kind in family.update.moments)]
            columns, gradients, *moments = [state.slice(family.names) for state in states]
            group = StackedGroup(
                columns, gradients, moments, params.columns(family.decayed), coefficients_KR1[:-1], alive,
                family.names, [[state[name] for name in family.names] for state in states],
            )  # fmt: skip
            decayed = columns[:, : group.decayed]
            old = decayed.clone() if any(each.cautious_decay for each in family.options) else None
            family.update.stacked(family.options[0], group)
            if old is not None:
                decay_cautiously(decayed, old, coefficients_KR1[-1], alive)
