"""One statistic of several runs, as the columns of a long table."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from normlab.analysis.comparability import intact_runs
from normlab.analysis.conditions import select_where
from normlab.analysis.factors import varying_options
from normlab.analysis.settings import setting
from normlab.base.errors import StatisticsError, StoreError, counted
from normlab.report.histories import History, history, read_statistics
from normlab.store.query import Folder, select_runs
from normlab.store.record import RunRecord


def statistics_of_runs(
    path: Folder | Sequence[Folder], name: str, where: Sequence[str], results_dir: Folder
) -> tuple[dict[str, Any], list[str]]:
    """Return the columns of a table with a row for each value of a statistic, and the problems of the runs.

    The columns: `id`, each option in which the runs differ, `site` (empty for a statistic of no site), `step`, `layer`
    (not for a statistic of the whole model), and the statistic.

    Raises:
        ConfigError: The statistic is unknown, or a condition is invalid or met by no run.
        StoreError, StatisticsError: There is no run, or none has the statistic.
    """
    runs, problems = intact_runs(select_where(select_runs(path, results_dir).started, where))
    options = varying_options(runs)
    measured: list[tuple[RunRecord, History]] = []
    missing: list[StoreError | StatisticsError] = []
    for run in runs:
        try:
            profiles = read_statistics(run.folder, problems, name)
            for part in history(profiles, name):
                measured.append((run, part))
        except (StoreError, StatisticsError) as error:
            missing.append(error)
    if not measured:
        if missing:
            raise missing[0]
        raise StoreError(f"{name}: none of {counted(len(problems), 'run')} has an intact record: {problems[0]}")
    if missing:
        problems.append(f"{name}: {len(missing)} of {len(runs)} runs have no values and are left out: {missing[0]}")
    parts: dict[str, list[Any]] = {column: [] for column in ("id", *options, "site", "step", "layer", name)}
    for run, part in measured:
        # A statistic of the whole model has no axis of layers.
        has_layers = part.values.ndim == 2
        values = part.values[:, None]
        if has_layers:
            values = part.values[:, part.layers]
        steps, layers = values.shape
        parts["id"].append(np.full(values.size, run.run_id, dtype=object))
        # Objects, so that the column of all runs keeps numbers, names and None.
        for option in options:
            column = np.empty(values.size, dtype=object)
            column[:] = setting(run, option)
            parts[option].append(column)
        parts["site"].append(np.full(values.size, part.site, dtype=object))
        parts["step"].append(np.repeat(part.steps, layers))
        if has_layers:
            parts["layer"].append(np.tile(part.layers, steps))
        parts[name].append(values.ravel())
    if not parts["layer"]:
        del parts["layer"]
    return {column: np.concatenate(arrays) for column, arrays in parts.items()}, problems
