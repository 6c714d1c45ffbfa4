"""`normlab summarize`."""

from __future__ import annotations

from typing import Annotated

import typer

from normlab.cli.app import By, ResultsDir, Where, app, echo, split_names
from normlab.errors import ConfigError, warn

TEST_OPTIONS = ("--by", "--against", "--lr", "--test", "--over")
"""The options that --test uses."""


def _formats() -> list[str]:
    from normlab.report.tables import FORMATS

    return list(FORMATS)


@app.command()
def summarize(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="SWEEP|RUN", help="A sweep, run or results folder: its folder, name, id, or beginning of the id."
        ),
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            "--format", metavar="FORMAT", autocompletion=_formats, help="table, json, csv, markdown or latex."
        ),
    ] = "table",
    runs: Annotated[bool, typer.Option("--runs", help="One row for each run of a sweep.")] = False,
    by: By = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="OPTION=VALUE", help="Difference to this baseline, as norm=layernorm."),
    ] = None,
    where: Where = None,
    lr: Annotated[
        float | None,
        typer.Option("--lr", metavar="LR", help="The shared learning rate. Default: the one with the best mean rank."),
    ] = None,
    target: Annotated[
        float | None, typer.Option("--target", metavar="LOSS", help="Steps and seconds to this validation loss.")
    ] = None,
    test: Annotated[
        str | None,
        typer.Option("--test", metavar="TEST", help="Print a test: interaction, trend or counts (see below)."),
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(
            "--over",
            metavar="OPTIONS",
            help="The factors of --test: two or three for an interaction. Default: every pair (interaction), every "
            "factor (trend, counts).",
        ),
    ] = None,
    columns: Annotated[
        str | None, typer.Option("--columns", metavar="COLUMNS", help="Columns to show besides the factors.")
    ] = None,
    results_dir: ResultsDir = "results",
) -> None:
    """Print outcome, losses and speed of each cell of a sweep, or of each run.

    A cell is a group of runs with equal values of some options, its factors: by default those in which the runs
    differ, apart from learning rate and seeds. The table shows the mean and interval of each cell over seeds, at its
    best learning rate (selected on the same validation loss) and at a rate that all cells share. A results folder, a
    single run, or --runs gives one row for each run.

    Tests: interaction, the difference of differences over two factors or more; trend, the slope of the loss over a
    numeric factor (over its logarithm for depth, width, batch size and steps); counts, Fisher's exact test of the
    number of runs that diverged, are stuck or regressed.

    The last part of an option is enough if it is unique: depth for model.depth.

    Outcomes: finished, stuck (the final loss is at the unigram entropy), regressed (the run lost what it had
    learned) or diverged; the README has the complete rules. In paired tests a diverged run counts as worse than any
    finite loss; it is never dropped.
    """
    from normlab.report.runs_table import summarize as rows_of
    from normlab.report.tables import render
    from normlab.store.query import select_runs

    options = {
        "--by": by, "--against": against, "--lr": lr, "--target": target, "--test": test,
        "--over": over, "--columns": columns,
    }  # fmt: skip
    given = [option for option, value in options.items() if value is not None]
    if runs and given:
        raise ConfigError(f"{', '.join(given)}: has no effect with --runs; leave out one or the other")
    if over is not None and test is None:
        raise ConfigError("--over: has no effect without --test; add, for example, --test interaction")
    if test is not None and (ignored := [option for option in given if option not in TEST_OPTIONS]):
        raise ConfigError(f"{', '.join(ignored)}: has no effect with --test; leave out one or the other")
    selection = select_runs([path or results_dir], results_dir)
    if runs or not (given or selection.name):
        return echo(render(rows_of(selection, where or (), with_options=format == "json"), format), keep="\n")
    from normlab.analysis.table import summarize_by
    from normlab.report.cells_table import render_cells

    table = summarize_by(selection, split_names(by), where=where or (), against=against, lr=lr, target=target)
    if test is not None:
        from normlab.analysis.factor_tests import run_test
        from normlab.report.cells_table import render_tests

        rows = run_test(test, table.cells, table.factors, over=split_names(over) or (), against=against, lr=lr)
        echo(render_tests(rows, format), keep="\n")
    else:
        echo(render_cells(table, format, split_names(columns) or ()), keep="\n")
    for warning in table.warnings:
        warn(warning)
