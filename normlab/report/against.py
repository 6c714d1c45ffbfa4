"""Compare cells with a baseline (`--against norm=layernorm`): differences of losses, paired by seed and data order.

A pair is a run of each cell with the same seeds. If one of the two diverged, the pair is a loss for that cell by an
infinite difference; if both did, the difference is 0. Runs without an outcome form no pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from normlab.errors import ConfigError, unknown
from normlab.report.cells import Cell, mixed_settings
from normlab.report.intervals import PairedTest, Replicate, holm, paired_test
from normlab.report.settings import format_setting, parse_conditions

FLAG = "--against"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A cell compared with its baseline, each at one learning rate."""

    baseline: Cell
    test: PairedTest | None
    """None if the two cells have no seed in common."""
    p_holm: float | None
    """The p-value corrected for all comparisons of the table."""
    unpaired: int
    """Seeds for which only one of the two cells has a result."""


def find_baselines(cells: Sequence[Cell], by: Sequence[str], text: str) -> list[Cell | None]:
    """Return for each cell the baseline that has the values of `text` and matches it in all other options of `by`.

    None where the cell is itself a baseline, or where there is no such cell.

    Raises:
        ConfigError: An option is not in `by`, or no cell has such a value.
    """
    wanted = {condition.option: condition.value for condition in parse_conditions([text], FLAG, signs=("=",))}
    for option, value in wanted.items():
        if option not in by:
            raise ConfigError(f"{FLAG} {text}: {option} is not in --by {','.join(by)}; add it there")
        values = {format_setting(cell.key[by.index(option)]) for cell in cells}
        if value not in values:
            raise ConfigError(f"{FLAG} {text}: " + unknown(option, value, values))
    keys = [tuple(map(format_setting, cell.key)) for cell in cells]
    by_key = dict(zip(keys, cells, strict=True))
    baselines = [
        by_key.get(tuple(wanted.get(option, value) for option, value in zip(by, key, strict=True))) for key in keys
    ]
    if not any(baselines):
        raise ConfigError(f"{FLAG} {text}: no cell has all of these values; give fewer options")
    return [None if baseline is cell else baseline for cell, baseline in zip(cells, baselines, strict=True)]


def compare(
    cells: Sequence[Cell], baselines: Sequence[Cell | None], lr: Callable[[Cell], float | None]
) -> list[Comparison | None]:
    """Compare each cell with its baseline, each at the learning rate `lr(cell)`; p-values are corrected together."""
    pairs = [
        baseline and paired_differences(cell, lr(cell), baseline, lr(baseline))
        for cell, baseline in zip(cells, baselines, strict=True)
    ]
    tests = [
        paired_test(differences, both_diverged=both_diverged) if differences else None
        for differences, both_diverged, _ in (each or ({}, 0, 0) for each in pairs)
    ]
    corrected = holm([test.p if test else None for test in tests])
    return [
        Comparison(baseline, test, p, each[2]) if baseline and each else None
        for baseline, each, test, p in zip(baselines, pairs, tests, corrected, strict=True)
    ]


def confounders(cell: Cell, baseline: Cell, by: Sequence[str]) -> list[str]:
    """Return the settings in which a cell and its baseline differ besides `by`, learning rate and seeds."""
    intended = [option for option, a, b in zip(by, cell.key, baseline.key, strict=True) if a != b]
    return list(mixed_settings([*cell.runs, *baseline.runs], intended).values())


def paired_differences(
    cell: Cell, lr: float | None, baseline: Cell, baseline_lr: float | None
) -> tuple[dict[Replicate, float], int, int]:
    """Return loss(cell) - loss(baseline) by replicate, and how many pairs diverged on both sides or lack one side."""
    if lr is None or baseline_lr is None:
        return {}, 0, 0
    losses, baseline_losses = cell.losses.get(lr, {}), baseline.losses.get(baseline_lr, {})
    pairs = {key: (losses[key], baseline_losses[key]) for key in sorted(set(losses) & set(baseline_losses), key=str)}
    both_diverged = {key for key, pair in pairs.items() if all(map(math.isinf, pair))}
    differences = {key: 0.0 if key in both_diverged else a - b for key, (a, b) in pairs.items()}
    return differences, len(both_diverged), len(set(losses) ^ set(baseline_losses))
