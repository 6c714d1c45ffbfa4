"""`normlab summarize --by norm,placement`: one row per cell, with its numbers and warnings.

The numbers of a row are not rounded; their keys are those of JSON and CSV. With a baseline (`--against
norm=layernorm`) a row also has the difference between the cell's loss and the baseline's, paired by seed and data
order. A pair is one run of each cell with the same seeds. The difference of a pair is infinite if one run diverged, and
0 if both diverged. Runs without an outcome form no pair.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normlab.errors import ConfigError, StoreError
from normlab.report.cells import Cell, group_cells, resolved_differences, table_warnings
from normlab.report.compute_speedup import Speedup, speedups
from normlab.report.contrasts import compare_cells, pool_cells
from normlab.report.factor_tests import baseline_levels
from normlab.report.factors import DEFAULT_OPTIONS, Factor, distinguishing_options, factors_of
from normlab.report.intervals import holm, mean_interval
from normlab.report.learning_rates import NEAR_BEST, sensitivity, shared_lr
from normlab.report.results import STATES, RunResult, mixed_settings, read_results
from normlab.report.settings import format_setting, resolve_options, select_where
from normlab.report.tables import Row, name_some
from normlab.store.format import number
from normlab.store.outcome import loss_of
from normlab.store.query import Selection, select_runs
from normlab.store.series import Evaluation, evaluations

BEST, SHARED = "", "shared_"
"""Prefixes of a cell's keys: for its best learning rate, and for the learning rate that all cells share."""


@dataclass(frozen=True, slots=True)
class CellsTable:
    """The cells with their numbers and warnings."""

    by: Sequence[str]
    rows: Sequence[Row]
    """One row per cell, all with the same keys: the options of `by`, the numbers, the warnings."""
    table_warnings: Sequence[str]
    """Warnings about the table as a whole."""
    cells: Sequence[Cell]
    """The cells, in the order of the rows."""
    among: Sequence[RunResult] = ()
    """All runs, of which conditions select those of the cells."""

    @property
    def factors(self) -> list[Factor]:
        """The options of `by` with their levels."""
        return factors_of([run for cell in self.cells for run in cell.runs], self.by, self.among)

    @property
    def resolved_differences(self) -> list[str]:
        """At most one line: the resolved settings in which the cells differ."""
        return resolved_differences(self.cells)

    @property
    def warnings(self) -> list[str]:
        """All warnings; equal warnings of several cells are one line that names the cells."""
        cells_of: dict[str, list[str]] = {}
        for row in self.rows:
            for warning in row["warnings"]:
                cells_of.setdefault(warning, []).append(row["label"])
        lines = list(self.table_warnings)
        for warning, names in cells_of.items():
            is_general = len(names) == len(self.rows) > 1
            lines.append(f"{'every cell' if is_general else name_some(names)}: {warning}")
        return lines


def summarize_by(
    path: str | os.PathLike[str] | Selection,
    by: Sequence[str] | None = None,
    *,
    where: Sequence[str] = (),
    results_dir: str | os.PathLike[str] = "results",
    **options: Any,
) -> CellsTable:
    """Return the table of cells of a results folder, a `runs` folder, a run or a sweep.

    Args:
        path: A folder, or the name of a sweep or a run, as for `query.select_runs`; or the selected runs.
        by: The options that define cells; by default those in which the runs differ.
        where: Conditions that the runs must meet.
        results_dir: The folder in which names are looked up.
        options: Other options of `build_table`.

    Raises:
        ConfigError: An option of `by`, a condition, the baseline or the learning rate is unknown.
        StoreError: There is no run with a readable record.
    """
    selection = path if isinstance(path, Selection) else select_runs([os.fspath(path)], results_dir)
    results, warnings = read_results(selection.records)
    if not results:
        raise StoreError(
            f"{selection.home}: no run has a readable record; `normlab summarize --runs` lists the reasons"
        )
    if by is not None:
        by = cell_options(by, results)  # before the conditions, because an unknown option is the user's first error
    kept = set(select_where([run.record for run in results], where))
    selected = [run for run in results if run.record in kept]
    table = build_table(selected, cell_options(by, selected), warnings=warnings, **options)
    return dataclasses.replace(table, among=results)


def cell_options(by: Sequence[str] | None, results: Sequence[RunResult]) -> list[str]:
    """Return the full names of the options of `--by`; for None, the options in which the runs differ.

    Raises:
        ConfigError: The list is empty or has a duplicate, or no run has an option.
    """
    if by is None:
        return distinguishing_options(results) or list(DEFAULT_OPTIONS)
    options = resolve_options(by, [run.record for run in results], "--by") if all(by) and results else list(by)
    if not all(by) or not by or len(set(options)) < len(by):
        raise ConfigError(f"--by {','.join(by)}: name at least one option, each once, such as norm,placement")
    return options


def build_table(
    results: Sequence[RunResult],
    by: Sequence[str],
    *,
    against: str | None = None,
    lr: float | None = None,
    target: float | None = None,
    warnings: Sequence[str] = (),
) -> CellsTable:
    """Return the table of cells of some runs.

    Args:
        results: The runs.
        by: The full names of the options that define cells.
        against: The baseline, such as `norm=layernorm`.
        lr: The shared learning rate; by default the one with the best mean rank.
        target: A validation loss; the rows then have the steps and seconds to reach it.
        warnings: Warnings to put before those about the table.

    Raises:
        ConfigError: The baseline or the learning rate is unknown.
    """
    cells = group_cells(results, by)
    shared = shared_lr([cell.ranking for cell in cells if cell.losses]) if lr is None else lr
    if lr is not None and not any(lr in cell.losses for cell in cells):
        choices = ", ".join(format_setting(rate) for rate in sorted({rate for cell in cells for rate in cell.losses}))
        raise ConfigError(f"--lr {format_setting(lr)}: no run has this learning rate; choose one of {choices}")
    rows = [_row(cell, by, shared, target) for cell in cells]
    if against is not None:
        baselines = _find_baselines(cells, by, against)
        _add_comparisons(rows, cells, baselines, {cell.key: cell.best_lr for cell in cells}, BEST)
        _add_comparisons(rows, cells, baselines, {cell.key: shared for cell in cells}, SHARED)
        for row, cell, baseline in zip(rows, cells, baselines, strict=True):
            if baseline is not None:
                row["warnings"] += _comparison_warnings(cell, baseline, by)
            elif cell not in baselines:
                row["warnings"].append(f"has no baseline: no cell with {against} matches its other options")
        _add_speedups(rows, speedups(cells, baseline_levels(cells, by, against)))
    table = CellsTable(by, rows, [*warnings, *table_warnings(cells, by)], cells)
    for row in rows:
        row["resolved_differences"] = table.resolved_differences
    return table


def _row(cell: Cell, by: Sequence[str], shared: float | None, target: float | None) -> Row:
    k, warnings = len(cell.losses), cell.warnings()
    selected = f"lowest mean final validation loss of {k} learning rates, on that same loss" if k > 1 else None
    return {
        **dict(zip(by, cell.key, strict=True)),
        "cell": cell.name,
        "label": cell.label,
        "runs": len(cell.runs),
        **{state: cell.count(state) for state in STATES},
        **losses_at(cell, cell.best_lr, BEST),
        "selected": selected,
        **losses_at(cell, shared, SHARED),
        **_sensitivity(cell),
        **_costs(cell),
        **(_to_target(cell, target, warnings) if target is not None else {}),
        "spikes": _spikes(cell),
        "corpora": sorted({str(run.settings["corpus"]) for run in cell.runs}),
        "devices": sorted({str(run.settings["device"]) for run in cell.runs}),
        "precisions": sorted({str(run.settings["precision"]) for run in cell.runs}),
        "run_ids": [run.record.run_id for run in cell.runs],
        "warnings": warnings,
    }


def losses_at(cell: Cell, lr: float | None, prefix: str) -> Row:
    """Return the final and best validation loss at one learning rate, in nats/token.

    Each has a mean and an interval over seeds. If a run diverged, the mean is infinite, and another key holds the mean
    of the other runs. That mean has no interval, because the surviving runs are not a random sample.
    """
    row: Row = {f"{prefix}lr": lr, f"{prefix}seeds": 0, f"{prefix}seeds_diverged": 0}
    for key, losses in (("val_loss", cell.losses), ("best_val_loss", cell.lowest_losses)):
        values = losses.get(lr, {}) if lr is not None else {}
        finite = [value for value in values.values() if math.isfinite(value)]
        interval = mean_interval(values) if values else None
        row |= {
            f"{prefix}seeds": len(values),
            f"{prefix}seeds_crossed": interval and interval.design.crossing,
            f"{prefix}seeds_fixed": interval and interval.design.fixed,
            f"{prefix}seeds_diverged": len(values) - len(finite),
            f"{prefix}{key}": interval and interval.estimate,
            f"{prefix}{key}_low": interval and interval.low,
            f"{prefix}{key}_high": interval and interval.high,
            f"{prefix}{key}_of_others": _mean(finite) if len(finite) < len(values) else None,
        }
    return row


def _sensitivity(cell: Cell) -> Row:
    """Return the learning-rate sensitivity, with the grid and its near-best range."""
    starts = [loss_of(run.record.corpus.baselines.uniform) for run in cell.runs]
    loss_at_start = max((start for start in starts if start is not None), default=None)
    result = sensitivity(cell.losses, loss_at_start, cell.bad_lrs)
    return {
        "learning_rates": list(cell.losses),
        "lr_sensitivity": result.value,
        "loss_at_start": loss_at_start,
        "near_best_lr": result.near_best and list(result.near_best),
        "near_best_within": NEAR_BEST,
        "too_high_lr": result.too_high,
        "bad_lrs": sorted(cell.bad_lrs),
    }


def _costs(cell: Cell) -> Row:
    """Return the mean FLOPs per token and speed, and the peak memory, of the runs with a finite loss."""
    records = [run.record for run in cell.runs if math.isfinite(run.loss)]
    statuses = [record.status for record in records]
    memory = [status.peak_memory_bytes for status in statuses if status.peak_memory_bytes is not None]
    return {
        "tokens_per_s": _mean([status.tokens_per_s for status in statuses if status.tokens_per_s is not None]),
        "flops_per_token": _mean(
            [flops for record in records if (flops := record.compute.flops_per_token) is not None]
        ),
        "flops_per_s": _mean([flops for record in records if (flops := record.flops_per_s) is not None]),
        "mfu": _mean([mfu for record in records if (mfu := record.mfu) is not None]),
        "peak_memory_bytes": max(memory, default=None),
    }


def _to_target(cell: Cell, target: float, warnings: list[str]) -> Row:
    """Return the mean steps and seconds to a validation loss, at the best learning rate.

    The means are None unless every run reaches the target. A run whose metrics changed after it finished is left out,
    and `warnings` receives a line.
    """
    runs = 0
    reached: list[Evaluation] = []
    for run in cell.runs_at(cell.best_lr):
        if problem := run.record.folder.metrics_problem():
            warnings.append(f"{problem}; the run is left out of the steps to {target:g}")
            continue
        runs += 1
        reached += [each for each in evaluations(run.record.folder) if each.loss <= target][:1]
    seconds = [evaluation.seconds for evaluation in reached if evaluation.seconds is not None]
    return {
        "target": target,
        "target_runs": runs,
        "target_reached": len(reached),
        "steps_to_target": _mean([evaluation.step for evaluation in reached]) if len(reached) == runs else None,
        "seconds_to_target": _mean(seconds) if len(seconds) == runs else None,
    }


def _spikes(cell: Cell) -> dict[str, Row]:
    """Return, by rule, the number of runs, spikes and judged steps at the best learning rate."""
    totals: dict[str, Row] = {}
    for run in cell.runs_at(cell.best_lr):
        for rule, counts in (run.record.status.spikes or {}).items():
            total = totals.setdefault(rule, {"runs": 0, "spikes": 0, "of_steps": 0})
            total["runs"] += 1
            for key in ("spikes", "of_steps"):
                total[key] += number(counts.get(key)) or 0 if isinstance(counts, dict) else 0
    for total in totals.values():
        total["share"] = total["spikes"] / total["of_steps"] if total["of_steps"] else None
    return totals


def _mean(values: Sequence[float]) -> float | None:
    try:
        return math.fsum(values) / len(values) if values else None
    except (OverflowError, ValueError):  # a damaged record may hold values that have no sum
        return math.nan


# Comparison with a baseline


def _find_baselines(cells: Sequence[Cell], by: Sequence[str], text: str) -> list[Cell | None]:
    """Return each cell's baseline: the cell with the values of `text` and equal other options.

    A cell that is a baseline, or has none, gets None.

    Raises:
        ConfigError: An option is not in `by`, or no cell has such a value.
    """
    levels = baseline_levels(cells, by, text)
    by_key = {cell.key: cell for cell in cells}
    baselines = [
        by_key.get(tuple(levels.get(option, value) for option, value in zip(by, cell.key, strict=True)))
        for cell in cells
    ]
    if not any(baselines):
        raise ConfigError(f"--against {text}: no cell has all of these values; give fewer options")
    return [None if baseline is cell else baseline for cell, baseline in zip(cells, baselines, strict=True)]


def _add_comparisons(
    rows: Sequence[Row],
    cells: Sequence[Cell],
    baselines: Sequence[Cell | None],
    lrs: Mapping[tuple[Any, ...], float | None],
    prefix: str,
) -> None:
    """Add to each row the comparison of its cell with the cell's baseline.

    `lrs` maps a cell's key to the learning rate at which the cell is compared. The p-values are corrected for all
    comparisons of the table.
    """
    pool = pool_cells(cells, lrs)
    tests = [
        compare_cells(cell, lrs[cell.key], baseline, lrs[baseline.key], pool) if baseline else None
        for cell, baseline in zip(cells, baselines, strict=True)
    ]
    corrected = holm([test and test.p for test in tests])
    for row, baseline, test, p in zip(rows, baselines, tests, corrected, strict=True):
        row |= {
            f"{prefix}baseline": baseline and baseline.name,
            f"{prefix}difference": test and test.estimate,
            f"{prefix}difference_low": test and test.low,
            f"{prefix}difference_high": test and test.high,
            f"{prefix}p": test and test.p,
            f"{prefix}p_holm": p,
            f"{prefix}pairs": test.design.n if test else 0,
            f"{prefix}pairs_crossed": test and test.design.crossing,
            f"{prefix}test": test and test.test,
        }


def _add_speedups(rows: Sequence[Row], speedups: Sequence[Speedup | None]) -> None:
    """Add each cell's compute-equivalent speed-up over the baseline, if any cell has one."""
    if any(speedups):
        for row, speedup in zip(rows, speedups, strict=True):
            row |= {
                "speedup": speedup and speedup.ratio,
                "speedup_low": speedup and speedup.low,
                "speedup_high": speedup and speedup.high,
                "speedup_seeds": speedup and speedup.seeds,
                "speedup_bound": speedup and speedup.bound,
                "speedup_method": speedup and speedup.method,
            }


def _comparison_warnings(cell: Cell, baseline: Cell, by: Sequence[str]) -> list[str]:
    """Return the reasons why the comparison of a cell with its baseline is unreliable."""
    unpaired = set(cell.final_losses) ^ set(baseline.final_losses) if cell.losses and baseline.losses else ()
    intended = [option for option, a, b in zip(by, cell.key, baseline.key, strict=True) if a != b]
    different = mixed_settings([*cell.runs, *baseline.runs], intended).values()
    return [
        *([f"seeds with a result only in the cell or only in its baseline: {len(unpaired)}"] if unpaired else []),
        *([f"the cell and its baseline also differ in {'; '.join(different)}"] if different else []),
    ]
