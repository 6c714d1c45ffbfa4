"""Tests about the learning rate: how much it matters, and which rates train, as numbers of `rate_range`."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

from normlab.analysis.cells import Cell, count_bad
from normlab.analysis.columns import Definition
from normlab.analysis.contrasts import Key, weighted_sums
from normlab.analysis.factor_tests.base import (
    FactorTest,
    Question,
    TestRow,
    baseline_note,
    change_text,
    holm_note,
    values_of,
)
from normlab.analysis.intervals import LEVEL, Interval, Replicate, mean_interval
from normlab.analysis.paired_tests import PairedTest, paired_test
from normlab.analysis.rate_range import HIGHEST, SENSITIVITY, WIDTH, RateNumber, by_seed, complete_seeds, has_gap
from normlab.base.errors import ConfigError, counted
from normlab.store.record import RunRecord

SeedValues = dict[Replicate, float]
"""A number of each seed."""
FEWEST_RATES = 3
"""The fewest learning rates of a grid whose numbers are shown without being asked for."""


class RateTest(FactorTest):
    """A test whose estimates are means over seeds of numbers of `rate_range`."""

    numbers: ClassVar[Sequence[RateNumber]]

    def rows(self, question: Question) -> Iterator[TestRow]:
        """Yield each number of each cell, then of each level minus its baseline, or over it if it is a ratio."""
        if all(len(cell.losses) < 2 for cell in question.cells):
            raise ConfigError(
                f"--test {self.name}: needs several learning rates; sweep them, such as optim.lr=1e-3,3e-3,1e-2"
            )
        for number in self.numbers:
            numbers_of = _numbers_of(number, question.cells)
            for cell in question.cells:
                labels = self.labels("", f"{number.title}: {cell.label}", number.unit)
                yield labels | _mean_row(number, numbers_of, cell)
            for factor in question.compared_factors:
                for where, [change], cells in question.changes([factor]):
                    sign, unit = " - ", number.unit
                    if number.is_log:
                        sign, unit = " / ", "ratio"
                    labels = self.labels(where, f"{number.title}: {change_text(factor, change, sign)}", unit)
                    yield labels | _comparison_row(number, numbers_of, cells)

    def of_cells(self, cells: Sequence[Cell], number: RateNumber) -> list[tuple[Cell, TestRow]]:
        """Return the cells with a grid of `FEWEST_RATES`, each with its row of one of the numbers, without labels."""
        numbers_of = _numbers_of(number, cells)
        rows: list[tuple[Cell, TestRow]] = []
        for cell in cells:
            if len(cell.losses) >= FEWEST_RATES:
                rows.append((cell, _mean_row(number, numbers_of, cell)))
        return rows

    def notes(self, rows: Sequence[TestRow]) -> list[str]:
        # The mean of logarithms is a geometric mean, and their differences are logarithms of ratios.
        mean, test = "mean", "paired t test"
        if all(number.is_log for number in self.numbers):
            mean, test = "geometric mean", "paired t test of the logarithms"
        lines: list[str] = [Definition(number.text) for number in self.numbers]
        lines.append(f"estimate: {mean} over n seeds with its {LEVEL:.0%} interval")
        if any(p is not None for p in values_of(rows, "p")):
            lines.append(Definition(f"p: {test}, {holm_note(rows)}"))
        if any(row["beyond_grid"] and row["estimate"] is not None for row in rows):
            beyond = "beyond the grid (or more, or less): the number of a seed may lie beyond an end of the grid"
            lines.append(Definition(beyond))
        for row in rows:
            if row["gaps"]:
                seeds = counted(row["n"], "seed")
                lines.append(f"{row['contrast']}: in {row['gaps']} of {seeds} a rate fails between two that train")
        return [*lines, baseline_note("A - B or A / B")]

    def number_text(self, row: TestRow) -> str:
        """Return an estimate without its interval: `0.0232`, `0.0300 or more`, or why there is none."""
        text = super().number_text(row)
        if row["estimate"] is None or len(row["beyond_grid"]) != 1:
            return text
        [side] = row["beyond_grid"]
        return text + {"above": " or more", "below": " or less"}[side]

    def bound_text(self, row: TestRow, bound: str) -> str:
        side = {"low": "below", "high": "above"}[bound]
        if side in row["beyond_grid"]:
            return "beyond the grid"
        return super().bound_text(row, bound)


class Sensitivity(RateTest):
    name = "sensitivity"
    summary = "how much the loss depends on the learning rate"
    numbers = (SENSITIVITY,)
    number_format = ".4f"


class RateRange(RateTest):
    name = "range"
    summary = "which learning rates train"
    numbers = (HIGHEST, WIDTH)
    number_format = "#.3g"  # a learning rate may be far below 0.0001


def _numbers_of(number: RateNumber, cells: Sequence[Cell]) -> dict[Key, SeedValues]:
    """Return for each cell the number of each seed with every learning rate.

    A cell has none if no run of it has learned, or if it has several runs of a seed at one learning rate.
    """
    runs_of_all_cells: dict[Replicate, list[RunRecord]] = {}
    for cell in cells:
        for seed, runs in by_seed(cell.completed).items():
            runs_of_all_cells.setdefault(seed, []).extend(runs)
    numbers: dict[Key, SeedValues] = {}
    for cell in cells:
        values: SeedValues = {}
        numbers[cell.key] = values
        seeds = complete_seeds(cell.runs)
        # Several runs of a seed at one rate may be of different models, whose curves must not be mixed.
        has_repeats = any(len(runs) > len(cell.losses) for runs in seeds.values())
        if has_repeats or not cell.has_learned:
            continue
        for seed, runs in seeds.items():
            value = number.of(runs, runs_of_all_cells[seed])
            # NaN is no number: a seed that has learned at no rate has no band.
            if not math.isnan(value):
                values[seed] = value
    return numbers


def _mean_row(number: RateNumber, numbers_of: dict[Key, SeedValues], cell: Cell) -> TestRow:
    """Return the mean of a number over the seeds of a cell."""
    row = _row(number, partial(mean_interval, least=number.least), numbers_of[cell.key], [cell])
    if number is HIGHEST:
        row["gaps"] = sum(map(has_gap, complete_seeds(cell.runs).values()))
    return row


def _comparison_row(number: RateNumber, numbers_of: dict[Key, SeedValues], cells: Sequence[Cell]) -> TestRow:
    """Return the mean over seeds of the differences of a number between a cell and its baseline."""
    # S and the band depend on the grid.
    grids = {tuple(cell.losses) for cell in cells}
    is_comparable = number is HIGHEST or len(grids) == 1
    numbers = [numbers_of[cell.key] for cell in cells]
    values: SeedValues = {}
    if is_comparable:
        values = weighted_sums((1.0, -1.0), numbers)
    row = _row(number, paired_test, values, cells)
    if all(numbers):
        row["missing"] = "no common seed"
        if not is_comparable:
            row["missing"] = "other learning rates"
    return row


def _row(
    number: RateNumber,
    interval_of: Callable[[SeedValues], Interval | PairedTest],
    values: SeedValues,
    cells: Sequence[Cell],
) -> TestRow:
    """Return the mean over seeds; if the grid cuts a number off, without the bound on that side and without p."""
    beyond_grid = _sides_beyond_grid(number, cells)
    result: Interval | PairedTest | None = None
    estimate = low = high = crossing = None
    if values:
        result = interval_of(values)
        estimate, low, high = result.estimate, result.low, result.high
        crossing = result.design.crossing
    # Where every seed is cut off at the end of the grid, their equal numbers say nothing of the noise.
    is_cut_off = low is not None and low == high
    if is_cut_off or "below" in beyond_grid:
        low = None
    if is_cut_off or "above" in beyond_grid:
        high = None
    missing = "no seed that trains"
    if all(cell.has_learned for cell in cells):
        missing = "several runs at one rate"
    # A number that the grid cuts off is a bound, and a test of a bound has no p-value.
    method = p = None
    if isinstance(result, PairedTest):
        method = result.test
        if not beyond_grid:
            p = result.p
    row: TestRow = {
        "estimate": _exp(estimate, number),
        "low": _exp(low, number),
        "high": _exp(high, number),
        "missing": missing,
        "gaps": 0,
        "beyond_grid": beyond_grid,
        "n": len(values),
        "n_crossed": crossing,
        "p": p,
        "method": method,
    }
    bad = runs = 0
    for cell in cells:
        bad += count_bad(cell.completed)
        runs += len(cell.completed)
    return row | {"lr": None, "bad": bad, "runs": runs}


def _sides_beyond_grid(number: RateNumber, cells: Sequence[Cell]) -> list[str]:
    """Return the sides, `below` and `above`, on which the number of a cell minus that of its baseline may lie further.

    A baseline whose number may be larger than the grid shows makes the difference smaller.
    """
    is_below = is_above = False
    for index, cell in enumerate(cells):
        may_be_larger, may_be_smaller = number.cut_off(complete_seeds(cell.runs).values())
        if index > 0:
            may_be_larger, may_be_smaller = may_be_smaller, may_be_larger
        is_above = is_above or may_be_larger
        is_below = is_below or may_be_smaller
    sides: list[str] = []
    if is_below:
        sides.append("below")
    if is_above:
        sides.append("above")
    return sides


def _exp(value: float | None, number: RateNumber) -> float | None:
    """Return a mean of a number, of which the seeds have the logarithm if it is a ratio."""
    if value is None or not number.is_log:
        return value
    return math.exp(value)
