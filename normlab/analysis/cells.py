"""Group runs into cells, and warn about runs and cells that are not comparable."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from normlab.analysis.comparability import DATA, SIZE_OPTIONS, differences, names_of, obstacles, reason_not_comparable
from normlab.analysis.factors import label, level_label
from normlab.analysis.intervals import Interval, Replicate, mean_interval
from normlab.analysis.learning_rates import Losses, Ranking, arrange, best_lr, ranking
from normlab.analysis.phrases import name_some
from normlab.analysis.settings import (
    LR,
    NUMERICS,
    RESOLVED,
    format_setting,
    is_config_option,
    levels_of,
    setting,
    sort_key,
)
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
        return mean_interval(self.losses, least=0.0) if self.losses else None

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
        return frozenset(run.lr for run in self.completed if not run.has_learned)

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
        repeats = Counter((run.lr, run.replicate) for run in self.completed)
        repeated = sum(count > 1 for count in repeats.values())
        if repeated:
            warnings.append(f"seeds with several runs at one learning rate, averaged to one value each: {repeated}")
        return [*warnings, *self._warnings_of_rates(), *self.notes]

    def _warnings_of_rates(self) -> list[str]:
        """Return why the best learning rate may not be the best one, one reason per line."""
        if len(self.losses) < 2:
            return []
        warnings: list[str] = []
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
    grouped: dict[tuple[Setting, ...], list[RunRecord]] = {}
    for run in runs:
        grouped.setdefault(tuple(setting(run, option) for option in by), []).append(run)
    levels = [levels_of(option, runs) for option in by]

    def order(key: tuple[Setting, ...]) -> list[int]:
        """Return the position of each level of a cell."""
        return [levels_of_option.index(level) for levels_of_option, level in zip(levels, key, strict=True)]

    return [Cell(by, key, grouped[key]) for key in sorted(grouped, key=order)]


def resolved_differences(cells: Sequence[Cell]) -> list[str]:
    """Return a line that names the resolved settings in which cells differ, with the cells of each value, or no line.

    Options that define the cells are left out, and so are runs whose record lacks a setting.
    """
    parts: list[str] = []
    for name, read in RESOLVED.items():
        if any(name in cell.by for cell in cells):
            continue
        cells_of: dict[tuple[str, ...], list[Cell]] = {}
        for cell in cells:
            values = set(map(read, cell.runs)) - {None}
            if values:
                texts = tuple(map(format_setting, sorted(values, key=sort_key)))
                cells_of.setdefault(texts, []).append(cell)
        if len(cells_of) > 1:
            names = _shortest_names(list(cells_of.values()))
            listed = [f"{' and '.join(texts)} ({name})" for texts, name in zip(cells_of, names, strict=True)]
            parts.append(f"{name}: {', '.join(listed)}")
    if not parts:
        return []
    return [f"the cells also differ in {'; '.join(parts)}"]


def _shortest_names(groups: Sequence[Sequence[Cell]]) -> list[str]:
    """Return a name of each group of cells: the levels of one option if it separates the groups, else the cells."""
    for index, option in enumerate(groups[0][0].by):
        levels_of_groups: list[list[Setting]] = []
        for group in groups:
            levels_of_groups.append(list(dict.fromkeys(cell.key[index] for cell in group)))
        # The option separates the groups if no two of them share a level.
        different = set[Setting]().union(*levels_of_groups)
        if len(different) == sum(map(len, levels_of_groups)):
            return [_level_names(option, levels) for levels in levels_of_groups]
    return [name_some([cell.label for cell in group]) for group in groups]


def _level_names(option: str, levels: Iterable[Setting]) -> str:
    return name_some([level_label(option, level) for level in levels])


def table_warnings(cells: Sequence[Cell], by: Sequence[str]) -> list[str]:
    """Return why the cells of a table are not comparable, except mixtures in a cell and `resolved_differences`."""
    runs = runs_of(cells)
    # What differs within a cell is a warning of the cell.
    # Resolved settings have their own line below a table.
    reported: list[str] = []
    for name in RESOLVED:
        reported += name, f"{NUMERICS}{name})"
    for cell in cells:
        reported += names_of(differences(cell.runs))
    warnings: list[str] = []
    different = differences(runs, [*by, *reported])
    if different:
        warnings.append(f"the cells differ in more than {', '.join(by)}: {'; '.join(map(str, different))}")
    obstacle = _obstacle_warning(cells, by)
    if obstacle:
        warnings.append(obstacle)
    # A cell with more learning rates has more chances of a low loss; a search gives each cell its own rates.
    rates = {tuple(cell.losses) for cell in cells if cell.losses}
    is_tuned = all(LR in run.design.searched for run in runs)
    if LR not in by and len(rates) > 1 and not is_tuned:
        if all(len(lrs) == 1 for lrs in rates):
            line = "each cell has one learning rate, not the same one: compare them only if it was tuned for each"
        else:
            line = "the cells have different learning rates: their best losses are not comparable"
        warnings.append(line)
    return warnings


def _obstacle_warning(cells: Sequence[Cell], by: Sequence[str]) -> str:
    """Return a warning that cells are not ranked because they differ in compute or data, or an empty text."""
    apart = names_of(obstacles([cell.runs for cell in cells], by))
    if not apart:
        return ""
    line = f"cells that differ in {' or '.join(apart)} are neither ranked nor tested against each other"
    options = list(filter(is_config_option, apart))
    if options:
        line += f"; --by {','.join([*by, *options])} compares cells with equal values"
    if "corpus" in apart:
        line += "; summarize each corpus by itself"
    return line
