"""`normlab propagation`, also accepted under its old name `normlab probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normlab.cli.app import HydraCommand, app, overrides_argument, show_progress


@app.command("probe", cls=HydraCommand, context_settings={"ignore_unknown_options": True}, hidden=True)
@app.command(cls=HydraCommand, context_settings={"ignore_unknown_options": True})
def propagation(
    overrides: Annotated[list[str] | None, overrides_argument("A grid: placement=pre,post model.depth=6,12")] = None,
    seeds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of initialisations and batches to average over.")
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with all profiles over depth.")] = False,
    page: Annotated[
        str | None, typer.Option("--page", "-o", metavar="FILE", help="HTML file to write the profiles to.")
    ] = None,
) -> None:
    """Measure signal propagation at initialisation.

    Prints profiles over depth of the stream, the branches, the gradient and the first update, without training.
    """
    from normlab.config.compose import compose_grid
    from normlab.config.hydra_flags import show_config
    from normlab.report.pages.shell import check_page
    from normlab.report.signal_propagation import power_laws, table_row, write_page
    from normlab.report.tables import render
    from normlab.train.signal_propagation import measure_rows

    if show_config(overrides or []):
        return
    if page is not None:
        check_page(Path(page), "--page")
    rows = list(measure_rows(compose_grid(overrides or []), seeds, show_progress))
    typer.echo(render(rows if json else [table_row(row) for row in rows], "json" if json else "table"))
    if not json:
        for law in power_laws(rows):
            typer.echo(law)
    if page is not None:
        write_page(rows, Path(page))
