"""Tests that are contrasts of the final losses of cells: interactions and trends.

- Interaction of m factors: the weight of a cell is the product over the factors of +1 at a level and -1 at the
  baseline, which for two factors is a difference of differences.
- Trend over a numeric factor t: the weights (t_c - mean(t)) / sum((t - mean(t))^2), the least-squares slope.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

from normlab.analysis.cells import reason_cells_not_comparable
from normlab.analysis.columns import Definition
from normlab.analysis.contrasts import pool_notes, slope_weights
from normlab.analysis.factor_tests.base import (
    FactorTest,
    Question,
    TestRow,
    baseline_note,
    change_text,
    holm_note,
    values_of,
)
from normlab.analysis.factors import Factor
from normlab.analysis.intervals import LEVEL
from normlab.analysis.settings import LR, format_setting
from normlab.base.errors import ConfigError

LOGARITHMIC = ("model.depth", "model.width", "model.context", "train.batch_size", "train.steps", LR)
"""Options whose trend is over the natural logarithm of their value."""
BAD_NOTE = (
    "bad: runs of these cells that diverged, are stuck or regressed; the loss of a stuck run stays near the "
    "unigram entropy, so an estimate with stuck runs may be far too small"
)


class ContrastTest(FactorTest):
    """A test whose estimates are contrasts of losses."""

    definitions: ClassVar[Sequence[Definition]] = ()
    """What the contrasts are."""

    def notes(self, rows: Sequence[TestRow]) -> list[str]:
        units = ", ".join(dict.fromkeys(values_of(rows, "unit")))
        rates = set(values_of(rows, "lr"))
        # The loss of a cell is that at its best learning rate, which the notes name if all cells have the same one.
        at = "the best learning rate of each cell"
        if len(rates) == 1 and None not in rates:
            at = f"learning rate {format_setting(rates.pop())}"
        lines: list[str] = [f"estimate: {units}, at {at}, with its {LEVEL:.0%} interval over n seeds"]
        methods = list(filter(None, values_of(rows, "method")))
        if methods:
            lines += [Definition(f"p: {holm_note(rows)}"), Definition(f"tests: {_methods_text(rows)}")]
        lines += self.definitions
        if any(values_of(rows, "bad")):
            lines.append(BAD_NOTE)
        return [*lines, *pool_notes(methods)]


def _methods_text(rows: Sequence[TestRow]) -> str:
    """Return the method of the tests; of several, which rows each one tests."""
    rows_by_method: dict[str, list[str]] = {}
    for number, method in enumerate(values_of(rows, "method"), start=1):
        if method:
            rows_by_method.setdefault(method, []).append(str(number))
    if len(rows_by_method) < 2:
        return "".join(rows_by_method)
    # The rows of the most frequent one need no list.
    *rarer, most_frequent = sorted(rows_by_method, key=lambda method: len(rows_by_method[method]))
    texts = [f"{method} (row {', '.join(rows_by_method[method])})" for method in rarer]
    return "; ".join([*texts, f"{most_frequent} (all other rows)"])


class Interaction(ContrastTest):
    """Differences of differences of the losses."""

    name = "interaction"
    summary = "the difference of differences over two factors or more"
    definitions = (
        Definition(
            "(A - B) x (C - D): how much more C instead of D raises the loss of A than that of B (negative: less), "
            "(loss(A, C) - loss(A, D)) - (loss(B, C) - loss(B, D))"
        ),
        baseline_note(),
    )

    def notes(self, rows: Sequence[TestRow]) -> list[str]:
        lines = super().notes(rows)
        if any(contrast.count(") x (") > 1 for contrast in values_of(rows, "contrast")):
            lines.append(Definition("x (E - F) of a third factor: this number in E minus that in F"))
        return lines

    def rows(self, question: Question) -> Iterator[TestRow]:
        """Yield the interactions of all factors of `--over` together; by default of each pair of factors."""
        for factors in self._sets_of_factors(question):
            # The weight of a cell is the product of its signs; the order is that of the cells of `Question.changes`.
            signs = itertools.product(*[(1.0, -1.0)] * len(factors))
            weights = list(map(math.prod, signs))
            for where, changes, cells in question.changes(factors):
                differences: list[str] = []
                for factor, change in zip(factors, changes, strict=True):
                    differences.append(f"({change_text(factor, change)})")
                labels = self.labels(where, " x ".join(differences), "nats/token")
                yield question.contrast(cells, weights, labels)

    def _sets_of_factors(self, question: Question) -> list[tuple[Factor, ...]]:
        sets = list(itertools.combinations(question.factors, 2))
        if question.over:
            sets = [tuple(question.over)]
        # Without a second factor there is no difference of differences.
        if not sets or len(sets[0]) < 2:
            raise ConfigError("--test interaction: needs two factors or more; name them in --by, or in --over")
        return sets


class Trend(ContrastTest):
    """Slopes of the losses over numeric factors."""

    name = "trend"
    summary = "the slope of the loss over a numeric factor (over its logarithm for depth, width, batch size and steps)"
    number_format = "+#.3g"  # a slope per step or per channel may be far below 0.0001

    def rows(self, question: Question) -> Iterator[TestRow]:
        """Yield the slopes over each factor of `--over`; by default over each numeric factor."""
        numeric = [factor for factor in question.compared_factors if factor.is_numeric]
        # A name in --over that is no number is a mistake; among all factors such names are expected.
        if not numeric or (question.over and len(numeric) < len(question.over)):
            named = " or ".join(factor.option for factor in question.compared_factors)
            raise ConfigError(f"--test trend: needs a numeric factor, such as model.depth, and {named} is not numeric")
        for factor in numeric:
            is_positive = all(float(level or 0) > 0 for level in factor.levels)
            is_log = is_positive and factor.option in LOGARITHMIC
            contrast, unit = f"slope over {factor.name}", "nats/token per unit"
            if is_log:
                contrast, unit = f"slope over ln({factor.name})", "nats/token per e-fold"
            for where, group in question.groups([factor]):
                positions = [float(level) for (level,) in group]  # pyright: ignore[reportArgumentType]
                if is_log:
                    positions = list(map(math.log, positions))
                cells = list(group.values())
                # A slope needs two positions.
                if len(set(positions)) > 1 and not reason_cells_not_comparable(cells):
                    labels = self.labels(where, contrast, unit)
                    yield question.contrast(cells, slope_weights(positions), labels)
