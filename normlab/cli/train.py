"""`normlab train`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated

from normlab.cli.app import app, echo, overrides_argument, replace_interrupt_handler

if TYPE_CHECKING:
    from normlab.config.schema import RunConfig


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
def train(
    overrides: Annotated[list[str] | None, overrides_argument("norm=rmsnorm placement=pre model.depth=8")] = None,
) -> None:
    """Train a run, or resume it.

    The same command resumes an interrupted run. Every Hydra flag works: --help, --cfg job, --multirun.

    Example: normlab train norm=rmsnorm placement=pre model.depth=8
    """
    # Hydra prints through logging, which would report a closed pipe (`| head`).
    logging.raiseExceptions = False
    from normlab.config.hydra_flags import run_job
    from normlab.training.machine import check_machine

    run_job(overrides or [], train_one, check_machine)


def train_one(config: RunConfig) -> None:
    """Train one run and print its outcome; exit after a signal, to stop --multirun too."""
    from normlab.store.outcome import final_losses, format_loss
    from normlab.store.record import RunRecord
    from normlab.tracking.background import wait_for_followers
    from normlab.training.run import train

    replace_interrupt_handler(signal.SIG_DFL, signal.default_int_handler)  # `train` handles signals itself
    try:
        outcome = train(config, ends_process=True)
    except BaseException:
        wait_for_followers()
        raise
    record = RunRecord.read(outcome.folder)
    if outcome.already_ended:
        name = record.outcome or outcome.state
        loss, _ = final_losses(name, record.status.val_loss)
        ending = "" if loss is None else f", validation loss {format_loss(loss)}"
        echo(f"{name} at step {record.status.step}{ending}: nothing to do (run.fresh=true starts another run)")
    if outcome.state == "diverged":
        echo(f"diverged at step {record.status.diverged.step}: {record.status.diverged}")
    if outcome.state == "interrupted":
        echo(f"interrupted at step {record.status.step}: the same command resumes it")
    echo(os.path.relpath(outcome.folder.path))
    wait_for_followers()
    if outcome.signal:
        sys.exit(128 + outcome.signal)
