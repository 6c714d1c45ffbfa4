"""`normlab sweep`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from normlab.cli.app import (
    OVERRIDES,
    Cfg,
    ConfigDir,
    ConfigName,
    ResultsOverride,
    app,
    echo,
    overrides_argument,
    read_arguments,
    show_progress,
)
from normlab.errors import warn
from normlab.version import __version__

if TYPE_CHECKING:
    from normlab.report.compare.write import ComparePage


@app.command(context_settings=OVERRIDES)
def sweep(
    overrides: Annotated[list[str] | None, overrides_argument("A grid: norm=rmsnorm,dyt 'seed=range(3)'")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan without training.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Train failed runs again.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page of compare on this machine while the runs train.")
    ] = False,
    cfg: Cfg = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "train",
    results_dir: ResultsOverride = None,
) -> int:
    """Train a grid of runs, or resume it.

    The same command resumes the sweep. Exit code 1 if a run failed; a diverged run has not failed.

    Runs that differ only in numbers train stacked, in packs of up to sweep.pack runs. `normlab list auto` shows
    the default sizes and numbers of packs. The bits of a run depend on its threads and on the size and members
    of its pack, which the plan and the run record.

    A process trains packs one after another; the results do not depend on that. It is replaced if it fails.

    On a CPU, models up to width 128 train in as many packs at once as there are cores; wider models train in one pack
    at a time, which uses all cores. sweep.jobs sets another number of packs. The plan prints packs and threads.

    On GPUs each pack has one GPU: that with the fewest packs. A GPU that fails is taken out of the sweep.

    Options of a sweep: sweep.name, sweep.pack (a number, auto or off), sweep.jobs (packs at the same time, on each GPU
    if there are GPUs), sweep.gpus (all or 0,2,5), sweep.timeout_minutes, sweep.on (local or slurm) and sweep.slurm.*.

    Example: normlab sweep norm=rmsnorm,dyt 'seed=range(3)'
    """
    from normlab.config.compose import compose_sweep
    from normlab.sweeps.plan import make_plan
    from normlab.sweeps.progress import ProgressDisplay, plan_lines, result_lines
    from normlab.sweeps.supervisor import supervise
    from normlab.tracking.background import report_uploads

    texts, configs = read_arguments(overrides, cfg, config_dir, config_name, results_dir)
    options, runs = compose_sweep(texts, show_progress, configs)
    planned = make_plan(options, runs, show_progress)
    for warning in planned.warnings:
        warn(warning)
    plan, folder = planned.plan, planned.folder
    for line in plan_lines(planned, options, with_packs=dry_run):
        echo(line)
    if dry_run:
        return 0
    page: ComparePage | None = None
    with ExitStack() as stack:
        if watch:
            from normlab.report.compare.watch import serve
            from normlab.report.compare.write import ComparePage

            page = ComparePage(names=[str(folder)], version=__version__)
            echo(f"live    {stack.enter_context(serve(page))} (until the sweep ends)")
        result = supervise(folder, plan, options, ProgressDisplay(folder), planned.gpus, retry_failed=retry_failed)
    for line in result_lines(result.plan, folder, result.failed):
        echo(line)
    if page is not None and page.select(must_have_started=False).started:
        echo(str(page.write()[1]))
    report_uploads(folder, result.plan)
    return result.code
