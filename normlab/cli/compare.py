"""`normlab compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normlab.cli.app import By, Color, Panel, ResultsDir, Style, Where, X, app, split_names
from normlab.errors import one_line
from normlab.version import __version__


@app.command()
def compare(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SWEEP|RUN",
            help="Sweeps, runs or results folders: folder, name, id, or beginning of the id. Default: --results-dir.",
        ),
    ] = None,
    by: By = None,
    where: Where = None,
    x: X = None,
    color: Color = None,
    style: Style = None,
    panel: Panel = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="HTML file to write. Default: compare.html in the sweep's folder."
        ),
    ] = None,
    open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Write an HTML page that compares runs.

    The page shows which configuration is best and by how much, what failed, the losses, the learning rates, the
    interactions of the factors, and the statistics of the layers. It needs no other file. The command prints a summary
    and the path of the page. It lists damaged records, and leaves them out.

    Factors are mapped to x, colour, line style and panels as in `normlab figure`; the page can change the mapping.
    """
    from normlab.report.compare.write import write_compare

    channels = {"x": x, "color": color, "style": style, "panel": split_names(panel)}
    summary, page = write_compare(
        paths or [], by=split_names(by), where=where or (), channels=channels,
        output=None if output is None else Path(output), open=open, results_dir=results_dir, version=__version__,
    )  # fmt: skip
    for line in map(one_line, summary):
        typer.echo(line)
    typer.echo(page)
