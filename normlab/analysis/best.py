"""Which cell is best, and whether that is sure: the one ranking and the one rule of tables, summaries and pages.

Cells of different sizes or lengths of training are not compared: a larger model has a lower loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from normlab.analysis.cells import RANKED_APART, Cell
from normlab.analysis.contrasts import compare_cells, pool_cells
from normlab.analysis.factors import label
from normlab.analysis.intervals import LEVEL, PairedTest, holm
from normlab.analysis.learning_rates import badness
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
        is_below = self.test is not None and self.test.high is not None and self.test.high < 0
        return is_below and self.p_holm is not None and self.p_holm < 1 - LEVEL


def compare_with_baselines(cells: Sequence[Cell], baselines: Sequence[Cell | None]) -> list[Comparison]:
    """Return the comparison of each cell with its baseline, at their best learning rates, corrected for all of them."""
    pairs = []
    for cell, baseline in zip(cells, baselines, strict=True):
        pairs.append((cell, baseline) if baseline else None)
    return _compare(cells, pairs)


def compare_with_best(cells: Sequence[Cell], sizes: Mapping[str, Sequence[int]]) -> dict[str, list[Comparison]]:
    """Return for each size the comparisons of its best cell with the others, corrected for those of all sizes.

    `sizes` has the indices of the cells of each size, best first, as `rank_by_size` returns them. If the baseline
    is the best cell, this returns the p-values of `compare_with_baselines`.
    """
    pairs = [(cells[best], cells[other]) for best, *others in sizes.values() for other in others]
    comparisons = iter(_compare(cells, pairs))
    return {size: list(islice(comparisons, len(ranked) - 1)) for size, ranked in sizes.items()}


def _compare(cells: Sequence[Cell], pairs: Sequence[tuple[Cell, Cell] | None]) -> list[Comparison]:
    """Return the comparison of each pair, corrected for all of them; the variance may be pooled over all cells."""
    pool = pool_cells(cells)
    tests = [compare_cells(*pair, pool) if pair else None for pair in pairs]
    p_values = [test.p if test else None for test in tests]
    known = len(p_values) - p_values.count(None)
    return [Comparison(test, p, known) for test, p in zip(tests, holm(p_values), strict=True)]


def rank_cells(cells: Sequence[Cell]) -> list[int]:
    """Return the indices of the cells with a result, best first.

    Cells are compared at their best learning rates: first by the share of diverged seeds, then by whether a run is
    stuck or regressed, then by the mean final validation loss of the seeds that did not diverge.
    """

    def key(index: int) -> tuple[float, bool, float]:
        diverged, mean = badness(cells[index].final.losses.values())
        return diverged, cells[index].has_bad_outcome, mean

    return sorted((index for index, cell in enumerate(cells) if cell.losses), key=key)


def rank_by_size(cells: Sequence[Cell]) -> dict[str, list[int]]:
    """Return the indices of the cells with a result, best first, by the label of their size, such as `depth 8`.

    The label is empty if all cells have one size.
    """
    options = [option for option in RANKED_APART if len({cell.levels.get(option) for cell in cells}) > 1]
    sizes: dict[tuple[Setting, ...], list[int]] = {}
    for index in rank_cells(cells):
        sizes.setdefault(tuple(cells[index].levels[option] for option in options), []).append(index)
    in_order = sorted(sizes, key=lambda values: [sort_key(value) for value in values])
    return {label(options, values) if options else "": sizes[values] for values in in_order}
