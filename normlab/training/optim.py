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
    progress = 0.0
    if step >= start:
        progress = (step - start) / max(1, steps - start)
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
    if optim.schedule != "wsd":
        return None
    return decay_start(optim, steps)


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
    # The options of each run in each group, in the order of the model.
    by_group: dict[str, list[OptimConfig]] = {}
    for group in dict.fromkeys(groups.values()):
        by_group[group] = [of_run.of_group(group, factors(group)) for of_run in options]

    # Groups whose options are equal but for the weight decay share an update.
    by_update: dict[str, list[str]] = {}
    for group, by_run in by_group.items():
        without_decay = [replace(of_run, weight_decay=0.0) for of_run in by_run]
        by_update.setdefault(repr(without_decay), []).append(group)

    # Each weight decay among them is a family. The groups without one join the first family, so that stacked runs
    # update them by the same operations.
    made: list[Family] = []
    for same_update in by_update.values():
        by_decay: dict[tuple[float, ...], list[str]] = {}
        undecayed: list[str] = []
        for group in same_update:
            decay = tuple(of_run.weight_decay for of_run in by_group[group])
            if any(decay):
                by_decay.setdefault(decay, []).append(group)
            else:
                undecayed.append(group)
        for decayed in by_decay.values() or [[]]:
            first_group = (decayed or undecayed)[0]
            made.append(Family(_names_in(decayed, groups), _names_in(undecayed, groups), by_group[first_group]))
            undecayed = []
    return made


def _names_in(chosen: Sequence[str], groups: Mapping[str, str]) -> list[str]:
    """Return the names of the parameters in some groups, in the order of the model."""
    return [name for name, group in groups.items() if group in chosen]


def decayed_groups(options: OptimConfig, groups: Mapping[str, str]) -> str:
    """Return the names of the groups of a model that have weight decay, or `none`."""
    present, decayed = set(groups.values()), list[str]()
    for group in GROUPS:
        if group in present and options.of_group(group).weight_decay:
            decayed.append(group)
    return ", ".join(decayed) or "none"


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
    coefficients_FRK: list[list[list[float]]] = []
    for by_run in by_family:
        coefficients_FRK.append([_coefficients(of_run.options, float(of_run.lr), count) for of_run in by_run])
    return torch.tensor(coefficients_FRK, dtype=torch.float64).mT


def _coefficients(options: OptimConfig, lr: float, count: int) -> list[float]:
    """Return the coefficients of a run, padded with 0; the last one is that of the cautious decay."""
    coefficients = UPDATES[options.name].coefficients(options, lr, count)
    padding = [0.0] * (COEFFICIENTS - len(coefficients))
    return [*coefficients, *padding, lr * options.cautious_decay]


class HyperparameterTable:
    """The hyperparameters of every step of a run or a pack. They are copied to a device for many steps at once.

    Args:
        families: Those of the optimiser.
        like: A tensor with the device and the dtype of the parameters.
        numbers: Whether a single run's learning rates are Python numbers, which a graph of the step would freeze.
    """

    def __init__(self, families: Sequence[Family], steps: int, like: Tensor, *, numbers: bool) -> None:
        self._options = [family.options for family in families]
        """By family and run."""
        self._steps, self._like, self._numbers = steps, like, numbers
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
        # A device gets the numbers of many steps by one copy from the host.
        first = step - step % STEPS_AT_ONCE
        if first != self._first:
            self._first, self._rows = first, send(self._rows_from(first), device)
        # A graph of the step reads always the same memory, into which the row of the step is copied.
        if self._row is None:
            self._row = torch.empty_like(self._rows[0])
            self.now = self._row
            if is_single:
                options = [by_run[0] for by_run in self._options]
                self.now = [Hyperparameters(lr, of_family) for lr, of_family in zip(self._row, options, strict=True)]
        self._row.copy_(self._rows[step - first])

    def _rows_from(self, first: int) -> Tensor:
        """Return the numbers of the steps from `first` on, on the host."""
        by_step = [self._at(step) for step in range(first, min(first + STEPS_AT_ONCE, self._steps))]
        if len(self._options[0]) > 1:
            rows = [coefficients_of(by_family, count) for count, by_family in enumerate(by_step, first + 1)]
            return torch.stack(rows).to(self._like.dtype)
        rates: list[list[float | Tensor]] = []
        for by_family in by_step:
            rates.append([by_run[0].lr for by_run in by_family])
        return torch.tensor(rates, dtype=torch.float32)  # as the kernel reads them

    def _at(self, step: int) -> list[list[Hyperparameters]]:
        """Return the hyperparameters of a step by family and run."""
        by_family: list[list[Hyperparameters]] = []
        for by_run in self._options:
            by_family.append([hyperparameters_at(options, self._steps, step) for options in by_run])
        return by_family


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
        names: list[str] = []
        names_of_kind: dict[str, list[str]] = {}
        for family in self.families:
            names += family.names
            for kind in family.update.moments:
                names_of_kind.setdefault(kind, []).extend(family.names)
        assert not isinstance(params, Stack) or params.order == names, "a family's columns must be adjacent"
        self.moments: dict[str, Tensors] = {}
        """By kind and parameter, for the parameters whose update has the kind."""
        for kind, kept in names_of_kind.items():
            self.moments[kind] = _zero_moments(kind, kept, params)
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
            options = now.options
            decays = [(family.decayed, options.decay_per_lr, options.cautious_decay), (family.undecayed, 0.0, 0.0)]
            for names, decay, cautious_decay in decays:
                if not names:
                    continue
                tensors, gradients, *moments = self._states_of(family, names, params, grads)
                group = Group(names, tensors, gradients, moments, self.count, now.lr, decay, alive)
                old = flat(tensors) if cautious_decay else None
                family.update.single(options, group)
                # The cautious decay needs the direction of the update, so it comes after it.
                if old is not None:
                    new = flat(tensors)
                    decay_cautiously(new, old, now.lr * cautious_decay, alive)
                    unflatten(tensors, new)

    def _states_of(
        self, family: Family, names: Sequence[str], params: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> list[list[Tensor]]:
        """Return the named parameters, their gradients and each kind of their moments."""
        states: list[list[Tensor]] = []
        for by_name in (params, grads, *(self.moments[kind] for kind in family.update.moments)):
            states.append([by_name[name] for name in names])
        return states

    def _update_stack(self, params: Stack, grads: Stack, coefficients_FKR: Tensor, alive: Tensor) -> None:
        coefficients_FKR1 = coefficients_FKR[..., None].to(params.buffer.dtype)
        for family, coefficients_KR1 in zip(self.families, coefficients_FKR1, strict=True):
            states = [params, grads, *(self.moments[kind] for kind in family.update.moments)]
            columns, gradients, *moments = [state.slice(family.names) for state in states]
            group = StackedGroup(
                columns, gradients, moments, params.columns(family.decayed), coefficients_KR1[:-1], alive,
                family.names, self._states_of(family, family.names, params, grads),
            )  # fmt: skip
            decayed = columns[:, : group.decayed]
            is_cautious = any(options.cautious_decay for options in family.options)
            old = decayed.clone() if is_cautious else None
            family.update.stacked(family.options[0], group)
            if old is not None:
                decay_cautiously(decayed, old, coefficients_KR1[-1], alive)


def _zero_moments(kind: str, names: list[str], params: Mapping[str, Tensor]) -> Tensors:
    """Return zeros of the shapes of the named parameters; those of rows have one number for each row."""
    if isinstance(params, Stack):
        kept: Tensors = params.only(names)
    else:
        kept = {name: params[name] for name in names}
    if kind == ROWS:
        rows = {name: tensor[..., :1] for name, tensor in kept.items()}
        kept = Stack(rows, order=names) if isinstance(params, Stack) else rows
    return zeros_like(kept)
