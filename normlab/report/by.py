"""`normlab summarize --by norm,placement`: one row for each cell (see `cells`), with its numbers and warnings.

The numbers of a row are not rounded; their keys are those of JSON and CSV.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normlab.errors import ConfigError, StoreError
from normlab.report import against
from normlab.report.cells import STATES, Cell, RunResult, group_cells, read_results, table_warnings
from normlab.report.intervals import mean_interval
from normlab.report.learning_rates import USABLE, sensitivity, shared_lr
from normlab.report.settings import check_options, select_where
from normlab.store.outcome import loss_of
from normlab.store.query import count_not_started, select_runs
from normlab.store.record import RunRecord
from normlab.store.schema import number
from normlab.store.series import Evaluation, evaluations

Row = dict[str, Any]
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
    selection = select_runs([os.fspath(path)], results_dir)
    results, warnings = read_results(selection.started, count_not_started(selection.records))
    if not results:
        raise StoreError(f"{os.fspath(path)}: no run has a readable record; `normlab summarize` lists the reasons")
    check_options(by, [run.record for run in results], "--by")
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
    options = options or Options()
    kept = set(select_where([run.record for run in results], options.where))
    cells = group_cells([run for run in results if run.record in kept], by)
    shared = options.lr if options.lr is not None else shared_lr([cell.ranking for cell in cells if cell.losses])
    if options.lr is not None and not any(options.lr in cell.losses for cell in cells):
        tried = sorted({lr for cell in cells for lr in cell.losses})
        raise ConfigError(f"--lr {options.lr:g}: no run has it; choose one of {', '.join(f'{lr:g}' for lr in tried)}")
    rows = [_row(cell, by, shared, options) for cell in cells]
    if options.against is not None:
        baselines = against.find_baselines(cells, by, options.against)
        against.add_comparisons(rows, cells, baselines, lambda cell: cell.best_lr, BEST)
        against.add_comparisons(rows, cells, baselines, lambda cell: shared, SHARED)
        for row, cell, baseline in zip(rows, cells, baselines, strict=True):
            if baseline is not None:
                row["warnings"] += against.comparison_warnings(cell, baseline, by)
            elif cell not in baselines:
                row["warnings"].append(f"there is no baseline for it ({options.against})")
    return Report(by, rows, [*warnings, *table_warnings(cells, by)], cells)


def _row(cell: Cell, by: Sequence[str], shared: float | None, options: Options) -> Row:
    k, warnings = len(cell.losses), cell.warnings()
    selected = f"lowest mean final validation loss of {k} learning rates, on that same loss" if k > 1 else None
    return {
        **dict(zip(by, cell.key, strict=True)),
        "cell": cell.name,
        "runs": len(cell.runs),
        **{state: cell.count(state) for state in STATES},
        **losses_at(cell, cell.best_lr, BEST),
        "selected": selected,
        **losses_at(cell, shared, SHARED),
        **_sensitivity(cell),
        **_costs(cell),
        **(_to_target(cell, options.target, warnings) if options.target is not None else {}),
        "spikes": _spikes(cell, from_metrics=options.spikes),
        "corpora": sorted({str(run.settings["corpus"]) for run in cell.runs}),
        "devices": sorted({str(run.settings["device"]) for run in cell.runs}),
        "precisions": sorted({str(run.settings["precision"]) for run in cell.runs}),
        "run_ids": [run.record.run_id for run in cell.runs],
        "warnings": warnings,
    }


def losses_at(cell: Cell, lr: float | None, prefix: str) -> Row:
    """Return final and best validation loss at one learning rate: mean and interval over seeds, in nats/token.

    The mean is infinite where a run diverged. The mean of the other runs has a key and no interval of its own: the
    runs that happen to survive are not a sample of what the method does.
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
    """Return the sensitivity to the learning rate with the grid, the usable range and its upper edge."""
    starts = [loss_of(run.record.corpus.baselines.uniform) for run in cell.runs]
    loss_at_start = max((start for start in starts if start is not None), default=None)
    found = sensitivity(cell.losses, loss_at_start, cell.unusable_lrs)
    return {
        "learning_rates": list(cell.losses),
        "lr_sensitivity": found.value,
        "loss_at_start": loss_at_start,
        "usable_lr": found.usable and list(found.usable),
        "usable_within": USABLE,
        "edge_lr": found.edge,
        "unusable_lrs": sorted(cell.unusable_lrs),
    }


def _costs(cell: Cell) -> Row:
    """Return the mean speed and the peak memory of the runs with a finite loss."""
    statuses = [run.record.status for run in cell.runs if math.isfinite(run.loss)]
    memory = [status.peak_memory_bytes for status in statuses if status.peak_memory_bytes is not None]
    return {
        "tokens_per_s": _mean([status.tokens_per_s for status in statuses if status.tokens_per_s is not None]),
        "peak_memory_bytes": max(memory, default=None),
    }


def _to_target(cell: Cell, target: float, warnings: list[str]) -> Row:
    """Return the mean steps and seconds to the first evaluation at or below a loss, at the best learning rate.

    The means are None unless every run reaches the target. A run whose metrics changed after it finished is left out,
    with a line in `warnings`.
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


def _spikes(cell: Cell, *, from_metrics: bool) -> dict[str, Row]:
    """Return the spikes at the best learning rate by rule: runs, spikes, steps that the rule judges, and the share.

    Args:
        cell: The runs.
        from_metrics: Whether to count the spikes of a run from its metrics if its status has no count.
    """
    totals: dict[str, Row] = {}
    for run in cell.runs_at(cell.best_lr):
        for rule, counts in _spikes_of(run.record, from_metrics).items():
            total = totals.setdefault(rule, {"runs": 0, "spikes": 0, "of_steps": 0})
            total["runs"] += 1
            for key in ("spikes", "of_steps"):
                total[key] += number(counts.get(key)) or 0 if isinstance(counts, dict) else 0
    for total in totals.values():
        total["share"] = total["spikes"] / total["of_steps"] if total["of_steps"] else None
    return totals


def _spikes_of(run: RunRecord, from_metrics: bool) -> Mapping[str, Any]:
    if run.status.spikes is not None or not from_metrics:
        return run.status.spikes or {}
    from normlab.stats.spikes import count_spikes
    from normlab.store.series import series

    found = count_spikes(series(run.folder))
    return {spikes.rule.name: {"spikes": len(spikes.spikes), "of_steps": spikes.scored} for spikes in found}


def _mean(values: Sequence[float]) -> float | None:
    try:
        return math.fsum(values) / len(values) if values else None
    except (OverflowError, ValueError):  # a damaged record may hold values that have no sum
        return math.nan
