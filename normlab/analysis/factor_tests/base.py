"""What a test of factors is: its name, its rows, the columns of its table, and the notes below it.

A test is a subclass of `FactorTest` and a line in `run._CLASSES`. It has everything that depends on the test, so that
`normlab summarize --test`, its help and `normlab compare` know no test by its name.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, ClassVar

from normlab.analysis.cells import Cell, count_bad, reason_cells_not_comparable
from normlab.analysis.columns import Column, Definition, format_p
from normlab.analysis.contrasts import Key, Pool, contrast, pool_cells
from normlab.analysis.factors import Factor, label, level_label
from normlab.analysis.intervals import Design
from normlab.base.errors import counted
from normlab.store.record import RunRecord, Setting

TestRow = dict[str, Any]
"""A row of a test by the keys of JSON."""
Change = tuple[Setting, Setting]
"""A level of a factor, and its baseline."""


@dataclass(frozen=True)
class Question:
    """What a test is asked: the cells of a table, and the factors that are compared with their baselines."""

    cells: Sequence[Cell]
    factors: Sequence[Factor]
    over: Sequence[Factor]
    """The factors that `--over` names, if any."""
    baselines: Mapping[str, Setting]
    """The baseline level of each factor, by its option."""

    @property
    def compared_factors(self) -> Sequence[Factor]:
        return self.over or self.factors

    def groups(self, over: Sequence[Factor]) -> Iterator[tuple[str, dict[Key, Cell]]]:
        """Yield the cells of each group with equal levels outside `over`: the group's label, and cells by level."""
        groups: dict[str, dict[Key, Cell]] = {}
        for cell in self.cells:
            # The other levels of a cell are those of its group.
            outside = dict(cell.levels)
            inside = tuple(outside.pop(factor.option) for factor in over)
            group = groups.setdefault(label(outside, outside.values()), {})
            group[inside] = cell
        yield from groups.items()

    def changes(self, factors: Sequence[Factor]) -> Iterator[tuple[str, list[Change], list[Cell]]]:
        """Yield each change of some factors from their baselines that a group has all cells of, if they are comparable.

        It is the group's label, the new level and the baseline of each factor, and the cells of all combinations of
        these, in the order of `itertools.product`.
        """
        changes_of_factors: list[list[Change]] = []
        for factor in factors:
            baseline = self.baselines[factor.option]
            changes_of_factor: list[Change] = []
            for level in factor.levels:
                if level != baseline:
                    changes_of_factor.append((level, baseline))
            changes_of_factors.append(changes_of_factor)
        for where, group in self.groups(factors):
            for changes in itertools.product(*changes_of_factors):
                corners = list(itertools.product(*changes))
                # A contrast with a missing corner would be another contrast.
                if not group.keys() >= set(corners):
                    continue
                cells = [group[corner] for corner in corners]
                if not reason_cells_not_comparable(cells):
                    yield where, list(changes), cells

    @cached_property
    def pool(self) -> Pool | None:
        return pool_cells(self.cells)

    def contrast(self, cells: Iterable[Cell], weights: Iterable[float], labels: TestRow) -> TestRow:
        """Return a row with the contrast of the losses of cells, each at its best learning rate."""
        cells = list(cells)
        rates: set[float | None] = set()
        runs: list[RunRecord] = []
        for cell in cells:
            rates.add(cell.best_lr)
            runs += cell.runs_at(cell.best_lr)
        row = labels | dict.fromkeys(("estimate", "low", "high"))
        row |= {"n": 0, "n_crossed": None, "p": None, "method": None}
        result = contrast(list(zip(cells, weights, strict=True)), self.pool)
        if result is None and set.intersection(*(set(cell.final.losses) for cell in cells)):
            row["missing"] = "both sides diverged"
        if result is not None:
            row |= {"estimate": result.estimate, "low": result.low, "high": result.high}
            row |= {"n": result.design.n, "n_crossed": result.design.crossing, "p": result.p, "method": result.test}
        # Cells with different best learning rates have no common one to show.
        lr = rates.pop() if len(rates) == 1 else None
        return row | {"lr": lr, "bad": count_bad(runs), "runs": len(runs)}


def change_text(factor: Factor, change: Change, sign: str = " - ") -> str:
    """Return `pre-norm - post-norm`: a level, a sign and the baseline."""
    return sign.join(level_label(factor.option, level) for level in change)


# Columns that several tests have

WHERE: Column[TestRow] = Column("where", itemgetter("where"), "where")
CONTRAST: Column[TestRow] = Column("contrast", itemgetter("contrast"), "contrast")
UNIT: Column[TestRow] = Column("unit", itemgetter("unit"), "unit")
P: Column[TestRow] = Column("p", itemgetter("p"), "p", format_p)
P_HOLM: Column[TestRow] = Column("p_holm", itemgetter("p_holm"), "p (Holm)", format_p)
BAD: Column[TestRow] = Column("bad", lambda row: f"{row['bad']} of {row['runs']}", "bad")

# Notes that several tests have


def baseline_note(difference: str = "A - B") -> Definition:
    return Definition(f"{difference}: B is the baseline, by default the first level; --against chooses another")


def values_of(rows: Sequence[TestRow], key: str) -> list[Any]:
    return [row[key] for row in rows]


def holm_note(rows: Sequence[TestRow]) -> str:
    """Return how the p-values of the rows are corrected."""
    p_values = values_of(rows, "p")
    tests = len(p_values) - p_values.count(None)
    return f"two-sided, corrected by Holm's method for {counted(tests, 'test')}, those of this table"


class FactorTest(ABC):
    """A test over the factors of a table."""

    name: ClassVar[str]
    """The name on the command line."""
    summary: ClassVar[str]
    """What the test is, in the help of `normlab summarize`."""
    number_format: ClassVar[str] = "+.4f"
    """The format of an estimate and its bounds."""

    @abstractmethod
    def rows(self, question: Question) -> Iterator[TestRow]:
        """Yield the rows: `labels`, `estimate`, `p`, which may be None, and what else JSON shows.

        The columns of this class also read `low`, `high`, `n`, `n_crossed`, `bad` and `runs`. A row may say in
        `missing` why it has no estimate.

        Raises:
            ConfigError: The test does not fit the factors.
        """

    @abstractmethod
    def notes(self, rows: Sequence[TestRow]) -> list[str]:
        """Return the notes below the table of some rows: plain texts, and a `Definition` of each word."""

    def columns(self, rows: Sequence[TestRow]) -> list[Column[TestRow]]:
        """Return the columns of the table of some rows."""
        columns = [CONTRAST, self.estimate_column()]
        # With a single group of cells there is nothing to tell apart.
        if any(values_of(rows, "where")):
            columns.insert(0, WHERE)
        if len(set(values_of(rows, "unit"))) > 1:
            columns.append(UNIT)
        columns += [P, P_HOLM]
        if any(values_of(rows, "bad")):
            columns.append(BAD)
        return columns

    def labels(self, where: str, contrast: str, unit: str) -> TestRow:
        """Return the beginning of a row: the group of cells, what is estimated, and its unit."""
        return {"test": self.name, "where": where, "contrast": contrast, "unit": unit}

    def estimate_column(self) -> Column[TestRow]:
        return Column("estimate", self.estimate_text, "estimate")

    def estimate_text(self, row: TestRow) -> str:
        """Return an estimate with its interval: `0.0232 [0.0200, 0.0269] (n=5)`, or why there is none."""
        if row["estimate"] is None:
            return self.number_text(row)
        text = self.number_text(row)
        low, high = self.bound_text(row, "low"), self.bound_text(row, "high")
        if low and high:
            text += f" [{low}, {high}]"
        n = row["n"]
        # Independent replicates have n levels of each factor.
        levels = row["n_crossed"] or (n, n)
        return f"{text} (n={Design(n, tuple(levels))})"

    def number_text(self, row: TestRow) -> str:
        """Return an estimate without its interval, or why there is none."""
        if row["estimate"] is None:
            return row.get("missing", "no common seed")
        return f"{row['estimate']:{self.number_format}}"

    def bound_text(self, row: TestRow, bound: str) -> str:
        """Return the `low` or `high` end of an interval; empty if it has none."""
        if row[bound] is None:
            return ""
        return f"{row[bound]:{self.number_format}}"
