"""The functions of `import normlab`, for scripts and notebooks. They do what the commands of the same names do.

Their arguments are the options of these commands, which `normlab COMMAND --help` describes. A list of names may also be
a text with commas.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from normlab.analysis.table import summarize_by
from normlab.base.errors import ConfigError, NormlabError, warn
from normlab.loaded.run import LoadedRun, load
from normlab.report.cells_table import json_rows
from normlab.report.runs_table import comparability_warnings
from normlab.report.runs_table import summarize as rows_of_runs
from normlab.store.query import Folder, select_runs

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Names = str | Sequence[str]


def train(*overrides: str) -> LoadedRun:
    """Train a run, or resume it, and return it: `normlab.train("norm=rmsnorm", "model.depth=8")`.

    Raises:
        ConfigError, DataError, StoreError: The message says what to do.
    """
    from normlab.config.compose import compose_run
    from normlab.tracking.background import wait_for_followers
    from normlab.training.machine import check_run
    from normlab.training.start import train as train_config

    config = compose_run(_texts(overrides))
    settings = check_run(config)
    # Also after an error, so that the user learns what W&B has received.
    try:
        return load(train_config(config, settings=settings).folder.path, trust=True)
    finally:
        wait_for_followers()


def sweep(*overrides: str, retry_failed: bool = False, extend: bool = False) -> pd.DataFrame:
    """Train a grid of runs, or resume it, and return its `runs`: `normlab.sweep("norm=rmsnorm,dyt", "seed=range(3)")`.

    Raises:
        ConfigError, DataError, StoreError: The message says what to do.
        NormlabError: A pack failed or was stopped.
    """
    from normlab.sweeps.progress import result_lines
    from normlab.sweeps.search import Search, reason_search_stops
    from normlab.sweeps.supervisor import supervise
    from normlab.tracking.background import report_uploads

    folder = Path()
    search = Search(_texts(overrides), extend=extend)
    while planned := search.next_plan():
        for warning in planned.warnings:
            warn(warning)
        folder = planned.folder
        result = supervise(planned, planned.options, retry_failed=retry_failed)
        report_uploads(folder, result.plan)
        # A search continues only with the losses of all trials, so the first failure ends the command.
        if result.code:
            lines = [*result_lines(result.plan, folder, result.failed)]
            reason = reason_search_stops(result.plan, "sweep(..., retry_failed=True)")
            if reason:
                lines.append(reason)
            raise NormlabError("; ".join(lines))
    return runs(folder)


def runs(
    path: Folder | Sequence[Folder] = "results", *, where: Names = (), results_dir: Folder = "results"
) -> pd.DataFrame:
    """Return a row for each run of sweeps or folders, with its folder and a column for each option that differs.

    Raises:
        ConfigError: A condition is invalid, or no run meets it.
        StoreError: There is no run.
    """
    import pandas as pd

    selection, conditions = select_runs(path, results_dir), _several(where)
    for warning in comparability_warnings(selection, conditions):
        warn(warning)
    return pd.DataFrame(rows_of_runs(selection, conditions))


def statistics(
    path: Folder | Sequence[Folder], name: str, *, where: Names = (), results_dir: Folder = "results"
) -> pd.DataFrame:
    """Return one statistic of all runs of sweeps or folders as a long table: `statistics("first", "resid_rms")`.

    The columns: `id` (of the run), each option in which the runs differ (`norm`, `model.depth`, `optim.lr`, ...),
    `site` (such as `attn`; empty for a statistic of no site), `step`, `layer` (0 the embeddings, L + 1 the head; not
    for a statistic of the whole model), and the statistic. Only the files of this statistic are read. Runs without it
    are left out, with a warning on stderr.

    Raises:
        ConfigError: The statistic is unknown, or a condition is invalid or met by no run.
        StatisticsError, StoreError: There is no run, or none has the statistic.
    """
    import pandas as pd

    from normlab.report.statistics_of_runs import statistics_of_runs

    columns, problems = statistics_of_runs(path, name, _several(where), results_dir)
    for problem in problems:
        warn(problem)
    return pd.DataFrame(columns).infer_objects()


def summarize(
    path: Folder | Sequence[Folder],
    *,
    by: Names | None = None,
    against: str | None = None,
    where: Names = (),
    test: str | None = None,
    over: Names = (),
    results_dir: Folder = "results",
) -> pd.DataFrame:
    """Return a row for each cell, or for each contrast of a test; the columns are the keys of `--format json`.

    Raises:
        ConfigError: An option, a condition, the baseline or the test is unknown.
        StoreError: There is no run with a readable record.
    """
    import pandas as pd

    names = None if by is None else _several(by)
    table = summarize_by(path, names, against=against, where=_several(where), results_dir=results_dir)
    for warning in [*table.table_warnings, *table.resolved_differences]:
        warn(warning)
    if test is None:
        return pd.DataFrame(json_rows(table))
    from normlab.analysis.factor_tests.run import run_test

    return pd.DataFrame(run_test(test, table.cells, table.factors, over=_several(over), against=against))


def figure(
    kind: str,
    path: Folder | Sequence[Folder],
    output: Folder | None = None,
    *,
    x: str | None = None,
    color: str | None = None,
    style: str | None = None,
    panel: Names | None = None,
    by: Names | None = None,
    where: Names = (),
    statistic: str | None = None,
    at: str = "last",
    columns: int = 2,
    results_dir: Folder = "results",
) -> Figure:
    """Return a figure of a sweep, or of several, and write it to `output` if given.

    The kind is loss, lr, factor, layers or scaling.

    Raises:
        ConfigError: The kind, an option or a condition is unknown, or a factor has no channel.
        NormlabError: There is nothing to draw, or the file cannot be written.
    """
    from normlab.report.figure_data import make_figure
    from normlab.report.figure_draw import draw, write_figure

    names = None if by is None else _several(by)
    table = summarize_by(path, names, where=_several(where), results_dir=results_dir)
    for warning in [*table.warnings, *table.resolved_differences]:
        warn(warning)
    panels = None if panel is None else _several(panel)
    data = make_figure(kind, table, x=x, color=color, style=style, panel=panels, statistic=statistic, moment=at)
    if output is not None:
        write_figure(data, Path(output), columns)
    return draw(data, columns)


def _texts(overrides: Sequence[object]) -> list[str]:
    texts: list[str] = []
    for override in overrides:
        if not isinstance(override, str):
            raise ConfigError(
                f"{override!r:.60}: is not a text; write one for each override, as 'norm=rmsnorm', 'seed=1'"
            )
        texts.append(override)
    return texts


def _several(names: Names) -> list[str]:
    if isinstance(names, str):
        return [name.strip() for name in names.split(",")]
    return list(names)
