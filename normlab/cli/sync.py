"""`normlab sync`."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from normlab.base.errors import ConfigError, StoreError, warn
from normlab.cli.app import ResultsDir, app, echo, replace_interrupt_handler

if TYPE_CHECKING:
    from normlab.store.query import Selection


@app.command()
def sync(
    runs: Annotated[
        list[str], Argument(metavar="SWEEP|RUN...", help="Sweeps, runs or results folders, by folder, name or id.")
    ],
    results_dir: ResultsDir = "results",
) -> None:
    """Send runs to W&B from their records.

    It sends only what W&B lacks: no step twice, also if a resumed run has trained the step again. The group of a run is
    its sweep (of several sweeps, the one that was sent last), its name and its tags are the overrides that vary in the
    sweep. Exit code 2 if W&B does not have everything.

    Example: normlab sync first
    """
    from normlab.store.query import select_runs
    from normlab.tracking.background import FollowerTask, start_follower
    from normlab.tracking.uploads import is_sending, is_sent, may_have_login, upload_lines

    _end_on_signals()
    selections = {name: select_runs([name], results_dir) for name in dict.fromkeys(runs)}
    # Everything that is wrong with the files comes before the login, which the user may have to ask for elsewhere.
    intact = {name: _intact_runs(selection) for name, selection in selections.items()}
    has_login = may_have_login()
    if not has_login and not all(is_sent(folder) for folders in intact.values() for folder in folders):
        raise ConfigError("no login at W&B; log in with `wandb login`")
    is_complete = not any(record.problem for selection in selections.values() for record in selection.started)
    for name, folders in intact.items():
        if not folders:
            continue
        # With a login the follower asks W&B also about a run that was sent: it may have been deleted there.
        if has_login:
            task = FollowerTask(runs=folders, mode="online", until_end=False)
            if selections[name].name:
                task = replace(task, sweep=selections[name].home)
            follower = start_follower(task)
            try:
                is_complete &= follower.wait() == 0
            finally:
                # The follower must not outlive this command, which a signal may end.
                follower.terminate()
        # Another process that sends a run may fail.
        is_complete &= not any(map(is_sending, folders))
        options = [] if results_dir == "results" else ["--results-dir", results_dir]
        for line in upload_lines(folders, [*options, name]):
            echo(line)
    if not is_complete:
        sys.exit(2)


def _end_on_signals() -> None:
    """Let Ctrl-C, SIGTERM and the end of the terminal end this process by an exception, which ends the follower too."""
    replace_interrupt_handler(signal.SIG_DFL, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


def _intact_runs(selection: Selection) -> list[Path]:
    """Return the folders of the runs whose records can be read; warn of the others, and of damaged files about W&B.

    Raises:
        StoreError: A folder has a symbolic link.
    """
    from normlab.store.files import check_links
    from normlab.tracking.uploads import Upload

    folders: list[Path] = []
    for record in selection.started:
        if record.problem:
            warn(f"{record.problem}; the run is not sent")
            continue
        folder = record.folder.path
        check_links(folder)
        try:
            Upload.load(folder)
        except StoreError as error:
            warn(error)
        folders.append(folder)
    return folders
