"""`normlab sync`."""

import signal
import sys
from typing import Annotated

from typer import Argument

from normlab.base.errors import ConfigError, warn
from normlab.cli.app import ResultsDir, app, echo, replace_interrupt_handler


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
    from normlab.store.files import check_links
    from normlab.store.query import select_runs
    from normlab.tracking.background import Task, start_follower
    from normlab.tracking.uploads import is_sending, may_have_login, upload_lines

    codes: list[int] = []
    # Ctrl-C, SIGTERM and the end of the terminal have to end the follower too.
    replace_interrupt_handler(signal.SIG_DFL, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    for name, selection in [(name, select_runs([name], results_dir)) for name in dict.fromkeys(runs)]:
        for record in selection.started:
            if record.problem:
                warn(f"{record.problem}; the run is not sent")
                codes.append(2)
        folders = [record.folder.path for record in selection.started if not record.problem]
        if not folders:
            continue
        for folder in folders:
            check_links(folder)
        if not may_have_login():
            raise ConfigError("no login at W&B; log in with `wandb login`")
        sweep = selection.home if selection.name else None
        follower = start_follower(Task(runs=folders, mode="online", sweep=sweep, until_end=False))
        try:
            codes.append(follower.wait())
        finally:
            follower.terminate()
        codes += [2 for run in folders if is_sending(run)]  # another process does, and may fail
        options = [] if results_dir == "results" else ["--results-dir", results_dir]
        for line in upload_lines(folders, [*options, name]):
            echo(line)
    if any(codes):
        sys.exit(2)
