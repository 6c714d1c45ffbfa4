"""`normlab share` and `normlab open`."""

from typing import Annotated

from typer import Argument, Option

from normlab.cli.app import ResultsDir, app, echo

MOST_PATHS = 5


@app.command()
def share(
    names: Annotated[list[str], Argument(metavar="SWEEP|RUN", help="Sweeps or runs, by folder, name or id.")],
    output: Annotated[str, Option("--output", "-o", metavar="FILE", help="The new zip file.")],
    checkpoints: Annotated[bool, Option("--checkpoints", help="Add the checkpoints.")] = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Write the records of sweeps and runs as a zip file.

    `normlab open` unpacks it. It holds run.json, status, metrics, statistics, tokenizer, plugins, and the plan of each
    sweep and of its search. Pages are not in it: `normlab compare` writes them from the records. A warning lists the
    absolute paths in it, as of data.path: they may have names of users.

    Example: normlab share first -o first.zip
    """
    from pathlib import Path

    from normlab.base.errors import warn
    from normlab.store.archive import absolute_paths, damage_of, write_archive
    from normlab.store.query import find_folders

    folders = list(find_folders(names, results_dir))
    write_archive(Path(output), folders, checkpoints=checkpoints)
    # A reader of the zip file will find the same damage, and has no other copy.
    for _, runs in folders:
        for run in runs:
            for problem in damage_of(run):
                warn(problem)
    paths = absolute_paths(Path(output))
    if paths:
        listed = ", ".join(paths[:MOST_PATHS])
        if len(paths) > MOST_PATHS:
            listed += f", and {len(paths) - MOST_PATHS} more"
        warn(f"-o {output}: has the names of folders of this machine, {listed}")
    echo(output)


@app.command("open")
def open_archive(
    file: Annotated[str, Argument(metavar="FILE", help="A zip file of `normlab share`.")],
    output: Annotated[
        str | None, Option("--output", "-o", metavar="FOLDER", help="The new folder. Default: FILE without .zip.")
    ] = None,
) -> None:
    """Unpack a zip file of `normlab share` into a new results folder. Nothing in it is executed.

    Example: normlab open first.zip, then normlab summarize first --results-dir first
    """
    import shlex
    from pathlib import Path

    from normlab.store.archive import unpack_archive

    folder = Path(Path(file).stem if output is None else output)
    sweeps = unpack_archive(Path(file), folder)
    for sweep in sweeps:
        echo(f"normlab summarize {shlex.quote(sweep)} --results-dir {shlex.quote(str(folder))}")
    if not sweeps:
        echo(f"normlab summarize {shlex.quote(str(folder))}")
