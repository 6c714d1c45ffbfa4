"""`normlab compare`."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from normlab.cli.app import (
    By,
    Color,
    Panel,
    ResultsDir,
    Style,
    Where,
    X,
    app,
    echo,
    replace_interrupt_handler,
    split_names,
)
from normlab.errors import ConfigError, one_line


@app.command()
def compare(
    paths: Annotated[
        list[str] | None,
        Argument(metavar="SWEEP|RUN", help="Sweeps, runs or results folders, by folder, name or id. Default: all."),
    ] = None,
    by: By = None,
    where: Where = None,
    x: X = None,
    color: Color = None,
    style: Style = None,
    panel: Panel = None,
    output: Annotated[
        str | None, Option("--output", "-o", metavar="FILE", help="HTML file. Default: compare.html in the sweep.")
    ] = None,
    watch: Annotated[bool, Option("--watch", help="Serve the page here, with new points as the runs train.")] = False,
    port: Annotated[int | None, Option(min=1, max=65535, help="Port of --watch. Default: 6061, or a free one.")] = None,
    results_dir: ResultsDir = "results",
) -> None:
    """Write an HTML page that compares runs.

    The page shows which configuration is best and by how much, what failed, the losses, the learning rates, and the
    statistics of the layers. It needs no other file. The command prints a summary and the path of the page. It lists
    damaged records, and leaves them out.

    With --watch, the page is served at http://127.0.0.1 until Ctrl-C, which writes the file. From another machine:
    ssh -L 6061:127.0.0.1:6061 HOST.
    """
    from normlab.report.compare.write import ComparePage

    if port is not None and not watch:
        raise ConfigError(f"--port {port}: has no effect without --watch")
    channels = {"x": x, "color": color, "style": style, "panel": split_names(panel)}
    page = ComparePage(
        names=paths or [], by=split_names(by), where=where or (), channels=channels,
        output=None if output is None else Path(output), results_dir=results_dir,
    )  # fmt: skip
    if watch:
        from normlab.report.compare.watch import serve

        page.data(page.select(must_have_started=False))  # a wrong condition is an error of the command
        replace_interrupt_handler(signal.SIG_DFL, signal.default_int_handler)
        with suppress(KeyboardInterrupt), serve(page, port) as address:
            echo(f"live at {address} (Ctrl-C ends it and writes the page)")
            threading.Event().wait()
    summary, path = page.write()
    for line in map(one_line, summary):
        echo(line)
    echo(path)
