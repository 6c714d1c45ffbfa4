"""Arms of models of several sizes: the cells of each, and their losses over the compute of training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.special import stdtrit

from normlab.analysis.cells import Cell, mean
from normlab.analysis.comparability import SIZE_OPTIONS
from normlab.analysis.contrasts import Key
from normlab.analysis.factors import label
from normlab.analysis.intervals import LEVEL, Replicate, design_of
from normlab.analysis.learning_rates import best_lr
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
        levels = dict(self.levels)
        levels.pop(option, None)
        if not levels:
            return ""
        return label(levels, levels.values())

    def label_of_size(self, size: Key) -> str:
        return label(self.size_options, size)

    @cached_property
    def runs(self) -> list[RunRecord]:
        """The runs at the learning rates of the law, also of sizes at which none has learned."""
        runs: list[RunRecord] = []
        for cell in (*self.cells.values(), *self.unlearned):
            runs += cell.runs_at(rate_of(cell))
        return runs

    def losses_at(self, size: Key, lr: float | None = None) -> dict[Replicate, float]:
        """Return the loss of each seed of which every run has learned; by default at the learning rate of the law."""
        cell = self.cells[size]
        if lr is None:
            lr = rate_of(cell)
        losses = dict(cell.final_at(lr).losses)
        for run in cell.runs_at(lr):
            if not run.has_learned:
                losses.pop(run.replicate, None)
        return losses

    def compute_at(self, size: Key) -> float:
        """Return the FLOPs of training a run of a size that has learned."""
        cell = self.cells[size]
        flops: list[float] = []
        for run in cell.runs_at(rate_of(cell)):
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


def rate_of(cell: Cell) -> float | None:
    """Return the learning rate of a cell in a law: the one with the most seeds, and of several such the best.

    A ladder whose rates are transferred from its smallest size trains most seeds at these, and a few at others, which
    check them. A rate with one seed may have the lowest loss by luck.
    """
    counts = {lr: len(losses) for lr, losses in cell.losses.items()}
    most = max(counts.values(), default=0)
    return best_lr({lr: cell.ranking[lr] for lr, count in counts.items() if count == most})


@dataclass(frozen=True)
class Regret:
    """How much lower the loss of a size is at a learning rate that checks the one of the law."""

    arm: SizedArm
    size: Key
    lr: float
    """The other rate. Of several it is one that makes the regret void, if there is one, and the best of these."""
    n: int
    """The seeds that both rates have."""
    value: float
    """The mean over these of the loss at the law's rate minus that at the other one, nats/token."""
    half: float | None
    """Half of its interval, corrected for the number of rates; None without noise."""

    @property
    def is_void(self) -> bool:
        """Whether the law's rate is worse than another one by more than the noise."""
        return self.half is not None and self.value > self.half


def regrets_of(arms: Sequence[SizedArm], ladder: Ladder) -> list[Regret]:
    """Return the regret of each size whose learning rate is checked by rates with fewer seeds."""
    regrets: list[Regret] = []
    for arm, variance, freedom in zip(arms, ladder.variances_G, ladder.freedom_of_variance_G, strict=True):
        for size in arm.cells:
            checks = _checks_of(arm, size)
            if not checks:
                continue
            if ladder.has_noise:
                quantile = float(stdtrit(freedom, 1 - (1 - LEVEL) / 2 / len(checks)))
                checks = [replace(check, half=quantile * math.sqrt(2 * variance / check.n)) for check in checks]
            regrets.append(max(checks, key=lambda check: (check.is_void, check.value)))
    return regrets


def _checks_of(arm: SizedArm, size: Key) -> list[Regret]:
    """Return the regret of a size against each rate with fewer seeds, without its interval."""
    cell = arm.cells[size]
    law_losses = arm.losses_at(size)
    most_seeds = max(map(len, cell.losses.values()))
    checks: list[Regret] = []
    for lr in cell.losses:
        # A rate with as many seeds is no check, but another one of a grid, whose best has been chosen.
        if len(cell.losses[lr]) == most_seeds:
            continue
        losses = arm.losses_at(size, lr)
        differences: list[float] = []
        for seed in law_losses.keys() & losses.keys():
            differences.append(law_losses[seed] - losses[seed])
        value = mean(differences)
        if value is not None:
            checks.append(Regret(arm, size, lr, len(differences), value, None))
    return checks


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
        if any(run.has_learned for run in cell.runs_at(rate_of(cell))):
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
    regrets: list[Regret]
    """Of all sizes whose learning rate is checked. A size whose regret is void is in no law."""


def fit_arms(cells: Iterable[Cell]) -> FittedArms:
    """Fit laws to the arms of some cells.

    Raises:
        ConfigError: No arm has enough sizes, the losses of none determine a law, or seeds are crossed.
    """
    all_arms = arms_of(cells)
    regrets = regrets_of(all_arms, ladder_of(all_arms))
    for regret in regrets:
        if regret.is_void:
            del regret.arm.cells[regret.size]
    arms: list[SizedArm] = []
    too_few: list[SizedArm] = []
    for arm in all_arms:
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
            return FittedArms(arms, laws, too_few, undetermined, regrets)
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
