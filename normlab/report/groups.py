"""Runs in cells: one cell for each choice of the words of `--by`, and what is wrong with putting them together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from normlab.report.learning_rates import Losses, Ranking, arrange, best_lr, ranking
from normlab.report.outcomes import UNFINISHED, Outcome
from normlab.report.settings import Setting, differing, setting, shown
from normlab.store.schema import number

MOST_VALUES = 6
"""Values that a warning lists."""
MOST_DAMAGED = 5
"""Damaged runs that get a warning each; of more only the ids are listed."""


@dataclass(frozen=True)
class Cell:
    """The runs of one choice."""

    key: tuple[Setting, ...]
    """What was chosen, in the order of the words."""
    outcomes: Sequence[Outcome]

    @property
    def name(self) -> str:
        """What was chosen, as it is typed."""
        return " ".join(map(shown, self.key))

    @cached_property
    def losses(self) -> Losses:
        """Final validation loss by learning rate and replicate, of the runs that came out."""
        return self.arranged(lambda run: run.loss)

    @cached_property
    def best_lr(self) -> float | None:
        """The cell's own best learning rate."""
        return best_lr(self.ranking)

    @cached_property
    def ranking(self) -> Ranking:
        """What its learning rates are ordered by."""
        return ranking(self.losses, self.unusable)

    @cached_property
    def unusable(self) -> frozenset[float]:
        """The learning rates at which a run has come out and has not learned."""
        return frozenset(run.lr for run in self.outcomes if run.came_out and not run.has_learned)

    def arranged(self, value: Callable[[Outcome], float]) -> Losses:
        """A number of each run that came out, by learning rate and replicate."""
        return arrange((run.lr, run.replicate, value(run)) for run in self.outcomes if run.came_out)

    def at(self, lr: float | None) -> list[Outcome]:
        """The runs that came out at a learning rate."""
        return [run for run in self.outcomes if run.came_out and run.lr == lr]

    def count(self, ending: str) -> int:
        """How many ended so."""
        return sum(run.ending == ending for run in self.outcomes)

    def warnings(self) -> list[str]:
        """What a reader must know before the cell's numbers are believed."""
        said = [f"mixes {mixture}" for mixture in mixtures(self.outcomes).values()]
        if unfinished := self.count(UNFINISHED):
            said.append(f"{unfinished} of {len(self.outcomes)} runs have not ended, and are in no number")
        said += damaged_lines([(run.run_id, run.damage) for run in self.outcomes if run.damage])
        twins = Counter((run.lr, run.replicate) for run in self.outcomes if run.came_out)
        if repeated := sum(1 for number in twins.values() if number > 1):
            said.append(f"{repeated} of its seeds ran more than once at one learning rate: the mean counts as one")
        if len(self.losses) > 1:
            if len({frozenset(own) for own in self.losses.values()}) > 1:
                seeds = ", ".join(f"{lr:g}: {len(own)}" for lr, own in self.losses.items())
                said.append(f"its learning rates were not tried with the same seeds ({seeds})")
            for end, where, beyond in ((min, "lowest", "lower"), (max, "highest", "higher")):
                if self.best_lr == end(self.losses):
                    said.append(f"its best learning rate is the {where} of its grid: a {beyond} one may be better")
        return said


def damaged_lines(damaged: Sequence[tuple[str, str]]) -> list[str]:
    """Return a warning for each run that is left out because its record is damaged, the first of them with the reason.

    Args:
        damaged: The id of each, and what is wrong with its record.
    """
    lines = [f"run {run_id} is damaged, and in no number: {why}" for run_id, why in damaged[:MOST_DAMAGED]]
    more = [run_id for run_id, _ in damaged[MOST_DAMAGED:]]
    return lines + ([f"{len(more)} more runs are damaged, and in no number: {', '.join(more)}"] if more else [])


def cells(outcomes: Iterable[Outcome], by: Sequence[str]) -> list[Cell]:
    """The cells, in the order of what was chosen: numbers by size, names by letter."""
    found: dict[tuple[Setting, ...], list[Outcome]] = {}
    for one in outcomes:
        found.setdefault(tuple(setting(one.entry.run, word) for word in by), []).append(one)
    return [Cell(key, found[key]) for key in sorted(found, key=lambda key: [_order(value) for value in key])]


def mixtures(outcomes: Sequence[Outcome], ignored: Iterable[str] = ()) -> dict[str, str]:
    """What runs differ in besides learning rate and seed, a phrase by word: `model.depth 4 and 8`.

    Args:
        outcomes: The runs.
        ignored: Words that are meant to differ, with all that is below them (norm: norm.eps).
    """
    ignored = tuple(ignored)
    phrases: dict[str, str] = {}
    for word, values in differing([run.told for run in outcomes]).items():
        if not any(word == other or word.startswith((f"{other}.", f"the {other}'s")) for other in ignored):
            more = [f"{len(values) - MOST_VALUES} more"] if len(values) > MOST_VALUES else []
            *first, last = [*values[: MOST_VALUES if more else len(values)], *more]
            phrases[word] = f"{word} {', '.join(first)} and {last}"
    return phrases


def between(cells: Sequence[Cell], by: Sequence[str]) -> list[str]:
    """What cells differ in from each other beyond the words that make them; what one mixes in itself is said there."""
    own = {word for cell in cells for word in mixtures(cell.outcomes)}
    # The MLP is made as wide as the stream asks for.
    ignored = [*by, *own, *(["model.mlp_width"] if {"model.width", "model"} & set(by) else [])]
    return list(mixtures([run for cell in cells for run in cell.outcomes], ignored).values())


def _order(value: Setting) -> tuple[int, float, str]:
    if isinstance(value, bool | int | float):
        known = number(int(value) if isinstance(value, bool) else value)
        return 0, math.inf if known is None else float(known), ""  # a damaged record may hold what no float does
    return (2, 0.0, "") if value is None else (1, 0.0, value)
