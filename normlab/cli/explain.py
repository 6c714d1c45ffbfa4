"""`normlab explain`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from normlab.cli.app import app, echo


@app.command()
def explain(
    output: Annotated[str, Option("--output", "-o", metavar="FILE", help="HTML file to write.")] = "explain.html",
    norm: Annotated[str, Option(help="Norm in the placements.")] = "rmsnorm",
) -> None:
    """Write an HTML page that explains norms and placements.

    The page has each norm's output for a matrix, and a diagram of each placement with the numbers of a forward pass.
    """
    from normlab.report.pages.shell import check_page

    path = Path(output)
    check_page(path)
    from normlab.explain import page

    page.write(path, norm)
    echo(path)
