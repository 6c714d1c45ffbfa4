"""`normlab inspect`."""

from __future__ import annotations

from typing import Annotated

import typer

from normlab.cli.app import ResultsDir, Run, Trust, app
from normlab.errors import ConfigError, warn


@app.command()
def inspect(
    run: Run,
    statistic: Annotated[
        str | None, typer.Argument(metavar="STATISTIC", help="One of `normlab list stats`, or spikes.")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure the probe statistics, such as curvature, on the run's checkpoints.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every step and layer.")] = False,
    trust: Trust = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Print the statistics measured in a run.

    Prints statistics of activations, gradients, norms and updates, by layer and step.
    """
    from normlab.report import inspect as statistics
    from normlab.report.tables import render
    from normlab.store.query import resolve_run
    from normlab.store.record import RunRecord

    folder = resolve_run(run, results_dir)
    statistics.check_statistic(statistic, probe=probe)
    if trust and not probe:
        raise ConfigError("--trust: has no effect without --probe, since only --probe builds the model; leave it out")
    if not probe and (problem := RunRecord.read(folder).problem):
        warn(problem)
    if statistic == statistics.SPIKES:
        spikes = statistics.spike_rows(folder)
        return typer.echo(render(spikes, "json") if json else render(statistics.spike_table(spikes)))
    if probe:
        from normlab.loaded_run import LoadedRun
        from normlab.probe_checkpoints import probe_checkpoints

        probed = list(probe_checkpoints(LoadedRun(folder, trust=trust), statistic))
        rows = statistics.rows_of(probed, statistic)
    else:
        rows = statistics.inspect(folder, statistic)
    if json:
        return typer.echo(render(rows, "json"))
    if statistic is None:
        typer.echo(render(statistics.overview_rows(rows)))
        if steps := statistics.overview_steps(rows):
            typer.echo(steps)
        command = f"normlab inspect RUN STATISTIC{' --probe' if probe else ''}"
        return typer.echo(f"{command} prints one statistic by layer and step; normlab list stats lists the statistics")
    typer.echo(statistics.heading(statistic))
    typer.echo(render(statistics.table_rows(rows)))
    for note in statistics.notes(rows):
        typer.echo(note)
    if more := statistics.left_out(rows):
        typer.echo(more)
