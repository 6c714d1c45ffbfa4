"""The numbers of a cell, as one row: everything that JSON holds, rounded by nobody."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from normlab.report.groups import Cell
from normlab.report.intervals import Design, mean_interval
from normlab.report.learning_rates import USABLE, sensitivity
from normlab.report.outcomes import ENDINGS, Outcome
from normlab.report.settings import dig
from normlab.store.evaluations import evaluations
from normlab.store.outcome import loss_of
from normlab.store.schema import number

Row = dict[str, Any]


def counts(cell: Cell) -> Row:
    """How many runs there are, and how many of each outcome: these add up to the runs."""
    return {"runs": len(cell.outcomes), **{ending: cell.count(ending) for ending in ENDINGS}}


def losses_at(cell: Cell, lr: float | None, prefix: str) -> Row:
    """Final and best validation loss at one learning rate: mean and interval over seeds, nats a token.

    A mean with a diverged run is infinite; that of the others stands apart, under its own name, with no interval:
    runs that happened to survive are no sample of what the method does.
    """
    row: Row = {f"{prefix}lr": lr, f"{prefix}seeds": 0, f"{prefix}seeds_diverged": 0}
    for key, losses in (("val_loss", cell.losses), ("best_val_loss", cell.arranged(lambda run: run.best))):
        values = losses.get(lr, {}) if lr is not None else {}
        finite = [value for value in values.values() if math.isfinite(value)]
        found = mean_interval(values) if values else None
        row |= {
            f"{prefix}seeds": len(values),
            f"{prefix}seeds_crossed": found and crossing(found.design),
            f"{prefix}seeds_fixed": found and found.design.fixed,
            f"{prefix}seeds_diverged": len(values) - len(finite),
            f"{prefix}{key}": found and found.estimate,
            f"{prefix}{key}_low": found and found.low,
            f"{prefix}{key}_high": found and found.high,
            f"{prefix}{key}_of_others": math.fsum(finite) / len(finite) if 0 < len(finite) < len(values) else None,
        }
    return row


def crossing(design: Design) -> list[int] | None:
    """How many seeds and how many data seeds are crossed; None where the replicates are independent."""
    return list(design.levels) if design.crossed else None


def sensitivity_of(cell: Cell) -> Row:
    """LR sensitivity with its grid, the learning rates that are usable, and where they end."""
    starts = [loss_of(dig(run.entry.run, "corpus.baselines.uniform")) for run in cell.outcomes]
    at_start = max((start for start in starts if start is not None), default=None)
    found = sensitivity(cell.losses, at_start, cell.unusable)
    return {
        "learning_rates": list(cell.losses),
        "lr_sensitivity": found.value,
        "loss_at_start": at_start,
        "usable_lr": found.usable and list(found.usable),
        "usable_within": USABLE,
        "edge_lr": found.edge,
        "unusable_lrs": sorted(cell.unusable),
    }


def costs(cell: Cell) -> Row:
    """Speed, the mean over the runs that ended; and memory, the most of any."""
    ended = [run.entry.status for run in cell.outcomes if math.isfinite(run.loss)]
    speeds = [speed for status in ended if (speed := number(status.get("tokens_per_s"))) is not None]
    memory = [peak for status in ended if (peak := number(status.get("peak_memory_bytes"))) is not None]
    return {
        "tokens_per_s": _mean(speeds) if speeds else None,
        "peak_memory_bytes": max(memory, default=None),
    }


def to_target(cell: Cell, target: float, warnings: list[str]) -> Row:
    """Steps and seconds to the first evaluation at or below a loss, at the cell's own best learning rate.

    The mean over its runs where each of them got there, else None: how many did is said beside it. A run whose
    metrics were changed since it ended is left out, and `warnings` gets a line for it.
    """
    runs: list[Outcome] = []
    for run in cell.at(cell.best_lr):
        if problem := run.entry.folder.metrics_problem():
            warnings.append(f"{problem}; the run is left out of the steps to {target:g}")
        else:
            runs.append(run)
    first = [next((seen for seen in evaluations(run.entry.folder) if seen.loss <= target), None) for run in runs]
    there = [seen for seen in first if seen is not None]
    seconds = [seen.seconds for seen in there if seen.seconds is not None]
    every = bool(runs) and len(there) == len(runs)
    return {
        "target": target,
        "target_runs": len(runs),
        "target_reached": len(there),
        "steps_to_target": sum(seen.step for seen in there) / len(there) if every else None,
        "seconds_to_target": _mean(seconds) if every and len(seconds) == len(runs) else None,
    }


def spikes(cell: Cell, *, count_again: bool) -> Row:
    """Spikes by rule over the runs at the cell's own best learning rate: how many, of so many steps, and their share.

    Args:
        cell: The runs.
        count_again: Whether those of a run whose status has no count are counted from its metrics.
    """
    totals: dict[str, dict[str, Any]] = {}
    for run in cell.at(cell.best_lr):
        for rule, found in _spikes_of(run, count_again).items():
            total = totals.setdefault(rule, {"runs": 0, "spikes": 0, "of_steps": 0})
            for key, value in (("runs", 1), ("spikes", dig(found, "spikes")), ("of_steps", dig(found, "of_steps"))):
                total[key] += number(value) or 0
    for total in totals.values():
        total["share"] = total["spikes"] / total["of_steps"] if total["of_steps"] else None
    return {"spikes": totals}


def _spikes_of(run: Outcome, count_again: bool) -> dict[str, Any]:
    known = run.entry.status.get("spikes")
    if isinstance(known, dict):
        return known
    if not count_again:
        return {}
    from normlab.stats.spikes import count_spikes
    from normlab.store.series import series

    return {
        found.rule.name: {"spikes": len(found.spikes), "of_steps": found.scored}
        for found in count_spikes(series(run.entry.folder))
    }


def _mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # a damaged record may hold what has no sum
        return math.nan


def values(outcomes: Sequence[Outcome], word: str) -> list[str]:
    """What runs were told by a circumstance, each once."""
    return sorted({str(run.told.get(word)) for run in outcomes})
