"""The compute-equivalent speed-up: the FLOPs that a baseline needs to reach a cell's loss, over the cell's FLOPs.

The baseline's loss is linear in the logarithm of its training FLOPs C between its cells of other sizes or lengths.
Outside its smallest and its largest budget there is a bound, never an extrapolation. The interval is over seeds; it
does not include the error of the interpolation.

Source: Davidson et al. 2023, arXiv:2312.07413 (compute-equivalent gain).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from normlab.analysis.best import rank_cells, size_options
from normlab.analysis.cells import SIZE_OPTIONS, Cell
from normlab.analysis.intervals import Replicate, mean_interval
from normlab.store.record import Setting

MIN_BUDGETS = 3
"""Fewest budgets of a baseline."""
METHOD = "linear interpolation in ln C"
Curve = Mapping[float, Mapping[Replicate, float]]
"""Final losses of a baseline by training FLOPs (ascending) and replicate."""


@dataclass(frozen=True, slots=True)
class Speedup:
    """A ratio of FLOPs at equal loss; above 1, the cell needs less compute than its baseline."""

    ratio: float
    low: float | None
    high: float | None
    """Interval over seeds; None without one."""
    seeds: int
    bound: str
    """`>` or `<` if the loss is outside the baseline's range, where `ratio` is a bound; else empty."""
    method: str = METHOD

    def __str__(self) -> str:
        """Return `1.32 [1.20, 1.45] (n=3)`, or a bound, `> 1.8`."""
        if self.bound:
            return f"{self.bound} {self.ratio:.2f}"
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.ratio:.2f}{interval} (n={self.seeds})"


def speedups(cells: Sequence[Cell], levels: Mapping[str, Setting]) -> list[Speedup | None]:
    """Return the speed-up of each cell over the baseline, at the best learning rate of each cell.

    None for a baseline cell, for a cell with a diverged run, and where the baseline has fewer than `MIN_BUDGETS`
    budgets with the cell's other options, or a loss that does not decrease. None for all if two of `SIZE_OPTIONS` vary:
    the losses of deeper models and of longer runs are not on one curve over FLOPs, so that a baseline would differ from
    itself. `levels` has the value of each option of the baseline.
    """
    if len(size_options(cells)) > 1:
        return [None] * len(cells)
    flops = [_flops_of(cell) for cell in cells]
    is_baseline = [levels.items() <= cell.levels.items() for cell in cells]
    families = [
        tuple(value for option, value in cell.levels.items() if option not in (*levels, *SIZE_OPTIONS))
        for cell in cells
    ]
    curves: dict[tuple[Setting, ...], dict[float, Mapping[Replicate, float]]] = {}
    for index in rank_cells(cells)[::-1]:  # of several baselines with one budget the best one stays
        cost = flops[index]
        if is_baseline[index] and cost and not cells[index].has_bad_outcome:
            curves.setdefault(families[index], {})[cost] = cells[index].final.losses
    results: list[Speedup | None] = []
    for cell, cost, baseline, family in zip(cells, flops, is_baseline, families, strict=True):
        curve = dict(sorted(curves.get(family, {}).items()))
        is_valid = not baseline and not cell.final.diverged and len(curve) >= MIN_BUDGETS
        results.append(_speedup(curve, cost, cell.final.losses) if cost and is_valid else None)
    return results


def _flops_of(cell: Cell) -> float | None:
    """Return the training FLOPs of a run of a cell at its best learning rate; None if unknown or not the same."""
    flops = {run.record.compute.flops(run.record.status.tokens) for run in cell.runs_at(cell.best_lr)}
    return flops.pop() if len(flops) == 1 else None


def _speedup(curve: Curve, flops: float, losses: Mapping[Replicate, float]) -> Speedup | None:
    """Return the speed-up of a cell over its baseline; None if a loss of the baseline does not decrease.

    The estimate is the geometric mean over the seeds that the cell and every budget have, each with its own curve. If a
    seed is outside the baseline's range, the estimate is that of the mean losses, without an interval.
    """
    budgets = list(curve)
    common = set(losses).intersection(*curve.values())
    logs = {seed: _log_flops(budgets, [curve[c][seed] for c in budgets], losses[seed]) for seed in common}
    if logs and all(map(math.isfinite, logs.values())):
        mean, low, high, design = mean_interval(logs)
        ratio, low, high = (None if log is None else math.exp(log) / flops for log in (mean, low, high))
        return Speedup(ratio or 0.0, low, high, design.n, "")
    means = [math.fsum(each.values()) / len(each) for each in curve.values()]
    log = _log_flops(budgets, means, math.fsum(losses.values()) / len(losses))
    if math.isnan(log):
        return None
    bound = "" if math.isfinite(log) else ">" if log > 0 else "<"
    reached = {"": log, ">": math.log(budgets[-1]), "<": math.log(budgets[0])}[bound]
    return Speedup(math.exp(reached) / flops, None, None, len(losses), bound)


def _log_flops(budgets: Sequence[float], losses: Sequence[float], target: float) -> float:
    """Return ln C at a loss; infinite outside the range of the losses; NaN if they do not decrease."""
    import numpy as np

    if any(after >= before for before, after in pairwise(losses)):
        return math.nan
    return float(np.interp(target, losses[::-1], np.log(budgets[::-1]), left=math.inf, right=-math.inf))
