"""`normlab summarize`."""

from __future__ import annotations

from typing import Annotated

import typer

from normlab.cli.app import ResultsDir, Where, app
from normlab.errors import ConfigError, warn


@app.command()
def summarize(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="SWEEP|RUN", help="A sweep, run or results folder: its folder, name, id, or beginning of the id."
        ),
    ] = None,
    format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="table, json, csv or markdown.")] = "table",
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="OPTIONS", help="Options that define a cell, such as norm,placement,model.depth."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="OPTION=VALUE", help="With --by: difference to this baseline, as norm=layernorm."
        ),
    ] = None,
    where: Where = None,
    lr: Annotated[
        float | None,
        typer.Option(
            "--lr", metavar="LR", help="With --by: the shared learning rate. Default: the one with the best mean rank."
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option("--target", metavar="LOSS", help="With --by: steps and seconds to this validation loss."),
    ] = None,
    spikes: Annotated[
        bool,
        typer.Option("--spikes", help="With --by: count loss spikes from metrics where a status has no count."),
    ] = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Print outcome, losses and speed of each run or cell.

    With --by, runs with equal values of the given options form a cell. The table shows the mean and interval of each
    cell over seeds, at its best learning rate (selected on the same validation loss) and at a rate that all cells
    share.

    The last part of an option is enough if it is unique: depth for model.depth.

    Outcomes: finished, stuck (the final loss is at the unigram entropy), regressed (the run lost what it had
    learned) or diverged; the README has the complete rules. In paired tests a diverged run counts as worse than any
    finite loss; it is never dropped.
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
        warn(warning)
