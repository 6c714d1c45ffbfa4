"""`normlab summarize --by norm,placement`: one row for each cell (see `groups`), with its numbers and warnings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from normlab.errors import ConfigError, StoreError
from normlab.report import against, cell_row
from normlab.report.compare.find import find_started
from normlab.report.groups import Cell, damaged_run_warnings, differences_between, group_cells
from normlab.report.learning_rates import shared_lr
from normlab.report.run_result import RunResult, read_result
from normlab.report.settings import LR, check_options
from normlab.report.where import match_runs, parse_conditions
from normlab.store.query import Entry
from normlab.store.reading import HOW_TO_FIX
from normlab.store.schema import RUN_FILE

Row = dict[str, Any]
NO_LR = f"its {RUN_FILE} names no learning rate; {HOW_TO_FIX[RUN_FILE]}"
BEST, SHARED = "", "shared_"
"""Prefixes of the keys of a cell's numbers at its best learning rate, and at the one that all cells share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of a report on cells."""

    where: Sequence[str] = ()
    """Conditions that the runs must meet."""
    against: str | None = None
    """The baseline: `norm=layernorm`."""
    lr: float | None = None
    """The shared learning rate; by default the one with the best mean rank."""
    target: float | None = None
    """A validation loss: the steps and seconds to it are read from the metrics."""
    spikes: bool = False
    """Whether to count spikes from the metrics of runs whose status has no count."""


@dataclass(frozen=True, slots=True)
class Report:
    """The cells with their numbers and warnings."""

    by: Sequence[str]
    rows: Sequence[Row]
    """One for each cell, all with the same keys: the options of `by`, the numbers, the warnings."""
    table_warnings: Sequence[str]
    """Warnings about the table as a whole."""
    cells: Sequence[Cell]
    """The cells, in the order of the rows."""

    @property
    def warnings(self) -> list[str]:
        """All warnings; one that several cells have names all of them."""
        cells_of: dict[str, list[str]] = {}
        for row in self.rows:
            for warning in row["warnings"]:
                cells_of.setdefault(warning, []).append(row["cell"])
        every = len(self.rows) if len(self.rows) > 1 else 0
        return [
            *self.table_warnings,
            *(
                f"{'every cell' if len(names) == every else ', '.join(names)}: {warning}"
                for warning, names in cells_of.items()
            ),
        ]


def summarize_by(
    path: str | os.PathLike[str],
    by: Sequence[str],
    options: Options | None = None,
    results_dir: str | os.PathLike[str] = "results",
) -> Report:
    """Report on the cells of a results folder, a `runs` folder, a run or a sweep, from the records alone.

    Raises:
        ConfigError: An option of `by`, a condition, the baseline or the learning rate is unknown.
        StoreError: There is no run, or none with a readable record.
    """
    check_by(by)
    entries, missing = find_started(path, results_dir)
    results, warnings = read_results(entries, missing)
    if not results:
        raise StoreError(f"{os.fspath(path)}: no run has a readable record; `normlab summarize` lists the reasons")
    check_options(by, [run.entry.run for run in results], "--by")
    return build_report(results, by, options, warnings)


def check_by(by: Sequence[str]) -> None:
    """Reject an empty list of options, and an option that is listed twice.

    Raises:
        ConfigError: The list is empty or has a duplicate.
    """
    if not all(by) or not by or len(set(by)) < len(by):
        raise ConfigError(f"--by {','.join(by)}: give one option or more, each once, such as norm,placement")


def build_report(
    results: Sequence[RunResult], by: Sequence[str], options: Options | None = None, warnings: Sequence[str] = ()
) -> Report:
    """Return the report on the cells of some runs; its warnings begin with those given.

    Raises:
        ConfigError: A condition, the baseline or the learning rate is unknown.
    """
    options, warnings = options or Options(), list(warnings)
    kept = match_runs([run.entry.run for run in results], parse_conditions(options.where, "--where"))
    cells = group_cells([run for run, keep in zip(results, kept, strict=True) if keep], by)
    if different := differences_between(cells, by):
        warnings.append(f"the cells differ in more than {', '.join(by)}: {'; '.join(different)}")
    if LR not in by and len({tuple(cell.losses) for cell in cells if cell.losses}) > 1:
        warnings.append("the cells have different learning rates: their best losses and their S are not comparable")
    shared = options.lr if options.lr is not None else shared_lr([cell.ranking for cell in cells if cell.losses])
    if options.lr is not None and not any(options.lr in cell.losses for cell in cells):
        tried = sorted({lr for cell in cells for lr in cell.losses})
        raise ConfigError(f"--lr {options.lr:g}: no run has it; choose one of {', '.join(f'{lr:g}' for lr in tried)}")
    rows = [_row(cell, by, shared, options) for cell in cells]
    if options.against is not None:
        _add_comparisons(rows, cells, by, shared, options.against)
    return Report(by, rows, warnings, cells)


def read_results(entries: Sequence[Entry], missing: int = 0) -> tuple[list[RunResult], list[str]]:
    """Return the result of each run whose record can be read, and warnings about the others.

    Args:
        entries: The runs.
        missing: How many more runs of the sweep have not started.
    """
    warnings = [f"{missing} of the sweep's {missing + len(entries)} runs have not started"] if missing else []
    results = [(entry, read_result(entry)) for entry in entries]
    damaged = [(entry.folder.run_id, entry.problem or NO_LR) for entry, result in results if result is None]
    return [result for _, result in results if result is not None], warnings + damaged_run_warnings(damaged)


def _row(cell: Cell, by: Sequence[str], shared: float | None, options: Options) -> Row:
    k, warnings = len(cell.losses), cell.warnings()
    selected = f"lowest mean final validation loss of {k} learning rates, on that same loss" if k > 1 else None
    return {
        **dict(zip(by, cell.key, strict=True)),
        "cell": cell.name,
        **cell_row.state_counts(cell),
        **cell_row.losses_at(cell, cell.best_lr, BEST),
        "selected": selected,
        **cell_row.losses_at(cell, shared, SHARED),
        **cell_row.sensitivity_of(cell),
        **cell_row.costs(cell),
        **(cell_row.to_target(cell, options.target, warnings) if options.target is not None else {}),
        **cell_row.spikes(cell, from_metrics=options.spikes),
        "corpora": cell_row.setting_values(cell.runs, "corpus"),
        "devices": cell_row.setting_values(cell.runs, "device"),
        "precisions": cell_row.setting_values(cell.runs, "precision"),
        "run_ids": [run.run_id for run in cell.runs],
        "warnings": warnings,
    }


def _add_comparisons(
    rows: Sequence[Row], cells: Sequence[Cell], by: Sequence[str], shared: float | None, text: str
) -> None:
    """Add to each row the comparison with its baseline, at the best learning rates and at the shared one."""
    baselines = against.find_baselines(cells, by, text)
    at_best = against.compare(cells, baselines, lambda cell: cell.best_lr)
    at_shared = against.compare(cells, baselines, lambda cell: shared)
    for prefix, comparisons in ((BEST, at_best), (SHARED, at_shared)):
        for row, comparison in zip(rows, comparisons, strict=True):
            test = comparison.test if comparison else None
            row |= {
                f"{prefix}baseline": comparison and comparison.baseline.name,
                f"{prefix}difference": test and test.estimate,
                f"{prefix}difference_low": test and test.low,
                f"{prefix}difference_high": test and test.high,
                f"{prefix}p": test and test.p,
                f"{prefix}p_holm": comparison and comparison.p_holm,
                f"{prefix}pairs": test.design.n if test else 0,
                f"{prefix}pairs_crossed": test and cell_row.crossing(test.design),
                f"{prefix}test": test and test.test,
            }
    for row, cell, comparison in zip(rows, cells, at_best, strict=True):
        if comparison is None:
            if cell not in baselines:
                row["warnings"].append(f"there is no baseline for it ({text})")
            continue
        if comparison.unpaired:
            row["warnings"].append(f"seeds with a result on one side of its comparison only: {comparison.unpaired}")
        if different := against.confounders(cell, comparison.baseline, by):
            row["warnings"].append(f"it and its baseline differ in {'; '.join(different)}")
