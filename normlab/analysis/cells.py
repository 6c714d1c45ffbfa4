"""Group runs into cells: their losses by learning rate and seed, their best learning rate, and their warnings.

What differs between cells is in `cell_differences`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from normlab.analysis.comparability import DATA, SIZE_OPTIONS, differences, reason_not_comparable
from normlab.analysis.factors import label
from normlab.analysis.intervals import Interval, Replicate, mean_interval
from normlab.analysis.learning_rates import Losses, Ranking, arrange, best_lr, ranking
from normlab.analysis.settings import format_setting, levels_of, setting
from normlab.store.format import DIVERGED
from normlab.store.outcome import REGRESSED, STUCK
from normlab.store.record import UNFINISHED, RunRecord, Setting
from normlab.store.series import Evaluation

if TYPE_CHECKING:
    from normlab.analysis.best import Comparison

RANKED_APART = (*SIZE_OPTIONS, *DATA)
"""Options that set compute or data; a best cell is one among cells in which these are equal."""
BAD_OUTCOMES = (DIVERGED, STUCK, REGRESSED)
"""The outcomes of completed runs that did not train."""


@dataclass(frozen=True)
class SeedMean:
    """A loss of a cell at one learning rate, in nats/token, over the replicates.

    If a run diverged, the mean is infinite. The mean of the others has no interval, because the surviving runs are not
    a random sample.
    """

    losses: Mapping[Replicate, float]

    @cached_property
    def interval(self) -> Interval | None:
        if not self.losses:
            return None
        # A cross-entropy is never negative, and neither is its mean.
        return mean_interval(self.losses, least=0.0)

    @cached_property
    def finite(self) -> list[float]:
        return list(filter(math.isfinite, self.losses.values()))

    @property
    def diverged(self) -> int:
        return len(self.losses) - len(self.finite)

    @property
    def mean_of_others(self) -> float | None:
        """The mean of the replicates that did not diverge, if one diverged."""
        return mean(self.finite) if self.diverged else None


def mean(values: Collection[float]) -> float | None:
    if not values:
        return None
    return math.fsum(values) / len(values)


@dataclass(frozen=True, slots=True)
class Target:
    loss: float
    runs: int
    reached: Sequence[Evaluation]
    """The first evaluation of each run at the loss or below."""

    @property
    def count(self) -> int:
        """The number of runs that reached the loss."""
        return len(self.reached)

    @property
    def steps(self) -> float | None:
        """The mean number of steps; None unless every run reached the loss."""
        if self.count != self.runs:
            return None
        return mean([evaluation.step for evaluation in self.reached])

    @property
    def seconds(self) -> float | None:
        """The mean training time; None unless every run reached the loss and has a time on record."""
        times: list[float] = []
        for evaluation in self.reached:
            if evaluation.seconds is not None:
                times.append(evaluation.seconds)
        if len(times) != self.runs:
            return None
        return mean(times)


@dataclass(frozen=True)
class Cell:
    """The runs with the same values of the options of `--by`, which differ in learning rate and seed."""

    by: Sequence[str]
    key: tuple[Setting, ...]
    runs: Sequence[RunRecord]
    notes: Sequence[str] = ()
    """Warnings about the target and the baseline, besides those that follow from the runs."""
    target: Target | None = None
    baseline: Cell | None = None
    comparison: Comparison | None = None
    """With the baseline."""

    @cached_property
    def levels(self) -> dict[str, Setting]:
        return dict(zip(self.by, self.key, strict=True))

    @property
    def name(self) -> str:
        """The values as on the command line, separated by spaces."""
        return " ".join(map(format_setting, self.key))

    @property
    def label(self) -> str:
        """The values as in text: `DeepNorm, depth 8, no warm-up`."""
        return label(self.by, self.key)

    @property
    def arm(self) -> str:
        """The label without the options of `RANKED_APART`."""
        levels = dict(self.levels)
        for option in RANKED_APART:
            levels.pop(option, None)
        return label(levels, levels.values())

    @cached_property
    def completed(self) -> list[RunRecord]:
        """The runs with a final loss, which is infinite if the run diverged."""
        return [run for run in self.runs if run.has_loss]

    @cached_property
    def losses(self) -> Losses:
        """Final validation losses, by learning rate and replicate."""
        return arrange((run.lr, run.replicate, run.loss) for run in self.completed)

    @cached_property
    def bad_lrs(self) -> frozenset[float]:
        """Learning rates at which a completed run diverged or has not learned to use the context."""
        bad: set[float] = set()
        for run in self.completed:
            if not run.has_learned:
                bad.add(run.lr)
        return frozenset(bad)

    @property
    def has_learned(self) -> bool:
        """Whether a run has learned to use the context."""
        return any(run.has_learned for run in self.runs)

    @cached_property
    def ranking(self) -> Ranking:
        return ranking(self.losses, self.bad_lrs)

    @cached_property
    def best_lr(self) -> float | None:
        return best_lr(self.ranking)

    @cached_property
    def final(self) -> SeedMean:
        """The final validation losses at the best learning rate."""
        return self.final_at(self.best_lr)

    def final_at(self, lr: float | None) -> SeedMean:
        if lr is None:
            return SeedMean({})
        return SeedMean(self.losses[lr])

    @property
    def has_bad_outcome(self) -> bool:
        """Whether a run at the best learning rate diverged, is stuck or regressed."""
        return count_bad(self.runs_at(self.best_lr)) > 0

    @property
    def has_unlearned_run(self) -> bool:
        """Whether a run at the best learning rate diverged or has not learned; a short one need have no bad outcome."""
        return self.best_lr in self.bad_lrs

    @property
    def runs_at_best(self) -> Sequence[RunRecord]:
        """The runs at the best learning rate; all runs of a cell without a final loss."""
        return self.runs_at(self.best_lr) or self.runs

    def runs_at(self, lr: float | None) -> list[RunRecord]:
        return [run for run in self.completed if run.lr == lr]

    def count(self, result: str) -> int:
        return sum(run.result == result for run in self.runs)

    @property
    def loss_at_start(self) -> float:
        """Ln V, the loss of a uniform guess."""
        return max(run.corpus.baselines.uniform for run in self.runs)

    @cached_property
    def warnings(self) -> list[str]:
        """The reasons why the cell's numbers are unreliable, one per line."""
        warnings: list[str] = []
        for mixture in differences(self.runs):
            warnings.append(f"runs in one cell differ in {mixture}")
        unfinished = self.count(UNFINISHED)
        if unfinished:
            warnings.append(f"unfinished runs, left out: {unfinished} of {len(self.runs)}")
        # Bit-identical repeats are no further evidence, so that they count once (`learning_rates.arrange`).
        runs_of_seeds = Counter((run.lr, run.replicate) for run in self.completed)
        repeated = 0
        for count in runs_of_seeds.values():
            if count > 1:
                repeated += 1
        if repeated:
            warnings.append(f"seeds with several runs at one learning rate, averaged to one value each: {repeated}")
        return [*warnings, *self._warnings_of_rates(), *self.notes]

    def _warnings_of_rates(self) -> list[str]:
        """Return why the best learning rate may not be the best one, one reason per line."""
        # A run of no steps measures an initial model, which nobody expects to have learned.
        if self.completed and not self.has_learned and any(run.config.train.steps for run in self.completed):
            return [
                "no run has learned, so a comparison says only that; train longer, or set other options (pitfalls: "
                "normlab list norms NAME, normlab list placements NAME)"
            ]
        if len(self.losses) < 2:
            return []
        warnings: list[str] = []
        # A rate with other seeds may have the lower mean because of its seeds.
        seeds_of_rates = {frozenset(by_replicate) for by_replicate in self.losses.values()}
        if len(seeds_of_rates) > 1:
            counts: list[str] = []
            for lr, losses in self.losses.items():
                counts.append(f"{format_setting(lr)}: {len(losses)}")
            warnings.append(f"the learning rates have different seeds (number of seeds: {', '.join(counts)})")
        # A best rate at an end says nothing of what lies beyond.
        if self.best_lr == min(self.losses):
            warnings.append("the best learning rate is the lowest of the grid; a lower one may be better")
        if self.best_lr == max(self.losses):
            warnings.append("the best learning rate is the highest of the grid; a higher one may be better")
        return warnings

    def values(self, read: Callable[[RunRecord], float | None]) -> list[float]:
        """Return a number of each run with a finite loss whose record has it."""
        values: list[float] = []
        for run in self.runs:
            if math.isfinite(run.loss):
                value = read(run)
                if value is not None:
                    values.append(value)
        return values


def runs_of(cells: Iterable[Cell]) -> list[RunRecord]:
    """Return the runs of all cells."""
    return [run for cell in cells for run in cell.runs]


def reason_cells_not_comparable(cells: Sequence[Cell]) -> str:
    """Return why the losses of cells must not be compared, or an empty text."""
    return reason_not_comparable([cell.runs for cell in cells], cells[0].by)


def count_bad(runs: Iterable[RunRecord]) -> int:
    return sum(run.result in BAD_OUTCOMES for run in runs)


def group_cells(runs: Iterable[RunRecord], by: Sequence[str]) -> list[Cell]:
    """Return the cells sorted by their values, as `levels_of` sorts them."""
    runs = list(runs)
    runs_by_key: dict[tuple[Setting, ...], list[RunRecord]] = {}
    for run in runs:
        key = tuple(setting(run, option) for option in by)
        runs_by_key.setdefault(key, []).append(run)
    levels_of_options = [levels_of(option, runs) for option in by]

    def positions(key: tuple[Setting, ...]) -> list[int]:
        """Return the position of each of a cell's levels among those of its option."""
        return [levels.index(level) for levels, level in zip(levels_of_options, key, strict=True)]

    return [Cell(by, key, runs_by_key[key]) for key in sorted(runs_by_key, key=positions)]
