"""`normlab train`."""

from __future__ import annotations

import os
import signal
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
    replace_interrupt_handler,
)

if TYPE_CHECKING:
    from normlab.config.schema import RunConfig


@app.command(context_settings=OVERRIDES)
def train(
    overrides: Annotated[list[str] | None, overrides_argument("norm=rmsnorm placement=pre model.depth=8")] = None,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="Train each run of a grid, as `normlab sweep` does.")
    ] = False,
    cfg: Cfg = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "train",
    results_dir: ResultsOverride = None,
) -> int:
    """Train a run, or resume it.

    The same command resumes an interrupted run. Overrides have Hydra's grammar: --cfg job prints every option with its
    value, and `normlab list norms` (placements, models, data, optim, init, options) describes the choices.

    Example: normlab train norm=rmsnorm placement=pre model.depth=8
    """
    if multirun:
        from normlab.cli.sweep import sweep

        return sweep(overrides, cfg=cfg, config_dir=config_dir, config_name=config_name, results_dir=results_dir)
    from normlab.config.compose import compose_run
    from normlab.training.machine import check_machine

    config = compose_run(*read_arguments(overrides, cfg, config_dir, config_name, results_dir))
    check_machine(config)
    return train_one(config)


def train_one(config: RunConfig) -> int:
    """Train one run, print its outcome, and return the exit code."""
    from normlab.store.outcome import final_losses, format_loss
    from normlab.store.record import RunRecord
    from normlab.tracking.background import wait_for_followers
    from normlab.training.start import train

    replace_interrupt_handler(signal.SIG_DFL, signal.default_int_handler)  # `train` handles signals itself
    try:
        outcome = train(config, ends_process=True)
    except BaseException:
        wait_for_followers()
        raise
    record = RunRecord.load(outcome.folder)
    if outcome.already_ended:
        name = record.outcome or outcome.state
        loss, _ = final_losses(name, record.status.val_loss)
        ending = "" if loss is None else f", validation loss {format_loss(loss)}"
        echo(f"{name} at step {record.status.step}{ending}: nothing to do (run.fresh=true starts another run)")
    if (divergence := record.status.diverged) is not None:
        echo(f"diverged at step {divergence.step}: {divergence}")
    if outcome.state == "interrupted":
        echo(f"interrupted at step {record.status.step}: the same command resumes it")
    echo(os.path.relpath(outcome.folder.path))
    wait_for_followers()
    return 128 + outcome.signal if outcome.signal else 0
