"""The test of the counts of bad outcomes: of runs that diverged, are stuck or regressed."""

from collections.abc import Iterator, Sequence

from normlab.analysis.cells import count_bad
from normlab.analysis.columns import Column, Definition
from normlab.analysis.contrasts import fisher_p
from normlab.analysis.factor_tests.base import (
    BAD,
    CONTRAST,
    P_HOLM,
    WHERE,
    FactorTest,
    P,
    Question,
    TestRow,
    baseline_note,
    change_text,
    holm_note,
)

BAD_OF_BASELINE: Column[TestRow] = Column(
    "baseline_bad", lambda row: f"{row['baseline_bad']} of {row['baseline_runs']}", "bad, baseline"
)


class Counts(FactorTest):
    """Fisher's exact test that two cells have the same share of bad outcomes, over all their learning rates."""

    name = "counts"
    summary = "Fisher's exact test of how many runs diverged, are stuck or regressed (see docs/read-results.md)"

    def rows(self, question: Question) -> Iterator[TestRow]:
        for factor in question.compared_factors:
            for where, [change], [cell, baseline] in question.changes([factor]):
                bad, runs = count_bad(cell.completed), len(cell.completed)
                baseline_bad, baseline_runs = count_bad(baseline.completed), len(baseline.completed)
                estimate = p = None
                if runs and baseline_runs:
                    estimate = bad / runs - baseline_bad / baseline_runs
                    p = fisher_p(bad, runs, baseline_bad, baseline_runs)
                yield {
                    **self.labels(where, change_text(factor, change), "share of runs"),
                    "estimate": estimate,
                    "bad": bad,
                    "runs": runs,
                    "baseline_bad": baseline_bad,
                    "baseline_runs": baseline_runs,
                    "p": p,
                    "method": "Fisher's exact test",
                }

    def columns(self, rows: Sequence[TestRow]) -> list[Column[TestRow]]:
        return [WHERE, CONTRAST, BAD, BAD_OF_BASELINE, P, P_HOLM]

    def notes(self, rows: Sequence[TestRow]) -> list[str]:
        return [
            Definition("bad: runs that diverged, are stuck or regressed, at all learning rates"),
            Definition(f"p: Fisher's exact test, which takes the runs as independent; {holm_note(rows)}"),
            baseline_note(),
        ]
