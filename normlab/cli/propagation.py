"""`normlab propagation`, and its former name `normlab probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normlab.cli.app import (
    OVERRIDES,
    Cfg,
    ConfigDir,
    ConfigName,
    app,
    echo,
    overrides_argument,
    read_arguments,
    show_progress,
)


@app.command("probe", context_settings=OVERRIDES, hidden=True)
@app.command(context_settings=OVERRIDES)
def propagation(
    overrides: Annotated[list[str] | None, overrides_argument("A grid: placement=pre,post model.depth=6,12")] = None,
    seeds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of initialisations and batches to average over.")
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with all profiles over depth.")] = False,
    page: Annotated[
        str | None, typer.Option("--output", "-o", "--page", metavar="FILE", help="HTML file to write the profiles to.")
    ] = None,
    cfg: Cfg = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "train",
) -> None:
    """Measure signal propagation at initialisation.

    Trains nothing. Prints the RMS of the stream, the ratios of attention and MLP to it, the gradient norm and the
    relative size of the first update, at the first or last block. --json has every block.
    """
    from normlab.config.compose import compose_grid
    from normlab.propagation.measure import measure_rows
    from normlab.propagation.render import power_laws, table_row, write_page
    from normlab.report.pages.shell import check_page
    from normlab.report.tables import render
    from normlab.training.machine import limit_threads

    texts, configs = read_arguments(overrides, cfg, config_dir, config_name)
    if page is not None:
        check_page(Path(page), "--output")
    limit_threads()
    rows = list(measure_rows(compose_grid(texts, configs), seeds, show_progress))
    echo(render(rows if json else [table_row(row) for row in rows], "json" if json else "table"), keep="\n")
    if not json:
        for law in power_laws(rows):
            echo(law)
    if page is not None:
        write_page(rows, Path(page))
