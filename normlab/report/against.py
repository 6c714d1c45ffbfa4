"""Cells against a baseline: `--against norm=layernorm`, the difference of losses, paired by seed and data order.

A pair is a run of each side with the same seeds. Where the run of one side diverged, the pair is a loss for that
side, by more than any number; where both did, neither is better. A run that failed or has not ended is no outcome:
its pair is left out, and that is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from normlab.errors import ConfigError, unknown
from normlab.report.groups import Cell, mixtures
from normlab.report.intervals import Paired, Replicate, holm, paired
from normlab.report.settings import shown
from normlab.report.where import parse

OPTION = "--against"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A cell against its baseline, each at one learning rate."""

    baseline: Cell
    found: Paired | None
    """None where no seed is on both sides."""
    p_holm: float | None
    """The p-value corrected for all the comparisons of the table."""
    unpaired: int
    """Seeds that one side alone has a result of."""


def baselines(cells: Sequence[Cell], by: Sequence[str], text: str) -> list[Cell | None]:
    """The baseline of each cell: the cell that is as it is but for what was asked; None for a baseline, or for none.

    Raises:
        ConfigError: A word is not among those of --by, or no cell has such a value.
    """
    asked = {one.word: one.value for one in parse([text], OPTION, signs=("=",))}
    for word, value in asked.items():
        if word not in by:
            raise ConfigError(f"{OPTION} {text}: {word} is no word of --by {','.join(by)}; add it there")
        values = {shown(cell.key[by.index(word)]) for cell in cells}
        if value not in values:
            raise ConfigError(f"{OPTION} {text}: " + unknown(word, value, values))
    named = {tuple(map(shown, cell.key)): cell for cell in cells}
    keys = [tuple(asked.get(word, shown(value)) for word, value in zip(by, cell.key, strict=True)) for cell in cells]
    if not any(key in named for key in keys):
        raise ConfigError(f"{OPTION} {text}: no cell has all of it; name fewer words")
    return [None if named.get(key) is cell else named.get(key) for key, cell in zip(keys, cells, strict=True)]


def compare(
    cells: Sequence[Cell], baselines: Sequence[Cell | None], lr: Callable[[Cell], float | None]
) -> list[Comparison | None]:
    """Every cell against its baseline, each at the learning rate that is asked for it; p-values corrected together."""
    found = [
        None if base is None else (base, *pairs(cell, lr(cell), base, lr(base)))
        for cell, base in zip(cells, baselines, strict=True)
    ]
    tests = [paired(one[1], both_diverged=one[2]) if one and one[1] else None for one in found]
    corrected = holm([test.p if test else None for test in tests])
    return [
        Comparison(one[0], test, p, one[3]) if one else None
        for one, test, p in zip(found, tests, corrected, strict=True)
    ]


def confounds(cell: Cell, baseline: Cell, by: Sequence[str]) -> list[str]:
    """What a cell and its baseline differ in besides what was asked, learning rate and seeds."""
    different = [word for word, a, b in zip(by, cell.key, baseline.key, strict=True) if a != b]
    return list(mixtures([*cell.outcomes, *baseline.outcomes], different).values())


def pairs(
    cell: Cell, lr: float | None, baseline: Cell, base_lr: float | None
) -> tuple[dict[Replicate, float], int, int]:
    """Return the differences of losses by replicate, cell less baseline, each at one learning rate.

    And of how many of them both runs diverged, whose difference stands as 0; and how many seeds are on one side only.
    """
    if lr is None or base_lr is None:
        return {}, 0, 0
    ours, theirs = cell.losses.get(lr, {}), baseline.losses.get(base_lr, {})
    both = sorted(set(ours) & set(theirs), key=str)
    diverged = [one for one in both if math.isinf(ours[one]) and math.isinf(theirs[one])]
    differences = {one: 0.0 if one in diverged else ours[one] - theirs[one] for one in both}
    return differences, len(diverged), len(set(ours) ^ set(theirs))
