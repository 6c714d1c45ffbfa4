"""Group runs into cells, rank them, and warn where runs of a cell, or cells of a table, are not comparable.

A cell is the runs that have the same values of the options of `--by` (for example `norm,placement`), over all learning
rates and seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from normlab.report.intervals import Replicate
from normlab.report.learning_rates import Losses, Ranking, arrange, badness, best_lr, ranking
from normlab.report.settings import LR, SEEDS, differing_settings, format_setting, setting, settings_of
from normlab.store.outcome import OUTCOMES, loss_of
from normlab.store.reading import HOW_TO_FIX
from normlab.store.record import RunRecord, Setting
from normlab.store.schema import COMPLETED_STATES, DAMAGED, DIVERGED, FAILED, FINISHED, RUN_FILE, STATUS_FILE, number

UNFINISHED = "unfinished"
STATES = (*OUTCOMES, FAILED, DAMAGED, UNFINISHED)
"""The outcome of a run that has finished, or the reason why it has none."""
MAX_VALUES = 6
"""Values that a warning lists."""
MAX_DAMAGED = 5
"""Damaged runs with a warning each; the others are listed by id."""


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run whose record names a learning rate, with its state and losses as cells need them."""

    record: RunRecord
    lr: float
    """Peak learning rate."""

    @cached_property
    def state(self) -> str:
        """One of `STATES`; a completed run without a final loss on record is damaged."""
        if self.record.state in (FAILED, DAMAGED):
            return self.record.state
        return (self.record.outcome or DAMAGED) if self.record.state in COMPLETED_STATES else UNFINISHED

    @cached_property
    def replicate(self) -> tuple[Setting, Setting]:
        """The seeds of the weights and of the data order. Runs of two cells with the same replicate form a pair."""
        return setting(self.record, SEEDS[0]), setting(self.record, SEEDS[1])

    @property
    def loss(self) -> float:
        """Final validation loss, nats/token; infinite if the run diverged, NaN if it has no outcome."""
        return self._loss_or(loss_of(self.record.status.val_loss))

    @property
    def best_loss(self) -> float:
        """Lowest validation loss of any evaluation; infinite if the run diverged, NaN if it has no outcome."""
        lowest = loss_of(self.record.status.best_val_loss)
        return self.loss if lowest is None else self._loss_or(lowest)

    def _loss_or(self, loss: float | None) -> float:
        return math.inf if self.state == DIVERGED else loss if self.has_loss and loss is not None else math.nan

    @property
    def has_loss(self) -> bool:
        """Whether the run has an outcome, and with it a loss, finite or infinite."""
        return self.state in OUTCOMES

    @property
    def has_learned(self) -> bool:
        """Whether it finished with a loss below the band around the unigram entropy, so that its lr is usable."""
        return self.state == FINISHED and self.record.references.level(self.loss) == 0

    @cached_property
    def settings(self) -> Mapping[str, Setting]:
        """What the loss depends on, as `settings_of`."""
        return settings_of(self.record)

    @property
    def damage(self) -> str:
        """What is damaged in the run's record; empty if nothing is."""
        if self.state != DAMAGED:
            return ""
        path = self.record.folder.path / STATUS_FILE
        return self.record.problem or f"{path}: has no final validation loss; {HOW_TO_FIX[STATUS_FILE]}"


def read_results(records: Sequence[RunRecord], not_started: int = 0) -> tuple[list[RunResult], list[str]]:
    """Return the result of each run whose record names a learning rate, and warnings about the others.

    Args:
        records: The runs.
        not_started: How many more runs of the sweep have not started.
    """
    total = not_started + len(records)
    warnings = [f"{not_started} of the sweep's {total} runs have not started"] if not_started else []
    results = [RunResult(record, lr) for record in records if (lr := record.config.optim.lr) is not None]
    no_lr = f"its {RUN_FILE} names no learning rate; {HOW_TO_FIX[RUN_FILE]}"
    damaged = [(record.run_id, record.problem or no_lr) for record in records if record.config.optim.lr is None]
    return results, warnings + damaged_run_warnings(damaged)


@dataclass(frozen=True)
class Cell:
    """The runs with the same values of the options of `--by`."""

    key: tuple[Setting, ...]
    """The values, in the order of the options."""
    runs: Sequence[RunResult]

    @property
    def name(self) -> str:
        """The values as they are typed."""
        return " ".join(map(format_setting, self.key))

    @cached_property
    def losses(self) -> Losses:
        """Final validation loss by learning rate and replicate."""
        return self.arrange(lambda run: run.loss)

    @cached_property
    def lowest_losses(self) -> Losses:
        """Lowest validation loss of any evaluation, by learning rate and replicate."""
        return self.arrange(lambda run: run.best_loss)

    @cached_property
    def best_lr(self) -> float | None:
        """The cell's best learning rate."""
        return best_lr(self.ranking)

    @property
    def best_losses(self) -> Mapping[Replicate, float]:
        """Final validation losses at the best learning rate, by replicate."""
        return {} if self.best_lr is None else self.losses[self.best_lr]

    @property
    def diverged(self) -> int:
        """How many replicates diverged at the best learning rate."""
        return sum(map(math.isinf, self.best_losses.values()))

    @cached_property
    def ranking(self) -> Ranking:
        """Sort keys of the cell's learning rates."""
        return ranking(self.losses, self.unusable_lrs)

    @cached_property
    def unusable_lrs(self) -> frozenset[float]:
        """The learning rates at which a run has an outcome and has not learned."""
        return frozenset(run.lr for run in self.runs if run.has_loss and not run.has_learned)

    def arrange(self, value: Callable[[RunResult], float]) -> Losses:
        """Return a value of each run with an outcome, by learning rate and replicate."""
        return arrange((run.lr, run.replicate, value(run)) for run in self.runs if run.has_loss)

    def runs_at(self, lr: float | None) -> list[RunResult]:
        """Return the runs with an outcome at a learning rate."""
        return [run for run in self.runs if run.has_loss and run.lr == lr]

    def count(self, state: str) -> int:
        """Return how many runs are in a state."""
        return sum(run.state == state for run in self.runs)

    def warnings(self) -> list[str]:
        """Return what makes the cell's numbers unreliable, a line each."""
        warnings = [f"mixes {mixture}" for mixture in mixed_settings(self.runs).values()]
        if unfinished := self.count(UNFINISHED):
            warnings.append(f"{unfinished} of {len(self.runs)} runs are not finished and are left out")
        warnings += damaged_run_warnings([(run.record.run_id, run.damage) for run in self.runs if run.damage])
        repeats = Counter((run.lr, run.replicate) for run in self.runs if run.has_loss)
        if repeated := sum(count > 1 for count in repeats.values()):
            warnings.append(f"{repeated} of its seeds ran more than once at one learning rate: their mean counts once")
        if len(self.losses) > 1:
            if len({frozenset(by_replicate) for by_replicate in self.losses.values()}) > 1:
                seeds = ", ".join(f"{lr:g}: {len(by_replicate)}" for lr, by_replicate in self.losses.items())
                warnings.append(f"its learning rates have different seeds (number of seeds: {seeds})")
            for limit, where, beyond in ((min, "lowest", "lower"), (max, "highest", "higher")):
                if self.best_lr == limit(self.losses):
                    warnings.append(f"its best learning rate is the {where} of its grid: a {beyond} one may be better")
        return warnings


def rank_cells(cells: Sequence[Cell]) -> list[int]:
    """Return the indices of the cells that have a result, best first, each at its best learning rate.

    The order is by share of diverged seeds, then by mean final validation loss of the other seeds, then by index.
    """
    keys = {index: badness(cell.best_losses.values()) for index, cell in enumerate(cells) if cell.losses}
    return sorted(keys, key=lambda index: (keys[index], index))


def damaged_run_warnings(damaged: Sequence[tuple[str, str]]) -> list[str]:
    """Return a warning for each damaged run: the first `MAX_DAMAGED` with the reason, the others in one line.

    Args:
        damaged: The id of each run, and what is damaged in its record.
    """
    lines = [f"run {run_id} is damaged and is left out: {reason}" for run_id, reason in damaged[:MAX_DAMAGED]]
    more = [run_id for run_id, _ in damaged[MAX_DAMAGED:]]
    return lines + ([f"{len(more)} more runs are damaged and are left out: {', '.join(more)}"] if more else [])


def group_cells(runs: Iterable[RunResult], by: Sequence[str]) -> list[Cell]:
    """Return the cells in the order of their values: numbers by size, then names alphabetically."""
    grouped: dict[tuple[Setting, ...], list[RunResult]] = {}
    for run in runs:
        grouped.setdefault(tuple(setting(run.record, option) for option in by), []).append(run)
    return [Cell(key, grouped[key]) for key in sorted(grouped, key=lambda key: [_sort_key(value) for value in key])]


def mixed_settings(runs: Sequence[RunResult], ignored: Iterable[str] = ()) -> dict[str, str]:
    """Return the settings in which runs differ besides learning rate and seed: `model.depth` -> `model.depth 4 and 8`.

    Args:
        runs: The runs.
        ignored: Options that are meant to differ, with the options below them (norm: norm.eps).
    """
    ignored = tuple(ignored)
    phrases: dict[str, str] = {}
    for name, values in differing_settings([run.settings for run in runs]).items():
        if not any(name == option or name.startswith((f"{option}.", f"the {option}'s")) for option in ignored):
            more = [f"{len(values) - MAX_VALUES} more"] if len(values) > MAX_VALUES else []
            *first, last = [*values[: MAX_VALUES if more else len(values)], *more]
            phrases[name] = f"{name} {', '.join(first)} and {last}"
    return phrases


def table_warnings(cells: Sequence[Cell], by: Sequence[str]) -> list[str]:
    """Return what makes the cells of a table not comparable; each cell warns of what it mixes itself."""
    warnings: list[str] = []
    within = {name for cell in cells for name in mixed_settings(cell.runs)}
    # The width of the MLP follows from the width of the model.
    implied = ["model.mlp_width"] if {"model.width", "model"} & set(by) else []
    if different := mixed_settings([run for cell in cells for run in cell.runs], [*by, *within, *implied]):
        warnings.append(f"the cells differ in more than {', '.join(by)}: {'; '.join(different.values())}")
    if LR not in by and len({tuple(cell.losses) for cell in cells if cell.losses}) > 1:
        warnings.append("the cells have different learning rates: their best losses and their S are not comparable")
    return warnings


def _sort_key(value: Setting) -> tuple[int, float, str]:
    if isinstance(value, bool | int | float):
        known = number(int(value) if isinstance(value, bool) else value)
        return 0, math.inf if known is None else float(known), ""  # a damaged record may hold what no float can
    return (2, 0.0, "") if value is None else (1, 0.0, value)
