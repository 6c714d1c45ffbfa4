"""Which cell is best, and whether that is sure: the one ranking and the one rule of tables, summaries and pages.

Cells of different sizes or lengths of training are not compared: a larger model has a lower loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from normlab.analysis.cells import RANKED_APART, Cell
from normlab.analysis.contrasts import compare_cells, pool_cells
from normlab.analysis.factors import label
from normlab.analysis.intervals import LEVEL
from normlab.analysis.learning_rates import badness
from normlab.analysis.paired_tests import PairedTest, holm
from normlab.analysis.settings import sort_key
from normlab.store.record import Setting


@dataclass(frozen=True, slots=True)
class Comparison:
    """A paired test of the loss of a cell minus that of another."""

    test: PairedTest | None
    p_holm: float | None
    """The p-value with Holm's correction for `tests` tests."""
    tests: int

    @property
    def is_lower(self) -> bool:
        """Whether the loss is lower for sure: the interval is below 0, and p < 0.05 after the correction."""
        if self.test is None or self.test.high is None or self.p_holm is None:
            return False
        return self.test.high < 0 and self.p_holm < 1 - LEVEL


def compare_with_baselines(cells: Sequence[Cell], baselines: Sequence[Cell | None]) -> list[Comparison]:
    """Return the comparison of each cell with its baseline, at their best learning rates, corrected for all of them."""
    pairs: list[tuple[Cell, Cell] | None] = []
    for cell, baseline in zip(cells, baselines, strict=True):
        if baseline is None:
            pairs.append(None)
        else:
            pairs.append((cell, baseline))
    return _compare(cells, pairs)


def compare_with_best(cells: Sequence[Cell], sizes: Mapping[str, Sequence[int]]) -> dict[str, list[Comparison]]:
    """Return for each size the comparisons of its best cell with the others, corrected for those of all sizes.

    `sizes` has the indices of the cells of each size, best first, as `rank_by_size` returns them. If the baseline
    is the best cell, this returns the p-values of `compare_with_baselines`.
    """
    pairs: list[tuple[Cell, Cell]] = []
    for best, *others in sizes.values():
        for index in others:
            pairs.append((cells[best], cells[index]))
    # One family of tests, so that the correction is over all sizes.
    comparisons = _compare(cells, pairs)
    by_size: dict[str, list[Comparison]] = {}
    start = 0
    for size, ranked in sizes.items():
        end = start + len(ranked) - 1
        by_size[size] = comparisons[start:end]
        start = end
    return by_size


def _compare(cells: Sequence[Cell], pairs: Sequence[tuple[Cell, Cell] | None]) -> list[Comparison]:
    """Return the comparison of each pair, corrected for all of them; the variance may be pooled over all cells."""
    pool = pool_cells(cells)
    tests: list[PairedTest | None] = []
    p_values: list[float | None] = []
    for pair in pairs:
        test = None
        if pair is not None:
            test = compare_cells(*pair, pool)
        tests.append(test)
        p_values.append(None if test is None else test.p)
    # A pair without a p-value is no test, and makes the correction of the others no stronger.
    count = len(p_values) - p_values.count(None)
    return [Comparison(test, p_holm, count) for test, p_holm in zip(tests, holm(p_values), strict=True)]


def rank_cells(cells: Sequence[Cell]) -> list[int]:
    """Return the indices of the cells with a result, best first.

    Cells are compared at their best learning rates: first by the share of diverged seeds, then by whether a run has not
    learned, then by the mean final validation loss of the seeds that did not diverge.
    """
    # The mean of the surviving seeds comes last: it would flatter a cell whose other seeds diverged.
    keys: dict[int, tuple[float, bool, float]] = {}
    for index, cell in enumerate(cells):
        if cell.losses:
            share_diverged, mean = badness(cell.final.losses.values())
            keys[index] = share_diverged, cell.has_unlearned_run, mean
    return sorted(keys, key=keys.__getitem__)


def rank_by_size(cells: Sequence[Cell]) -> dict[str, list[int]]:
    """Return the indices of the cells with a result, best first, by the label of their size, such as `depth 8`.

    The label is empty if all cells have one size.
    """
    options: list[str] = []
    for option in RANKED_APART:
        levels = {cell.levels.get(option) for cell in cells}
        if len(levels) > 1:
            options.append(option)
    ranked = rank_cells(cells)
    if not ranked:
        return {}
    if not options:
        return {"": ranked}
    # Each size keeps the order of the ranking.
    sizes: dict[tuple[Setting, ...], list[int]] = {}
    for index in ranked:
        size = tuple(cells[index].levels[option] for option in options)
        sizes.setdefault(size, []).append(index)
    in_order = sorted(sizes, key=lambda size: list(map(sort_key, size)))
    return {label(options, size): sizes[size] for size in in_order}
