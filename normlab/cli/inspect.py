"""`normlab inspect`."""

from typing import Annotated

from typer import Argument, Option

from normlab.base.errors import ConfigError
from normlab.cli.app import ResultsDir, RunArgument, app, echo

Arguments = Annotated[
    list[str] | None,
    Argument(
        metavar="FACTORS|STATISTIC",
        help="Of a sweep, the run with these factors: 'placement=post,depth=8,seed=0'. Then a statistic of `normlab "
        "list stats`, or spikes.",
    ),
]


@app.command()
def inspect(
    run: RunArgument,
    arguments: Arguments = None,
    at: Annotated[int | None, Option(metavar="STEP", help="Only this measured step.")] = None,
    json: Annotated[bool, Option("--json", help="Print JSON, with every step and layer.")] = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Print the statistics of a run by layer and step: activations, gradients, norms and updates.

    Without STATISTIC, an overview. With one: its definition and its table. Layer 1 of the residual stream is the output
    of the embeddings, and head the output of the last layer.

    Example: normlab inspect first 'placement=post,depth=16,seed=0' resid_rms
    """
    from normlab.analysis.factors import find_run
    from normlab.report import inspect as statistics
    from normlab.report.tables import render
    from normlab.store.record import RunRecord

    conditions: list[str] = []
    names: list[str] = []
    for argument in arguments or ():
        if any(sign in argument for sign in "=<>"):
            conditions.append(argument)
        else:
            names.append(argument)
    if len(names) > 1:
        raise ConfigError(f"{' '.join(names)}: name one statistic; a run of a sweep is named by conditions like seed=0")
    statistic = names[0] if names else None
    folder = find_run(run, conditions, results_dir)
    RunRecord.load(folder)  # a damaged record is an error
    if statistic == statistics.SPIKES:
        spikes = statistics.spike_rows(folder)
        if json:
            return echo(render(spikes, "json"), keep="\n")
        return echo(f"{statistics.SPIKES_READING}\n\n{render(statistics.spike_table(spikes))}", keep="\n")
    rows = statistics.inspect(folder, statistic, at)
    if json:
        return echo(render(rows, "json"), keep="\n")
    if statistic is None:
        echo(f"{statistics.overview_reading(rows)}\n\n{render(statistics.overview_rows(rows))}\n", keep="\n")
        usage = "normlab inspect RUN STATISTIC prints one statistic by layer and step"
        return echo(f"{usage}; normlab list stats lists the statistics")
    echo(f"{statistics.definition(statistic)}\n", keep="\n")
    echo(f"{render(statistics.table_rows(rows))}\n", keep="\n")
    for note in statistics.notes(rows):
        echo(note)
