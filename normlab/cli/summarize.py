"""`normlab summarize`."""

from __future__ import annotations

from typing import Annotated

import typer

from normlab.cli.app import ResultsDir, Where, app
from normlab.errors import ConfigError, one_line


@app.command()
def summarize(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="SWEEP|RUN", help="A sweep, run or results folder: its folder, name, id, or beginning of the id."
        ),
    ] = None,
    format: Annotated[str, typer.Option("--format", help="table, json, csv or markdown.")] = "table",
    by: Annotated[
        str | None, typer.Option("--by", help="Group runs into cells by these options: norm,placement,model.depth.")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="With --by: difference to this baseline, as norm=layernorm.")
    ] = None,
    where: Where = None,
    lr: Annotated[
        float | None, typer.Option("--lr", help="With --by: a learning rate at which to compare all cells too.")
    ] = None,
    target: Annotated[
        float | None, typer.Option("--target", help="With --by: steps and seconds to this validation loss.")
    ] = None,
    spikes: Annotated[
        bool,
        typer.Option("--spikes", help="With --by: count loss spikes of older runs, whose records lack the counts."),
    ] = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Print outcome, losses and speed of each run or cell.

    With --by, runs with the same values of these options form a cell, with means and intervals over seeds. A cell is
    printed at its best learning rate, selected on the same loss, and at a learning rate that all cells share.

    Unambiguous short names are accepted: depth for model.depth.

    Outcomes: the band reaches from 5 % below the corpus's unigram entropy (or from halfway to the bigram entropy, if
    that is closer) to 5 % above it. A run is stuck if its final loss is in the band and no evaluation was below it. A
    run has regressed if its final loss is in a higher range than its best loss: the ranges are below the band, in it,
    above it, and more than 5 % above both ln V and the initial loss. A run has diverged if its loss is not finite, or
    more than 1 nat/token above both ln V and the initial loss. In paired tests a diverged run counts as worse than any
    finite loss; a diverged run is never dropped.
    """
    from normlab.report.runs_table import summarize as rows_of
    from normlab.report.tables import render

    if by is None:
        given = {"--against": against, "--lr": lr, "--target": target, "--spikes": spikes or None}
        if unused := [option for option, value in given.items() if value is not None]:
            raise ConfigError(f"{', '.join(unused)}: has no effect without --by; add, for example, --by norm,placement")
        return typer.echo(render(rows_of(path or results_dir, where or (), results_dir), format))
    from normlab.report.cells_table import summarize_by
    from normlab.report.cells_text import render_cells

    table = summarize_by(
        path or results_dir, [option.strip() for option in by.split(",")], where=where or (), results_dir=results_dir,
        against=against, lr=lr, target=target, spikes=spikes,
    )  # fmt: skip
    typer.echo(render_cells(table, format))
    for warning in table.warnings:
        typer.echo(f"normlab: {one_line(warning)}", err=True)
