"""Compute the numbers of a cell as one row, unrounded, with the keys of JSON and CSV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from normlab.report.groups import Cell
from normlab.report.intervals import Design, mean_interval
from normlab.report.learning_rates import USABLE, sensitivity
from normlab.report.run_result import STATES, RunResult
from normlab.report.settings import get_nested
from normlab.store.evaluations import evaluations
from normlab.store.outcome import loss_of
from normlab.store.schema import number

Row = dict[str, Any]


def state_counts(cell: Cell) -> Row:
    """Return the number of runs, and of runs in each state; the latter add up to the former."""
    return {"runs": len(cell.runs), **{state: cell.count(state) for state in STATES}}


def losses_at(cell: Cell, lr: float | None, prefix: str) -> Row:
    """Return final and best validation loss at one learning rate: mean and interval over seeds, in nats/token.

    The mean is infinite where a run diverged. The mean of the other runs has a key and no interval of its own: the
    runs that happen to survive are not a sample of what the method does.
    """
    row: Row = {f"{prefix}lr": lr, f"{prefix}seeds": 0, f"{prefix}seeds_diverged": 0}
    for key, losses in (("val_loss", cell.losses), ("best_val_loss", cell.arrange(lambda run: run.best_loss))):
        values = losses.get(lr, {}) if lr is not None else {}
        finite = [value for value in values.values() if math.isfinite(value)]
        interval = mean_interval(values) if values else None
        row |= {
            f"{prefix}seeds": len(values),
            f"{prefix}seeds_crossed": interval and crossing(interval.design),
            f"{prefix}seeds_fixed": interval and interval.design.fixed,
            f"{prefix}seeds_diverged": len(values) - len(finite),
            f"{prefix}{key}": interval and interval.estimate,
            f"{prefix}{key}_low": interval and interval.low,
            f"{prefix}{key}_high": interval and interval.high,
            f"{prefix}{key}_of_others": _mean(finite) if 0 < len(finite) < len(values) else None,
        }
    return row


def crossing(design: Design) -> list[int] | None:
    """Return how many seeds and data seeds are crossed; None where the replicates are independent."""
    return list(design.levels) if design.crossed else None


def sensitivity_of(cell: Cell) -> Row:
    """Return the sensitivity to the learning rate with the grid, the usable range and its upper edge."""
    starts = [loss_of(get_nested(run.entry.run, "corpus.baselines.uniform")) for run in cell.runs]
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


def costs(cell: Cell) -> Row:
    """Return the mean speed and the peak memory of the runs with a finite loss."""
    statuses = [run.entry.status for run in cell.runs if math.isfinite(run.loss)]
    speeds = [speed for status in statuses if (speed := number(status.get("tokens_per_s"))) is not None]
    memory = [peak for status in statuses if (peak := number(status.get("peak_memory_bytes"))) is not None]
    return {
        "tokens_per_s": _mean(speeds) if speeds else None,
        "peak_memory_bytes": max(memory, default=None),
    }


def to_target(cell: Cell, target: float, warnings: list[str]) -> Row:
    """Return the mean steps and seconds to the first evaluation at or below a loss, at the best learning rate.

    The means are None unless every run reaches the target. A run whose metrics changed after it finished is left out,
    with a line in `warnings`.
    """
    runs: list[RunResult] = []
    for run in cell.runs_at(cell.best_lr):
        if problem := run.entry.folder.metrics_problem():
            warnings.append(f"{problem}; the run is left out of the steps to {target:g}")
        else:
            runs.append(run)
    first = [next((each for each in evaluations(run.entry.folder) if each.loss <= target), None) for run in runs]
    reached = [evaluation for evaluation in first if evaluation is not None]
    seconds = [evaluation.seconds for evaluation in reached if evaluation.seconds is not None]
    all_reached = bool(runs) and len(reached) == len(runs)
    return {
        "target": target,
        "target_runs": len(runs),
        "target_reached": len(reached),
        "steps_to_target": sum(evaluation.step for evaluation in reached) / len(reached) if all_reached else None,
        "seconds_to_target": _mean(seconds) if all_reached and len(seconds) == len(runs) else None,
    }


def spikes(cell: Cell, *, from_metrics: bool) -> Row:
    """Return the spikes at the best learning rate by rule: runs, spikes, steps that the rule judges, and the share.

    Args:
        cell: The runs.
        from_metrics: Whether to count the spikes of a run from its metrics if its status has no count.
    """
    totals: dict[str, dict[str, Any]] = {}
    for run in cell.runs_at(cell.best_lr):
        for rule, counts in _spikes_of(run, from_metrics).items():
            total = totals.setdefault(rule, {"runs": 0, "spikes": 0, "of_steps": 0})
            total["runs"] += 1
            for key in ("spikes", "of_steps"):
                total[key] += number(get_nested(counts, key)) or 0
    for total in totals.values():
        total["share"] = total["spikes"] / total["of_steps"] if total["of_steps"] else None
    return {"spikes": totals}


def _spikes_of(run: RunResult, from_metrics: bool) -> dict[str, Any]:
    recorded = run.entry.status.get("spikes")
    if isinstance(recorded, dict):
        return recorded
    if not from_metrics:
        return {}
    from normlab.stats.spikes import count_spikes
    from normlab.store.series import series

    found = count_spikes(series(run.entry.folder))
    return {spikes.rule.name: {"spikes": len(spikes.spikes), "of_steps": spikes.scored} for spikes in found}


def _mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # a damaged record may hold values that have no sum
        return math.nan


def setting_values(runs: Sequence[RunResult], name: str) -> list[str]:
    """Return the distinct values of a setting."""
    return sorted({str(run.settings.get(name)) for run in runs})
