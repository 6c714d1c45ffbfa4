"""The table of `normlab summarize --test`: the rows of a test, with its definitions below."""

from collections.abc import Sequence

from normlab.analysis.factor_tests import RATE_TESTS
from normlab.analysis.intervals import LEVEL, Design
from normlab.analysis.rate_range import NEAR
from normlab.analysis.settings import format_setting
from normlab.base.errors import counted
from normlab.report.cells_table import add_notes, pool_notes
from normlab.report.tables import Row, format_p, render


def render_tests(rows: Sequence[Row], format: str) -> str:
    """Render the rows of `factor_tests.run_test` in one of `tables.FORMATS`; JSON and CSV have every value."""
    if format in ("json", "csv") or not rows:
        return render(rows, format)
    return add_notes(render(format_tests(rows), format, fixed=("where", "contrast")), notes_on_tests(rows), format)


def format_tests(rows: Sequence[Row]) -> list[Row]:
    has_bad, has_units = any(row["bad"] for row in rows), len({row["unit"] for row in rows}) > 1
    return [
        {
            "where": row["where"],
            "contrast": row["contrast"],
            **(_counts_text(row) if row["test"] == "counts" else {"estimate": estimate_text(row)}),
            **({"unit": row["unit"]} if has_units else {}),
            **({"p": format_p(row["p"]), "p (Holm)": format_p(row["p_holm"])} if row["test"] != "optimum" else {}),
            **({"tokens": f"{row['tokens']:,}"} if "tokens" in row else {}),
            **({"bad": f"{row['bad']} of {row['runs']}"} if has_bad and row["test"] != "counts" else {}),
        }
        for row in rows
    ]


FORMS = {"trend": "+#.3g", "range": "#.3g", "optimum": "#.3g", "sensitivity": ".4f"}
"""The formats of estimates; a slope per step or per channel may be far below 0.0001, and so may a learning rate."""
DIFFERENCE = "+.4f"


def number_text(row: Row) -> str:
    """Return an estimate without its interval: `0.0232`, `0.0300 or more`, or why there is none."""
    if row["estimate"] is None:
        return row.get("missing", "no common seed")
    beyond = {("above",): " or more", ("below",): " or less"}.get(tuple(row.get("beyond_grid", ())), "")
    return f"{row['estimate']:{FORMS.get(row['test'], DIFFERENCE)}}{beyond}"


def estimate_text(row: Row) -> str:
    """Return an estimate with its interval: `0.0232 [0.0200, 0.0269] (n=5)`, or why there is none."""
    if row["estimate"] is None:
        return number_text(row)
    form, beyond = FORMS.get(row["test"], DIFFERENCE), row.get("beyond_grid", ())
    low, high = (
        "beyond the grid" if side in beyond else "" if row[bound] is None else f"{row[bound]:{form}}"
        for side, bound in (("below", "low"), ("above", "high"))
    )
    interval = f" [{low}, {high}]" if low and high else ""
    levels = row["n_crossed"] or (row["n"], row["n"])
    return f"{number_text(row)}{interval} (n={Design(row['n'], tuple(levels))})"


def _counts_text(row: Row) -> Row:
    return {
        "bad": f"{row['bad']} of {row['runs']}",
        "bad, baseline": f"{row['baseline_bad']} of {row['baseline_runs']}",
    }


def notes_on_tests(rows: Sequence[Row]) -> list[str]:
    test, differences = rows[0]["test"], rows[0]["resolved_differences"]
    tests = sum(row["p"] is not None for row in rows)
    corrected = f"two-sided, corrected by Holm's method for {counted(tests, 'test')}, those of this table"
    baseline = "after a minus sign: the baseline, by default the first level of a factor; --against chooses another"
    if test == "counts":
        return [
            "bad: runs that diverged, are stuck or regressed, at all learning rates",
            f"p: Fisher's exact test, which takes the runs as independent; {corrected}",
            baseline,
            *differences,
        ]
    if test == "anytime":
        # Cells with several learning rates have neither an estimate nor p.
        p_value = [f"p: likewise; {corrected}"] if tests else []
        return [
            f"estimate: mean over n seeds of the differences, with a {LEVEL:.0%} interval that holds at every number "
            "of seeds (a confidence sequence), so that seeds may be added until it is decided",
            *p_value,
            baseline,
            *differences,
        ]
    if test == "optimum":
        return [
            "optimum: the learning rate with the lowest loss, by a parabola in ln(rate) through the n losses of runs "
            f"that have learned, within {NEAR} nats/token of the lowest; with Fieller's {LEVEL:.0%} interval, if it "
            "has ends: in simulations (8 and 12 rates, noise 0.01 and 0.03) 70 to 92 % of these hold the optimum",
            "tokens: total of all runs of the cell",
            *differences,
        ]
    if test in RATE_TESTS:
        beyond = any(row["beyond_grid"] and row["estimate"] is not None for row in rows)
        return [
            *(number.text for number in RATE_TESTS[test]),
            f"estimate: {'geometric ' if test == 'range' else ''}mean over n seeds with its {LEVEL:.0%} interval",
            *([f"p: paired t test{' of the logarithms' if test == 'range' else ''}, {corrected}"] if tests else []),
            *(
                ["beyond the grid, or more, or less: the number of a seed is cut off at an end of the grid"]
                if beyond
                else []
            ),
            *(
                f"{row['contrast']}: in {row['gaps']} of {counted(row['n'], 'seed')} a rate between two that train "
                "does not"
                for row in rows
                if row["gaps"]
            ),
            baseline.replace("a minus sign", "- or /"),
            *differences,
        ]
    rates, units = {row["lr"] for row in rows}, ", ".join(dict.fromkeys(row["unit"] for row in rows))
    [rate] = rates if len(rates) == 1 else [None]
    at = "the best learning rate of each cell" if rate is None else f"learning rate {format_setting(rate)}"
    lines = [f"estimate: {units}, at {at}, with its {LEVEL:.0%} interval over n seeds; p: {corrected}"]
    if test == "interaction":
        lines += [
            "(A - B) x (C - D): loss(A, C) - loss(B, C) - loss(A, D) + loss(B, D); negative: C instead of D lowers the "
            "loss more in A than in B; x (E - F): this number in E minus that in F",
            baseline,
        ]
    if any(row["bad"] for row in rows):
        lines.append(
            "bad: runs of these cells that diverged, are stuck or regressed; the loss of a stuck run stays near the "
            "unigram entropy, so an estimate with stuck runs may be far too small"
        )
    methods = dict.fromkeys(row["method"] for row in rows if row["method"])
    return [*lines, f"tests: {'; '.join(methods)}", *pool_notes(methods), *differences]
