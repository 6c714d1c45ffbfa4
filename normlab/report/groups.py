"""Group runs into cells, and warn where the runs of a cell, or the cells of a table, are not comparable.

A cell is the runs that have the same values of the options of `--by` (for example `norm,placement`), over all learning
rates and seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from normlab.report.learning_rates import Losses, Ranking, arrange, best_lr, ranking
from normlab.report.run_result import UNFINISHED, RunResult
from normlab.report.settings import Setting, differing_settings, format_setting, setting
from normlab.store.schema import number

MAX_VALUES = 6
"""Values that a warning lists."""
MAX_DAMAGED = 5
"""Damaged runs with a warning each; the others are listed by id."""


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
    def best_lr(self) -> float | None:
        """The cell's best learning rate."""
        return best_lr(self.ranking)

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
        warnings += damaged_run_warnings([(run.run_id, run.damage) for run in self.runs if run.damage])
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
        grouped.setdefault(tuple(setting(run.entry.run, option) for option in by), []).append(run)
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


def differences_between(cells: Sequence[Cell], by: Sequence[str]) -> list[str]:
    """Return the settings besides `by` in which cells differ from each other; the cell warns of what it mixes."""
    within = {name for cell in cells for name in mixed_settings(cell.runs)}
    # The width of the MLP follows from the width of the model.
    implied = ["model.mlp_width"] if {"model.width", "model"} & set(by) else []
    return list(mixed_settings([run for cell in cells for run in cell.runs], [*by, *within, *implied]).values())


def _sort_key(value: Setting) -> tuple[int, float, str]:
    if isinstance(value, bool | int | float):
        known = number(int(value) if isinstance(value, bool) else value)
        return 0, math.inf if known is None else float(known), ""  # a damaged record may hold what no float can
    return (2, 0.0, "") if value is None else (1, 0.0, value)
