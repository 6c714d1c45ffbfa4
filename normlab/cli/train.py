"""`normlab train` and `normlab sweep`."""

from __future__ import annotations

import os
import shlex
import signal
from typing import TYPE_CHECKING, Annotated

from typer import Option

from normlab.base.errors import ConfigError, warn
from normlab.cli.app import (
    Cfg,
    ConfigDir,
    ConfigName,
    DryRun,
    OnDevice,
    Overrides,
    RetryFailed,
    app,
    echo,
    read_arguments,
    replace_interrupt_handler,
    show_progress,
    warn_of_replaced,
)

if TYPE_CHECKING:
    from normlab.config.schema import RunConfig
    from normlab.config.sweep_options import SweepOptions
    from normlab.sweeps.plan import PlannedSweep
    from normlab.training.machine import RuntimeSettings

ResultsOverride = Annotated[
    str | None, Option("--results-dir", metavar="FOLDER", help="Folder of the results: results_dir=FOLDER.")
]

Extend = Annotated[bool, Option("--extend", help="Add runs to the sweep of sweep.name: seeds, rates, arms.")]
Measure = Annotated[bool, Option("--measure", help="As --dry-run, and time a few steps for the cost.")]
Effect = Annotated[
    float | None, Option(metavar="LOSS", help="As --dry-run, and print the seeds that find this difference of losses.")
]
Power = Annotated[
    float | None,
    Option(metavar="SHARE", help="With --effect: the probability to find the difference; by default 0.8."),
]


@app.command()
def train(
    overrides: Overrides = None,
    multirun: Annotated[bool, Option("--multirun", "-m", help="Train a grid, as `normlab sweep` does.")] = False,
    cfg: Cfg = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "train",
    results_dir: ResultsOverride = None,
) -> int:
    """Train a run, or resume it.

    The same command resumes an interrupted run. Overrides have Hydra's grammar: --cfg job prints every option with its
    value, --cfg optim how each parameter is updated, and `normlab list norms` (placements, models, data, optim, init,
    options) describes the choices.

    Example: normlab train norm=rmsnorm placement=pre model.depth=8
    """
    if multirun:
        return sweep(overrides, cfg=cfg, config_dir=config_dir, config_name=config_name, results_dir=results_dir)
    from normlab.config.compose import compose_run
    from normlab.training.machine import check_run

    texts, configs = read_arguments(with_folder(overrides, results_dir), cfg, config_dir, config_name)
    warn_of_replaced(texts)  # before errors, which it may explain
    config = compose_run(texts, configs)
    return train_one(config, check_run(config))


def train_one(config: RunConfig, settings: RuntimeSettings) -> int:
    """Train one run, print its outcome, and return the exit code."""
    from normlab.store.outcome import final_losses, format_loss
    from normlab.store.record import RunRecord
    from normlab.system.process_memory import freeze_imported
    from normlab.tracking.background import wait_for_followers
    from normlab.training.signals import interruptible_start
    from normlab.training.start import train

    freeze_imported()
    replace_interrupt_handler(signal.SIG_DFL, signal.default_int_handler)  # training handles signals itself
    try:
        with interruptible_start():
            result = train(config, settings=settings, ends_process=True)
        record = RunRecord.load(result.folder)
        if result.already_ended:
            name = record.outcome or result.state
            ending = f"{name} at step {record.status.step}"
            loss, _ = final_losses(name, record.status.val_loss)
            if loss is not None:
                ending += f", validation loss {format_loss(loss)}"
            echo(f"{ending}: nothing to do (run.fresh=true starts another run)")
        divergence = record.status.diverged
        if divergence is not None:
            echo(f"diverged at step {divergence.step}: {divergence}")
        if result.state == "interrupted":
            echo(f"interrupted at step {record.status.step}: the same command resumes it")
        echo(os.path.relpath(result.folder.path))
    finally:
        # Also after an error or a signal: the followers send what the run has recorded so far.
        wait_for_followers()
    return 128 + result.signal if result.signal else 0


@app.command()
def sweep(
    overrides: Overrides = None,
    dry_run: DryRun = False,
    retry_failed: RetryFailed = False,
    extend: Extend = False,
    cfg: Cfg = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "train",
    results_dir: ResultsOverride = None,
    measure: Measure = False,
    effect: Effect = None,
    power: Power = None,
    on: OnDevice = None,
) -> int:
    """Train a grid of runs, or resume it.

    The same command resumes the sweep; with more values and --extend it adds runs. Exit code 1 if a run failed; a
    diverged run has not failed.

    Arms are named sets of overrides, which multiply with the grid and are compared by name: 'arm=[pre: placement=pre,
    peri: placement=peri init=gpt2]'.

    A searched option, 'optim.lr=search(1e-4,1e-1)', has sweep.trials trials in each cell, with a seed of their own, in
    the sweep NAME-search; then the seeds of the command are trained with each cell's best values. With
    'seed=until(placement=pre,max=24)' seeds are added until each difference from this baseline is decided.

    Runs that differ only in numbers train stacked, in packs of up to sweep.pack runs; `normlab list auto` shows the
    default sizes and numbers of packs. `normlab list options` describes sweep.name, sweep.pack, sweep.jobs,
    sweep.timeout_minutes, sweep.on (local or slurm) and sweep.slurm.*. CUDA_VISIBLE_DEVICES=0,2 selects GPUs.

    Example: normlab sweep norm=rmsnorm,dyt 'seed=range(3)'
    """
    from normlab.config.compose import PACKAGED
    from normlab.sweeps.search import Search, reason_search_stops
    from normlab.tracking.background import report_uploads

    if power is not None and effect is None:
        raise ConfigError(f"--power {power:g}: has no effect without --effect; add --effect 0.02")
    if on is not None:
        from normlab.sweeps.named_devices import named_device

        named_device(on)  # an unknown one is an error before the plan
    texts, configs = read_arguments(with_folder(overrides, results_dir), cfg, config_dir, config_name)
    # A primary config of the user may vary options itself.
    if configs == PACKAGED and all(text.startswith(("sweep.", "results_dir=")) for text in texts):
        raise ConfigError("sweep: varies no option; give one several values, such as norm=rmsnorm,layernorm seed=0,1")
    warn_of_replaced(texts)  # before errors, which it may explain
    code = 0
    # After a search, the plan of the seeds depends on the results of the trials, so that plans come one by one.
    search = Search(texts, configs, show_progress, extend=extend)
    while planned := search.next_plan():
        is_plan_only = dry_run or measure or effect is not None or on is not None
        print_plan(planned, planned.options, with_packs=is_plan_only, measure=measure, on=on, retry_failed=retry_failed)
        _print_needed_seeds(planned, effect, power)
        if is_plan_only:
            return 0
        code = train_planned(planned, planned.options, retry_failed=retry_failed)
        report_uploads(planned.folder, planned.plan)
        if code == 1:  # a pack has failed, and there was no signal
            retry = _retry_command(texts, config_dir, config_name, extend=extend)
            reason = reason_search_stops(planned.plan, retry)
            if reason:
                echo(reason)
        if code:
            return code
    return code


def _print_needed_seeds(planned: PlannedSweep, effect: float | None, power: float | None) -> None:
    """Print how many seeds find an effect, if one is given."""
    from normlab.sweeps.needed_seeds import needed_seeds_lines

    if effect is None:
        return
    identities = [run.config.identity() for run in planned.resolved.values()]
    for line in needed_seeds_lines(identities, planned.results_dir, effect, 0.8 if power is None else power):
        echo(line)


def with_folder(overrides: list[str] | None, results_dir: str | None) -> list[str]:
    """Return the overrides with the folder of --results-dir, which may have any characters."""
    if results_dir is None:
        return list(overrides or ())
    from normlab.config.compose import quote

    return [*(overrides or ()), f"results_dir={quote(results_dir)}"]


def _retry_command(texts: list[str], config_dir: str | None, config_name: str, *, extend: bool) -> str:
    """Return the command that repeats a sweep and trains its failed runs again."""
    command = ["normlab", "sweep", *texts]
    if config_dir is not None:
        command += ["--config-dir", config_dir]
    if config_name != "train":
        command += ["--config-name", config_name]
    if extend:
        command.append("--extend")
    return shlex.join([*command, "--retry-failed"])


def print_plan(
    planned: PlannedSweep,
    options: SweepOptions,
    *,
    with_packs: bool,
    measure: bool = False,
    on: str | None = None,
    retry_failed: bool = False,
) -> None:
    """Print the warnings of a plan, its packs and its cost.

    With `measure`, time a few steps of unknown packs; with `on`, estimate the time on a measured GPU.
    """
    from normlab.sweeps.cost import cost_of, recorded_packs
    from normlab.sweeps.files import failed_packs
    from normlab.sweeps.progress import plan_lines
    from normlab.sweeps.rehearsal import rehearse

    for warning in planned.warnings:
        warn(warning)
    measured = recorded_packs(planned.results_dir)
    if measure:
        measured |= rehearse(planned, measured)
    skipped = set[int]() if retry_failed else failed_packs(planned.folder).keys()
    cost = cost_of(planned, measured, skipped)
    for line in plan_lines(planned, options, cost, with_packs=with_packs, skipped=skipped):
        echo(line)
    if on is not None:
        from normlab.sweeps.named_devices import device_line

        echo(device_line(cost, on))


def train_planned(planned: PlannedSweep, options: SweepOptions, *, retry_failed: bool) -> int:
    """Train a planned sweep, print its result, and return the exit code."""
    from normlab.sweeps.progress import result_lines
    from normlab.sweeps.supervisor import supervise

    result = supervise(planned, options, retry_failed=retry_failed)
    for line in result_lines(result.plan, planned.folder, result.failed):
        echo(line)
    return result.code
