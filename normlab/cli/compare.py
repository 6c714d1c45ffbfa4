"""`normlab compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normlab.cli.app import ResultsDir, Where, app
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
    by: Annotated[
        str | None,
        typer.Option(
            "--by", metavar="OPTIONS", help="Options that define a cell. Default: those that differ between runs."
        ),
    ] = None,
    where: Where = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="HTML file to write. Default: compare.html in the sweep's folder."
        ),
    ] = None,
    format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="html, or png to write the figures too.")
    ] = "html",
    open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Write an HTML page that compares runs.

    The page shows which cell is best, with intervals and tests, and the statistics of the runs. The page needs no
    other file. The command prints a summary and the path of the page. It lists damaged records, and leaves them out.
    """
    from normlab.report.compare.write import write_compare

    page = None if output is None else Path(output)
    summary, files = write_compare(
        paths or [], by=by, where=where or (), output=page, format=format, open=open, results_dir=results_dir,
        version=__version__,
    )  # fmt: skip
    for line in [*map(one_line, summary), *files]:
        typer.echo(line)
