"""`normlab compare`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from normlab.base.errors import one_line
from normlab.cli.app import (
    By,
    Color,
    Panel,
    Paths,
    ResultsDir,
    Style,
    Where,
    X,
    app,
    echo,
    split_names,
)


@app.command()
def compare(
    paths: Paths = None,
    by: By = None,
    where: Where = None,
    x: X = None,
    color: Color = None,
    style: Style = None,
    panel: Panel = None,
    output: Annotated[
        str | None, Option("--output", "-o", metavar="FILE", help="HTML file. Default: compare.html in the sweep.")
    ] = None,
    results_dir: ResultsDir = "results",
) -> None:
    """Write an HTML page that compares runs.

    The page shows which configuration is best and by how much, what failed, the losses, the learning rates, and the
    statistics of the layers. It needs no other file. The command prints a summary and the path of the page. It lists
    damaged records, and leaves them out.
    """
    from normlab.report.compare.write import ComparePage

    channels = {"x": x, "color": color, "style": style, "panel": split_names(panel)}
    page = ComparePage(
        names=paths or [], by=split_names(by), where=where or (), channels=channels,
        output=None if output is None else Path(output), results_dir=results_dir,
    )  # fmt: skip
    summary, path = page.write()
    for sentence in summary:
        echo(one_line(sentence))
    echo(path)
