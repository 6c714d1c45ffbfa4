"""Compare cells with a baseline (`--against norm=layernorm`): differences of losses, paired by seed and data order.

A pair is a run of each cell with the same seeds. If one of the two diverged, the pair is a loss for that cell by an
infinite difference; if both did, the difference is 0. Runs without an outcome form no pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from normlab.errors import ConfigError, unknown
from normlab.report.cells import Cell, mixed_settings
from normlab.report.intervals import PairedTest, Replicate, holm, paired_test
from normlab.report.settings import format_setting, parse_conditions

FLAG = "--against"


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


def add_comparisons(
    rows: Sequence[dict[str, Any]],
    cells: Sequence[Cell],
    baselines: Sequence[Cell | None],
    lr: Callable[[Cell], float | None],
    prefix: str,
) -> None:
    """Add to each cell's row the comparison with its baseline, each at its learning rate `lr(cell)`.

    The p-values are corrected for all comparisons of the table.
    """
    tests: list[PairedTest | None] = []
    for cell, baseline in zip(cells, baselines, strict=True):
        pairs, both_diverged, _ = paired_differences(cell, lr(cell), baseline, lr(baseline)) if baseline else ({}, 0, 0)
        tests.append(paired_test(pairs, both_diverged=both_diverged) if pairs else None)
    corrected = holm([test and test.p for test in tests])
    for row, baseline, test, p in zip(rows, baselines, tests, corrected, strict=True):
        row |= {
            f"{prefix}baseline": baseline and baseline.name,
            f"{prefix}difference": test and test.estimate,
            f"{prefix}difference_low": test and test.low,
            f"{prefix}difference_high": test and test.high,
            f"{prefix}p": test and test.p,
            f"{prefix}p_holm": p,
            f"{prefix}pairs": test.design.n if test else 0,
            f"{prefix}pairs_crossed": test and test.design.crossing,
            f"{prefix}test": test and test.test,
        }


def comparison_warnings(cell: Cell, baseline: Cell, by: Sequence[str]) -> list[str]:
    """Return what makes the comparison of a cell with its baseline, at their best learning rates, unreliable."""
    *_, unpaired = paired_differences(cell, cell.best_lr, baseline, baseline.best_lr)
    intended = [option for option, a, b in zip(by, cell.key, baseline.key, strict=True) if a != b]
    different = list(mixed_settings([*cell.runs, *baseline.runs], intended).values())
    return [
        *([f"seeds with a result on one side of its comparison only: {unpaired}"] if unpaired else []),
        *([f"it and its baseline differ in {'; '.join(different)}"] if different else []),
    ]


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
