"""`normlab summarize`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option
from typer.core import TyperCommand, TyperOption

from normlab.base.errors import ConfigError, warn
from normlab.cli.app import By, Paths, ResultsDir, Where, app, echo, split_names

if TYPE_CHECKING:
    from normlab.store.query import Selection

Format = Annotated[
    Literal["table", "json", "csv", "markdown", "latex"],
    Option(metavar="FORMAT", help="table, json, csv, markdown or latex."),
]
Against = Annotated[str | None, Option(metavar="OPTION=VALUE", help="Difference to this baseline: norm=layernorm.")]
Target = Annotated[float | None, Option(metavar="LOSS", help="Steps and seconds to this validation loss.")]
Test = Annotated[
    str | None,
    Option(
        metavar="TEST",
        help="Print a test: (names of the tests) (see below).",
    ),
]
Over = Annotated[
    str | None, Option(metavar="OPTIONS", help="The factors of --test. Default: every one, or every pair.")
]
Columns = Annotated[str | None, Option(metavar="COLUMNS", help="Columns to show besides the factors.")]
Notes = Annotated[bool, Option("--notes", help="Explain the words of the table.")]


class _Command(TyperCommand):
    """The command, whose help has the names and the summaries of the tests.

    The tests are imported when this help is printed, because every command imports this file, and would take two to
    three times as long to start with them.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from normlab.analysis.factor_tests.run import TESTS

        *first, last = TESTS
        names = f"{', '.join(first)} or {last}"
        summaries = "; ".join(f"{name}, {test.summary}" for name, test in TESTS.items())
        self.help = (self.help or "").replace("(summaries of the tests)", summaries)
        for parameter in self.params:
            if isinstance(parameter, TyperOption) and parameter.help is not None:
                parameter.help = parameter.help.replace("(names of the tests)", names)
        super().format_help(ctx, formatter)


@app.command(cls=_Command)
def summarize(
    paths: Paths = None,
    format: Format = "table",
    runs: Annotated[bool, Option("--runs", help="One row for each run of a sweep.")] = False,
    by: By = None,
    against: Against = None,
    where: Where = None,
    target: Target = None,
    test: Test = None,
    over: Over = None,
    columns: Columns = None,
    notes: Notes = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Print outcome, losses and speed of each cell of a sweep, or of each run.

    A cell is a group of runs with equal values of some options, its factors: by default those in which the runs
    differ, apart from learning rate and seeds. The table shows the mean and interval of each cell over seeds, at its
    best learning rate (selected on the same validation loss; --where lr=0.001 selects a rate for all cells). A results
    folder, single runs, or --runs gives one row for each run. Several sweeps are one table.

    Tests: (summaries of the tests). In paired tests a diverged run counts as worse than any finite loss (in
    sensitivity and range as ln V); it is never dropped.

    The last part of an option is enough if it is unique: depth for model.depth.
    """
    from normlab.store.query import select_runs

    options = {"--by": by, "--against": against, "--target": target, "--columns": columns, "--test": test}
    set_options = [name for name, value in options.items() if value is not None]
    _reject_unused(set_options, over, test, runs=runs)
    if notes and format in ("json", "csv"):
        raise ConfigError(f"--notes: has no effect with --format {format}; leave out one or the other")
    selection = select_runs(paths or (), results_dir)
    # Only a sweep has cells by itself; an option about cells makes them of any runs.
    if runs or not (set_options or selection.name):
        _print_runs(selection, where or (), format, has_definitions=notes)
        return
    from normlab.analysis.table import summarize_by

    table = summarize_by(selection, split_names(by), where=where or (), against=against, target=target)
    if test is not None:
        from normlab.analysis.factor_tests.run import TESTS, run_test
        from normlab.report.tests_table import render_tests

        rows = run_test(test, table.cells, table.factors, over=split_names(over) or (), against=against)
        text = render_tests(TESTS[test], rows, format, has_definitions=notes)
    else:
        from normlab.report.cells_table import render_cells

        text = render_cells(table, format, split_names(columns) or (), has_definitions=notes)
    echo(text, keep="\n")
    for warning in table.warnings:
        warn(warning)


def _reject_unused(set_options: Sequence[str], over: str | None, test: str | None, *, runs: bool) -> None:
    """Reject options that have no effect with other options."""
    if over is not None and test is None:
        raise ConfigError("--over: has no effect without --test; add, for example, --test interaction")
    if runs and set_options:
        raise ConfigError(f"{', '.join(set_options)}: has no effect with --runs; leave out one or the other")
    # A test takes the factors and the baseline, but has no columns of cells.
    unused = [name for name in set_options if name in ("--target", "--columns")]
    if test and unused:
        raise ConfigError(f"{', '.join(unused)}: has no effect with --test; leave out one or the other")


def _print_runs(selection: Selection, where: Sequence[str], format: str, *, has_definitions: bool) -> None:
    """Print a row for each run."""
    from normlab.report.runs_table import comparability_warnings, render_runs
    from normlab.report.runs_table import summarize as rows_of

    echo(render_runs(rows_of(selection, where), format, has_definitions=has_definitions), keep="\n")
    for warning in comparability_warnings(selection, where):
        warn(warning)
