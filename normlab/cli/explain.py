"""`normlab explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normlab.cli.app import app, echo


@app.command()
def explain(
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="HTML file to write.")] = "explain.html",
    open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write an HTML page that explains norms and placements.

    The page applies each norm to a matrix that you can edit, and draws a diagram of each placement.
    """
    from normlab.report.pages.shell import check_page

    path = Path(output)
    check_page(path, "-o")
    from normlab.explain import page

    page.write(path)
    echo(path)
    if open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
