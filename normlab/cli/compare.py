"""`normlab compare`."""

from __future__ import annotations

import signal
import threading
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from normlab.cli.app import (
    By,
    Color,
    Open,
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
    open: Open = False,
    watch: Annotated[bool, Option("--watch", help="Serve the page here, with new points as the runs train.")] = False,
    port: Annotated[int | None, Option(min=1, max=65535, help="Port of --watch. Default: 6061, or a free one.")] = None,
    wandb: Annotated[bool, Option("--wandb", help="Also make or update the sweep's workspace at W&B.")] = False,
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
    if wandb and (len(paths or []) != 1 or where):
        raise ConfigError("--wandb: makes the workspace of one sweep; name one, without --where")
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
            if open:
                webbrowser.open(address)
            threading.Event().wait()
    summary, path = page.write()
    for line in map(one_line, summary):
        echo(line)
    echo(path)
    if open and not watch:
        webbrowser.open(path.resolve().as_uri())
    if wandb:
        echo(_save_workspace(paths or [], by, channels, results_dir))


def _save_workspace(names: list[str], by: str | None, channels: dict[str, Any], results_dir: str) -> str:
    """Make or update the workspace of a sweep at W&B, grouped as the page is, and return its address."""
    from normlab.analysis.factors import factors_of
    from normlab.analysis.results import read_results
    from normlab.analysis.settings import LR
    from normlab.analysis.table import cell_options
    from normlab.report.channels import choose_channels
    from normlab.store.query import select_runs
    from normlab.tracking.workspace import save_workspace

    selection = select_runs(names, results_dir)
    if not selection.name:
        raise ConfigError(f"--wandb: {names[0]} is no sweep; name a sweep")
    results, _ = read_results(selection.records)
    factors = factors_of(results, cell_options(split_names(by), results))
    chosen = choose_channels(factors, selection.started, **channels)
    # The colours first, because W&B gives colours to the groups of the first factor.
    grouped = [factor for factor in (chosen.color, chosen.style, chosen.x, *chosen.panel) if factor is not None]
    options = dict.fromkeys([*(factor.option for factor in grouped), LR])
    return save_workspace(selection.name, [run.record for run in results], list(options))
