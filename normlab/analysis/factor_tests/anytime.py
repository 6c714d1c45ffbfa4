"""The test whose intervals hold at every number of seeds at once, so that seeds may be added until it is decided."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from normlab.analysis.cells import count_bad
from normlab.analysis.columns import Definition
from normlab.analysis.contrasts import weighted_sums
from normlab.analysis.factor_tests.base import (
    FactorTest,
    Question,
    TestRow,
    baseline_note,
    change_text,
    holm_note,
    values_of,
)
from normlab.analysis.intervals import LEVEL
from normlab.analysis.sequences import log_wealth, typical_sequence, typical_value

NOTHING: TestRow = dict.fromkeys(("estimate", "low", "high", "p", "n_crossed", "lr"))


class Anytime(FactorTest):
    """The difference of each level from its baseline, with a confidence sequence over seeds."""

    name = "anytime"
    summary = "differences from a baseline that hold at every number of seeds"

    def rows(self, question: Question) -> Iterator[TestRow]:
        for factor in question.compared_factors:
            for where, [change], [cell, baseline] in question.changes([factor]):
                runs = [*cell.runs_at(cell.best_lr), *baseline.runs_at(baseline.best_lr)]
                differences = weighted_sums((1.0, -1.0), [cell.final.losses, baseline.final.losses])
                # A confidence sequence is one of values in the order in which they came.
                values = [differences[replicate] for replicate in sorted(differences)]
                # With several rates, a new seed may make another one the best, which changes the values of all seeds.
                has_one_rate = len(cell.losses) == len(baseline.losses) == 1
                # Means of pairs, and so the interval, are not defined with an infinite difference.
                is_finite = all(map(math.isfinite, values))
                estimates = NOTHING
                if has_one_rate and is_finite and len(values) > 1:
                    estimates = NOTHING | _estimates(values)
                missing = "no common seed"
                if not has_one_rate:
                    missing = "several learning rates"
                elif not is_finite:
                    missing = "a seed diverged"
                elif values:
                    missing = "one common seed"
                yield {
                    **estimates,
                    **self.labels(where, change_text(factor, change), "nats/token"),
                    "missing": missing,
                    "n": len(values),
                    "method": "confidence sequence of the center of symmetry",
                    "bad": count_bad(runs),
                    "runs": len(runs),
                }

    def bound_text(self, row: TestRow, bound: str) -> str:
        # The interval of few seeds may have one end only.
        if row[bound] is None and (row["low"], row["high"]) != (None, None):
            return {"low": "-inf", "high": "inf"}[bound]
        return super().bound_text(row, bound)

    def notes(self, rows: Sequence[TestRow]) -> list[str]:
        lines = [
            "estimate: typical difference over n seeds (the median of the means of all pairs), with a "
            f"{LEVEL:.0%} interval that holds at every number of seeds (a confidence sequence), so that seeds may be "
            "added until it is decided"
        ]
        # Cells with several learning rates have neither an estimate nor p.
        if any(p is not None for p in values_of(rows, "p")):
            lines.append(Definition(f"p: holds at every number of seeds, too; {holm_note(rows)}"))
        return [*lines, baseline_note()]


def _estimates(values: Sequence[float]) -> TestRow:
    """Return the typical difference of two seeds or more, its interval, if it has ends, and p."""
    low, high = typical_sequence(values, 1 - LEVEL)
    p = min(1.0, math.exp(-log_wealth(np.array(values), 0.0)[-1]))
    row: TestRow = {"estimate": typical_value(values), "p": p}
    for name, bound in (("low", low), ("high", high)):
        if math.isfinite(bound):
            row[name] = bound
    return row
