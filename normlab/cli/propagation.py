"""`normlab propagation`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normlab.cli.app import HydraCommand, app, echo, overrides_argument, show_progress


@app.command(cls=HydraCommand, context_settings={"ignore_unknown_options": True})
def propagation(
    overrides: Annotated[list[str] | None, overrides_argument("A grid: placement=pre,post model.depth=6,12")] = None,
    seeds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of initialisations and batches to average over.")
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with all profiles over depth.")] = False,
    page: Annotated[
        str | None, typer.Option("--output", "-o", "--page", metavar="FILE", help="HTML file to write the profiles to.")
    ] = None,
) -> None:
    """Measure signal propagation at initialisation.

    Trains nothing. Prints the RMS of the stream, the ratios of attention and MLP to it, the gradient norm and the
    relative size of the first update, at the first or last block. --json has every block.
    """
    from normlab.config.compose import compose_grid
    from normlab.config.hydra_flags import show_config
    from normlab.propagation.measure import measure_rows
    from normlab.propagation.render import power_laws, table_row, write_page
    from normlab.report.pages.shell import check_page
    from normlab.report.tables import render
    from normlab.training.machine import limit_threads

    if show_config(overrides or []):
        return
    if page is not None:
        check_page(Path(page), "--output")
    limit_threads()
    rows = list(measure_rows(compose_grid(overrides or []), seeds, show_progress))
    echo(render(rows if json else [table_row(row) for row in rows], "json" if json else "table"), keep="\n")
    if not json:
        for law in power_laws(rows):
            echo(law)
    if page is not None:
        write_page(rows, Path(page))
