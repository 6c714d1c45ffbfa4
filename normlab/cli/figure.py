"""`normlab figure`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from normlab.base.errors import warn
from normlab.cli.app import By, Color, Panel, Paths, ResultsDir, Style, Where, X, app, echo, split_names

StatisticOption = Annotated[
    str | None,
    Option(
        metavar="STATISTIC",
        help="For layers a statistic, with a site if it has several: resid_rms (default), 'norm_in_rms attn.in'. "
        "For loss: val_loss (default), train_loss, grad_norm.",
    ),
]


@app.command()
def figure(
    kind: Annotated[str, Argument(metavar="KIND", help="loss, lr, factor, layers or scaling.")],
    paths: Paths = None,
    output: Annotated[str, Option("--output", "-o", metavar="FILE", help="A .pdf, .svg or .png.")] = "figure.pdf",
    x: X = None,
    color: Color = None,
    style: Style = None,
    panel: Panel = None,
    by: By = None,
    where: Where = None,
    statistic: StatisticOption = None,
    at: Annotated[str, Option(metavar="STEP", help="The step of layers, or first or last.")] = "last",
    columns: Annotated[int, Option(metavar="1|2", help="Width of the figure in text columns.")] = 2,
    results_dir: ResultsDir = "results",
) -> None:
    """Draw a figure of one sweep or several for a paper.

    loss: the loss (or the gradient norm) during training. lr: final loss against the learning rate. factor: final loss
    against a factor. layers: a statistic by layer. scaling: final loss against the compute of training, with the laws
    of `normlab summarize --test scaling`.

    Every number is that of `normlab summarize`. By default the numeric factor with the most levels is on x, the other
    factor with the most levels has the colours, and each combination of the rest has a panel. The command prints a
    caption.

    Example: normlab figure factor first --x model.depth --color placement -o depth.pdf

    A coordinate check of a rule of transfer: sweep model.width (or model.depth) with model.scaling=none,mup
    train.steps=11 stats.every=1, then draw layers with --color model.width --panel model.scaling --at 10.
    """
    from normlab.analysis.table import summarize_by
    from normlab.report.figure_data import make_figure
    from normlab.report.figure_draw import write_figure

    table = summarize_by(paths or (), split_names(by), where=where or (), results_dir=results_dir)
    channels = {"x": x, "color": color, "style": style, "panel": split_names(panel)}
    drawn = make_figure(kind, table, **channels, statistic=statistic, moment=at)
    write_figure(drawn, Path(output), columns)
    echo(drawn.caption)
    echo(output)
    for warning in [*table.warnings, *table.resolved_differences]:
        warn(warning)
