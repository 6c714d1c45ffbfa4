"""The results of the cells of a sweep: typed, not rounded, without text.

With a baseline (`against`) each cell has the difference between its loss and the baseline's, paired by seed and data
order. A pair is one run of each cell with the same seeds. The difference of a pair is infinite if one run diverged, and
0 if both diverged. Runs without an outcome form no pair.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from normlab.analysis.baselines import baseline_levels
from normlab.analysis.best import compare_with_baselines
from normlab.analysis.cell_differences import resolved_differences, table_warnings
from normlab.analysis.cells import Cell, Target, group_cells, reason_cells_not_comparable, runs_of
from normlab.analysis.comparability import differences, intact_runs
from normlab.analysis.conditions import select_where
from normlab.analysis.factors import DEFAULT_OPTIONS, Factor, distinguishing_options, factors_of
from normlab.analysis.phrases import name_some
from normlab.analysis.settings import arm_conflict, resolve_options
from normlab.base.errors import ConfigError, StoreError
from normlab.store.query import Folder, Selection, select_runs
from normlab.store.record import RunRecord
from normlab.store.series import Evaluation, evaluations


@dataclass(frozen=True, slots=True)
class CellsTable:
    by: Sequence[str]
    cells: Sequence[Cell] = ()
    table_warnings: Sequence[str] = ()
    among: Sequence[RunRecord] = ()
    """All runs, of which conditions select those of the cells."""
    has_baseline: bool = False

    @property
    def factors(self) -> list[Factor]:
        return factors_of(runs_of(self.cells), self.by, self.among)

    @property
    def resolved_differences(self) -> list[str]:
        """At most one line: the resolved settings in which the cells differ."""
        return resolved_differences(self.cells)

    @property
    def warnings(self) -> list[str]:
        """All warnings; equal warnings of several cells are one line that names the cells.

        A warning is printed after one or more names of cells, so it must read well after both.
        """
        cells_of: dict[str, list[str]] = {}
        for cell in self.cells:
            for warning in cell.warnings:
                cells_of.setdefault(warning, []).append(cell.label)
        lines = list(self.table_warnings)
        for warning, names in cells_of.items():
            subject = name_some(names)
            if len(names) == len(self.cells) > 1:
                subject = "every cell"
            lines.append(f"{subject}: {warning}")
        return lines


def summarize_by(
    path: Folder | Sequence[Folder] | Selection,
    by: Sequence[str] | None = None,
    *,
    where: Sequence[str] = (),
    results_dir: Folder = "results",
    **options: Any,
) -> CellsTable:
    """Return the table of cells of results folders, `runs` folders, runs or sweeps, of all together.

    Args:
        path: A folder, or the name of a sweep or a run, or several, as for `query.select_runs`; or the selected runs.
        by: The options that define cells; by default those in which the runs differ.
        where: Conditions that the runs must meet.
        results_dir: The folder in which names are looked up.
        options: Of `build_table`.

    Raises:
        ConfigError: An option of `by`, a condition or the baseline is unknown. Or `by` is None
            and a run has two arms.
        StoreError: There is no run with a readable record.
    """
    selection = path
    if not isinstance(selection, Selection):
        selection = select_runs(selection, results_dir)
    results, warnings = intact_runs(selection.records)
    if not results:
        raise StoreError(
            f"{selection.home}: no run has a readable record; with --runs, summarize lists each reason; the first: "
            f"{warnings[-1]}"
        )
    # Before the conditions, because an unknown option is the user's first error.
    if by is not None:
        by = cell_options(by, results)
    selected = select_where(results, where)
    if by is None:
        by = cell_options(None, selected)
    return build_table(selected, by, warnings=warnings, among=results, **options)


def cell_options(by: Sequence[str] | None, results: Sequence[RunRecord]) -> list[str]:
    """Return the full names of the options of `--by`; for None, the options in which the runs differ.

    Raises:
        ConfigError: The list is empty or has a duplicate, or no run has an option. Or the options are not given, and
            a run has two arms.
    """
    if by is None:
        options = distinguishing_options(results) or list(DEFAULT_OPTIONS)
        conflict = arm_conflict(results)
        if conflict:
            raise ConfigError(
                f"{conflict.text}; group the runs by options: `{conflict.command} --by {','.join(options)}`"
            )
        return options
    options = list(by)
    if all(by) and results:
        options = resolve_options(by, results, "--by")
    if not all(by) or not by or len(set(options)) < len(by):
        raise ConfigError(f"--by {','.join(by)}: name at least one option, each once, such as norm,placement")
    return options


def build_table(
    results: Sequence[RunRecord],
    by: Sequence[str],
    *,
    against: str | None = None,
    target: float | None = None,
    warnings: Sequence[str] = (),
    among: Sequence[RunRecord] = (),
) -> CellsTable:
    """Return the table of cells of some runs, selected from `among`; errors as for `summarize_by`.

    `by` has the full names of the options; `against` is the baseline, such as `norm=layernorm`. With `target`, a
    validation loss, the results have the steps and seconds to reach it. `warnings` come before those about the table.
    """
    cells = group_cells(results, by)
    warnings = [*warnings, *table_warnings(cells, by)]
    if target is not None:
        if not (math.isfinite(target) and target > 0):
            raise ConfigError(f"--target {target:g}: must be a finite loss above 0, in nats/token")
        cells = [_with_target(cell, target) for cell in cells]
    if against is not None:
        cells = _with_baselines(cells, by, against)
    return CellsTable(by, cells, warnings, among, has_baseline=against is not None)


def _with_target(cell: Cell, loss: float) -> Cell:
    """Return the cell with how its runs at the best learning rate reached a validation loss.

    A run whose metrics changed after it finished is left out, with a warning.
    """
    notes: list[str] = []
    runs = 0
    reached: list[Evaluation] = []
    for run in cell.runs_at(cell.best_lr):
        try:
            measured = evaluations(run.folder)
        except StoreError as error:
            notes.append(f"{error}; the run is left out of the steps to {loss:g}")
            continue
        runs += 1
        for evaluation in measured:
            if evaluation.loss <= loss:
                reached.append(evaluation)
                break
    return replace(cell, target=Target(loss, runs, reached), notes=notes)


# Comparison with a baseline


def _with_baselines(cells: Sequence[Cell], by: Sequence[str], against: str) -> list[Cell]:
    """Return the cells with their comparisons with the baseline, corrected for all comparisons.

    The baseline of a cell is the cell with the values of `against` and equal other options; a baseline has none.

    Raises:
        ConfigError: An option is not in `by`, or no cell has such a value.
    """
    levels = baseline_levels(cells, by, against)
    by_key = {cell.key: cell for cell in cells}
    matches: list[Cell | None] = []
    for cell in cells:
        levels_of_match = cell.levels | levels
        matches.append(by_key.get(tuple(levels_of_match.values())))
    if not any(matches):
        raise ConfigError(f"--against {against}: no cell has all of these values; give fewer options")
    # A baseline matches itself, and a difference of a cell from itself is no test.
    baselines: list[Cell | None] = []
    for cell, match in zip(cells, matches, strict=True):
        baselines.append(None if match is cell else match)
    if all(match is cell for cell, match in zip(cells, matches, strict=True)):
        raise ConfigError(f"--against {against}: every cell is a baseline; name a value of an option that varies")
    comparisons = compare_with_baselines(cells, baselines)
    compared: list[Cell] = []
    for cell, match, baseline, comparison in zip(cells, matches, baselines, comparisons, strict=True):
        notes = list(cell.notes)
        if baseline is not None:
            notes += _comparison_warnings(cell, baseline)
        if match is None:
            notes.append(f"without a baseline, because no cell with {against} matches in the other options")
        compared.append(replace(cell, baseline=baseline, comparison=comparison, notes=notes))
    return compared


def _comparison_warnings(cell: Cell, baseline: Cell) -> list[str]:
    """Return the reasons why the comparison of a cell with its baseline is unreliable."""
    reason = reason_cells_not_comparable([cell, baseline])
    if reason:
        return [f"not compared with the baseline, because {reason}"]
    warnings: list[str] = []
    # A seed that one of the two lacks forms no pair, so that the comparison is of fewer seeds than the cells have.
    unpaired = set(cell.final.losses) ^ set(baseline.final.losses)
    if cell.losses and baseline.losses and unpaired:
        warnings.append(f"seeds with a result only in the cell or only in its baseline: {len(unpaired)}")
    intended: list[str] = []
    for option, level in cell.levels.items():
        if level != baseline.levels[option]:
            intended.append(option)
    different = list(map(str, differences([*cell.runs, *baseline.runs], intended)))
    if different:
        warnings.append(f"cell and baseline also differ in {'; '.join(different)}")
    return warnings
