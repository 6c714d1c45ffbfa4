"""`normlab rm` and `normlab rename`."""

import os
import sys
from typing import Annotated

import typer
from typer import Argument, Option

from normlab.base.errors import ConfigError, counted
from normlab.cli.app import ResultsDir, app, echo

Names = Annotated[list[str], Argument(metavar="SWEEP|RUN", help="Sweeps or runs, by folder, name or id.")]
Checkpoints = Annotated[
    bool, Option("--checkpoints", help="Keep the runs, and delete the optimiser's state and older checkpoints.")
]


@app.command()
def rm(
    names: Names,
    checkpoints: Checkpoints = False,
    yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False,
    results_dir: ResultsDir = "results",
) -> int:
    """Delete runs, or sweeps with their runs and searches.

    It lists what it deletes, and asks. A run that another sweep uses is not deleted. If it is killed, the same command
    deletes what is left.

    With --checkpoints, completed runs keep the weights of their newest checkpoint: sample, eval and export still work,
    but train.start_from=RUN does not.

    Example: normlab rm first --checkpoints
    """
    from normlab.config.memory import format_size
    from normlab.store.files import size_of
    from normlab.store.plans import SEARCH, has_plan
    from normlab.sweeps.removal import plan_removal

    removal = plan_removal(names, results_dir, checkpoints)
    part = "checkpoints" if checkpoints else ""  # of a run's folder; empty: all of it
    for problem in removal.missing:
        echo(f"already deleted, or never there: {problem}")
    folders = [*(run.path for run in removal.runs), *removal.sweeps]
    for folder in folders:
        echo(f"{format_size(size_of(folder / part)):>10}  {os.path.relpath(folder)}")
    for run_id, reason in removal.kept.items():
        echo(f"run {run_id} stays as it is: {reason}")
    # A search belongs to the sweep of the same name, which may stay.
    for folder in removal.sweeps:
        judged = folder.with_name(folder.name.removesuffix(SEARCH))
        if has_plan(judged) and judged not in removal.sweeps:
            echo(f"sweep {judged.name} stays: its values are those that this search found")
    if not folders:
        return 0
    before = sum(map(size_of, folders))
    what = counted(len(removal.runs), "run")
    if removal.sweeps:
        what += f" and {counted(len(removal.sweeps), 'sweep')}"
    if checkpoints:
        what = f"all checkpoints of {what} but the newest weights"
    # A script has nobody to answer the question.
    if not (yes or sys.stdin.isatty()):
        raise ConfigError(f"no terminal to ask: add --yes to delete {what}")
    if not (yes or typer.confirm(f"Delete {what}?")):
        echo("nothing is deleted")
        return 1
    if checkpoints:
        from normlab.training.checkpoint import drop_optimizer

        removal.execute(lambda run: drop_optimizer(run.path))
    else:
        removal.execute()
    echo(f"deleted {format_size(before - sum(map(size_of, folders)))}")
    return 0


@app.command()
def rename(
    sweep: Annotated[str, Argument(metavar="SWEEP", help="A sweep, by folder or name.")],
    new: Annotated[str, Argument(metavar="NEW", help="Its new name.")],
    results_dir: ResultsDir = "results",
) -> None:
    """Rename a sweep.

    Its command resumes it with sweep.name=NEW. The name of a run is part of its record, and stays. Write the page again
    with `normlab compare NEW`; W&B keeps the old group.

    Example: normlab rename norm-1f0c22aa norms
    """
    from normlab.sweeps.removal import rename_sweep

    echo(os.path.relpath(rename_sweep(sweep, new, results_dir)))
