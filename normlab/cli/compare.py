"""`normlab compare`."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from normlab.cli.app import By, Color, Panel, ResultsDir, Style, Where, X, app, echo, split_names
from normlab.errors import ConfigError, one_line
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
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page on this machine, with new points as the runs train.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option("--port", min=1, max=65535, help="Port of --watch. Default: 6061, or the next free one."),
    ] = None,
    results_dir: ResultsDir = "results",
) -> None:
    """Write an HTML page that compares runs.

    The page shows which configuration is best and by how much, what failed, the losses, the learning rates, the
    interactions of the factors, and the statistics of the layers. It needs no other file. The command prints a summary
    and the path of the page. It lists damaged records, and leaves them out.

    With --watch, the page is served at http://127.0.0.1 until Ctrl-C, which writes the file. From another machine:
    ssh -L 6061:127.0.0.1:6061 HOST.

    Factors are mapped to x, colour, line style and panels as in `normlab figure`; the page can change the mapping.
    """
    from normlab.report.compare.write import ComparePage

    if port is not None and not watch:
        raise ConfigError(f"--port {port}: has no effect without --watch")
    channels = {"x": x, "color": color, "style": style, "panel": split_names(panel)}
    page = ComparePage(
        names=paths or [], by=split_names(by), where=where or (), channels=channels,
        output=None if output is None else Path(output), results_dir=results_dir, version=__version__,
    )  # fmt: skip
    if watch:
        from normlab.report.compare.watch import interrupts, serve

        with serve(page, port, check=True) as address, interrupts() as interrupted:
            echo(f"live at {address} (Ctrl-C ends it and writes the page)")
            if open:
                webbrowser.open(address)
            interrupted.wait()
    summary, path = page.write()
    for line in map(one_line, summary):
        typer.echo(line)
    typer.echo(path)
    if open and not watch:
        webbrowser.open(path.resolve().as_uri())
