"""Arms of models of several sizes: the cells of each, and their losses over the compute of training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from normlab.analysis.cells import Cell, mean
from normlab.analysis.comparability import SIZE_OPTIONS
from normlab.analysis.contrasts import Key
from normlab.analysis.factors import label
from normlab.analysis.intervals import Replicate, design_of
from normlab.analysis.scaling_laws import Ladder, Laws, fit_laws
from normlab.base.errors import ConfigError
from normlab.store.record import RunRecord, Setting

FEWEST_SIZES = 3
"""The fewest sizes of an arm, whose law has three numbers."""


@dataclass(frozen=True)
class SizedArm:
    """The cells with equal levels outside the size of the model and of its batches."""

    levels: Mapping[str, Setting]
    """The levels outside the size."""
    size_options: Sequence[str]
    cells: dict[Key, Cell]
    """By their size: those of which a run has learned."""
    unlearned: list[Cell]
    """The others."""

    @property
    def label(self) -> str:
        return label(self.levels, self.levels.values())

    def label_without(self, option: str) -> str:
        """Return the label without one of the options; empty if there is no other."""
        others = {other: level for other, level in self.levels.items() if other != option}
        return label(others, others.values()) if others else ""

    def label_of_size(self, size: Key) -> str:
        return label(self.size_options, size)

    @cached_property
    def runs(self) -> list[RunRecord]:
        """The runs at the best learning rates, also of sizes at which none has learned."""
        runs: list[RunRecord] = []
        for cell in (*self.cells.values(), *self.unlearned):
            runs += cell.runs_at(cell.best_lr)
        return runs

    def losses_at(self, size: Key) -> dict[Replicate, float]:
        """Return the loss of each seed of which every run has learned, at the best learning rate."""
        cell = self.cells[size]
        losses = dict(cell.final.losses)
        for run in cell.runs_at(cell.best_lr):
            if not run.has_learned:
                losses.pop(run.replicate, None)
        return losses

    def compute_at(self, size: Key) -> float:
        """Return the FLOPs of training a run of a size that has learned."""
        cell = self.cells[size]
        flops: list[float] = []
        for run in cell.runs_at(cell.best_lr):
            if run.has_learned:
                flops.append(run.run.flops_per_token * run.status.tokens)
        return mean(flops) or 0.0

    def among(self, arms: Sequence[SizedArm], option: str, level: Setting) -> SizedArm | None:
        """Return the arm that differs from this one only in the level of an option; None if there is none."""
        wanted = {**self.levels, option: level}
        for arm in arms:
            if arm.levels == wanted:
                return arm
        return None


def arms_of(cells: Iterable[Cell]) -> list[SizedArm]:
    """Return the arms of some cells, with the cells of which a run has learned."""
    arms: dict[tuple[Setting, ...], SizedArm] = {}
    for cell in cells:
        levels: dict[str, Setting] = {}
        size: dict[str, Setting] = {}
        for option, level in cell.levels.items():
            if option in SIZE_OPTIONS:
                size[option] = level
            else:
                levels[option] = level
        arm = arms.setdefault(tuple(levels.values()), SizedArm(levels, list(size), {}, []))
        if any(run.has_learned for run in cell.runs_at(cell.best_lr)):
            arm.cells[tuple(size.values())] = cell
        else:
            arm.unlearned.append(cell)
    return list(arms.values())


def ladder_of(arms: Sequence[SizedArm]) -> Ladder:
    """Return the losses of arms by size and seed.

    Raises:
        ConfigError: The seeds of a cell are crossed, so that its losses are not independent.
    """
    sizes: dict[Key, None] = {}
    seeds: dict[Replicate, None] = {}
    for arm in arms:
        for size in arm.cells:
            losses = arm.losses_at(size)
            if design_of(losses).crossed:
                raise ConfigError(
                    f"{arm.cells[size].label}: seed and data.seed are crossed, and laws need "
                    "independent seeds; select some with --where, such as data.seed=0"
                )
            sizes[size] = None
            seeds |= dict.fromkeys(losses)
    losses_GKS = np.full((len(arms), len(sizes), len(seeds)), np.nan)
    log_compute_GK = np.zeros((len(arms), len(sizes)))
    for g, arm in enumerate(arms):
        for k, size in enumerate(sizes):
            # An arm may lack a size.
            if size not in arm.cells:
                continue
            log_compute_GK[g, k] = math.log(arm.compute_at(size))
            losses = arm.losses_at(size)
            losses_GKS[g, k] = [losses.get(seed, math.nan) for seed in seeds]
    return Ladder(losses_GKS, log_compute_GK)


@dataclass(frozen=True)
class FittedArms:
    """The arms of some cells that have a law, and those that have none."""

    arms: list[SizedArm]
    laws: Laws
    """Of these arms, in their order."""
    too_few: list[SizedArm]
    """Arms with fewer than `FEWEST_SIZES`."""
    undetermined: list[SizedArm]
    """Arms whose losses determine no law."""


def fit_arms(cells: Iterable[Cell]) -> FittedArms:
    """Fit laws to the arms of some cells.

    Raises:
        ConfigError: No arm has enough sizes, the losses of none determine a law, or seeds are crossed.
    """
    arms: list[SizedArm] = []
    too_few: list[SizedArm] = []
    for arm in arms_of(cells):
        if len(arm.cells) >= FEWEST_SIZES:
            arms.append(arm)
        else:
            too_few.append(arm)
    if not arms:
        raise ConfigError(
            f"needs {FEWEST_SIZES} sizes at which runs of an arm have learned; sweep the size, such as "
            "model.width=32,48,64,96 with train.tokens_per_parameter=20, and have it among the factors (--by)"
        )
    undetermined: list[SizedArm] = []
    while arms:
        laws = fit_laws(ladder_of(arms))
        if all(laws.is_determined_G):
            return FittedArms(arms, laws, too_few, undetermined)
        # An arm without a law must not change the E of the others.
        determined: list[SizedArm] = []
        for arm, is_determined in zip(arms, laws.is_determined_G, strict=True):
            if is_determined:
                determined.append(arm)
            else:
                undetermined.append(arm)
        arms = determined
    raise ConfigError(
        "the losses do not fall with compute as a law does, or not by more than their noise; train larger "
        "models, each with more tokens, or more seeds"
    )
