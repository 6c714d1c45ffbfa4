"""`normlab figure`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normlab.cli.app import ResultsDir, Where, app
from normlab.errors import warn


@app.command()
def figure(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="loss, lr, factor, layers or matrix.")],
    path: Annotated[
        str, typer.Argument(metavar="SWEEP", help="A sweep, run or results folder: its folder, name or id.")
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="File to write: .pdf, .svg or .png.")
    ] = "figure.pdf",
    x: Annotated[str | None, typer.Option("--x", metavar="OPTION", help="The factor on the x axis.")] = None,
    color: Annotated[str | None, typer.Option("--color", metavar="OPTION", help="The factor with the colours.")] = None,
    style: Annotated[
        str | None, typer.Option("--style", metavar="OPTION", help="The factor with the line styles.")
    ] = None,
    panel: Annotated[
        str | None, typer.Option("--panel", metavar="OPTIONS", help="The factors with one panel for each level.")
    ] = None,
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="OPTIONS", help="The factors. Default: the options in which the runs differ."),
    ] = None,
    where: Where = None,
    statistic: Annotated[
        str, typer.Option("--statistic", metavar="STATISTIC", help="The statistic of layers: `normlab list stats`.")
    ] = "resid_rms",
    columns: Annotated[int, typer.Option("--columns", metavar="1|2", help="Width of the figure in text columns.")] = 2,
    results_dir: ResultsDir = "results",
) -> None:
    """Draw a figure of a sweep for a paper.

    loss: validation loss during training. lr: final loss against the learning rate. factor: final loss against a
    factor. layers: a statistic by layer. matrix: final loss over two factors, as a heat map.

    Every number is that of `normlab summarize`. By default the numeric factor with the most levels is on x, the other
    factor with the most levels has the colours, and each combination of the rest has a panel. The command prints a
    caption.

    Example: normlab figure factor first --x model.depth --color placement -o depth.pdf
    """
    from normlab.report.cells_table import summarize_by
    from normlab.report.figure_data import make_figure
    from normlab.report.figure_draw import write_figure

    def names(text: str | None) -> list[str] | None:
        return None if text is None else [name.strip() for name in text.split(",")]

    table = summarize_by(path, names(by), where=where or (), results_dir=results_dir)
    drawn = make_figure(kind, table, x=x, color=color, style=style, panel=names(panel), statistic=statistic)
    write_figure(drawn, Path(output), columns)
    typer.echo(drawn.caption)
    typer.echo(output)
    for warning in table.warnings:
        warn(warning)
