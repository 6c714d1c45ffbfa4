"""The compute-equivalent speed-up: the FLOPs that a baseline needs to reach a cell's loss, over the cell's FLOPs.

The baseline's loss as a function of its training FLOPs C is a law through its cells of other sizes or lengths: a power
law with offset, E + A C^-a, if there are enough budgets, else linear in ln C between them. A law is used only between
the smallest and the largest budget: outside there is a bound, never an extrapolation. The interval is over seeds; it
does not include the error of the law's form.

Source: Davidson et al. 2023, arXiv:2312.07413 (compute-equivalent gain); the form of the law as in Hoffmann et al.
2022, arXiv:2203.15556, eq. 2, of one variable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from normlab.analysis.best import rank_cells, size_options
from normlab.analysis.cells import SIZE_OPTIONS, Cell
from normlab.analysis.intervals import Replicate, mean_interval
from normlab.stats.profiles import Array
from normlab.store.record import Setting

MIN_BUDGETS = 3
"""Fewest budgets of a law."""
MIN_FITTED = 4
"""Fewest budgets of a power law, which has three parameters."""
POWER_LAW = "a power law with offset, E + A C^-a"
INTERPOLATION = "linear interpolation in ln C, because of too few budgets for a power law"
_EXPONENTS = (0.01, 3.0)
"""Range of a."""


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
    method: str

    def __str__(self) -> str:
        """Return `1.32 [1.20, 1.45] (n=3)`, or a bound, `> 1.8`."""
        if self.bound:
            return f"{self.bound} {self.ratio:.2f}"
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.ratio:.2f}{interval} (n={self.seeds})"


@dataclass(frozen=True)
class Law:
    """The loss of a baseline as a function of its training FLOPs."""

    losses: Mapping[float, Mapping[Replicate, float]]
    """Finite final losses by FLOPs (ascending) and replicate."""

    @property
    def method(self) -> str:
        """How the losses are connected."""
        return POWER_LAW if len(self.losses) >= MIN_FITTED else INTERPOLATION

    @cached_property
    def budgets(self) -> list[float]:
        """The FLOPs of the baseline's cells."""
        return list(self.losses)

    def speedup(self, flops: float, losses: Mapping[Replicate, float]) -> Speedup | None:
        """Return the speed-up of a cell; None if a law through the baseline's losses does not decrease.

        The estimate is the geometric mean over the seeds that the cell and every budget have, each with its own law.
        If a seed is outside its law's range, the estimate is that of the mean losses, without an interval.
        """
        common = set(losses).intersection(*self.losses.values())
        logs = {each: self._log_flops([self.losses[c][each] for c in self.budgets], losses[each]) for each in common}
        if logs and all(value is not None and math.isfinite(value) for value in logs.values()):
            mean, low, high, design = mean_interval({each: value or 0.0 for each, value in logs.items()})
            ratios = [None if value is None else math.exp(value) / flops for value in (mean, low, high)]
            return Speedup(ratios[0] or 0.0, ratios[1], ratios[2], design.n, "", self.method)
        means = [math.fsum(by.values()) / len(by) for by in self.losses.values()]
        value = self._log_flops(means, math.fsum(losses.values()) / len(losses))
        if value is None:
            return None
        bound = "" if math.isfinite(value) else ">" if value > 0 else "<"
        reached = {"": value, ">": math.log(self.budgets[-1]), "<": math.log(self.budgets[0])}[bound]
        return Speedup(math.exp(reached) / flops, None, None, len(losses), bound, self.method)

    def _log_flops(self, losses: Sequence[float], target: float) -> float | None:
        """Return ln C at a loss; infinite outside the range; None without a decreasing law."""
        invert = _power_law if len(losses) >= MIN_FITTED else _interpolation
        inverse = invert(np.log(self.budgets), np.asarray(losses, dtype=float))
        if inverse is None:
            return None
        highest, lowest, log_flops_at = inverse
        return math.inf if target < lowest else -math.inf if target > highest else log_flops_at(target)


Inverse = tuple[float, float, Callable[[float], float]]
"""The losses of a law at its smallest and its largest budget, and ln C as a function of the loss."""


def _power_law(log_flops: Array, losses: Array) -> Inverse | None:
    """Fit E + A C^-a by least squares: for each a, E and A follow from a linear regression."""
    from scipy.optimize import minimize_scalar

    scaled = log_flops - log_flops[0]

    def regression(exponent: float) -> tuple[float, float, float]:
        x = np.exp(-exponent * scaled)
        slope, offset = np.polyfit(x, losses, 1)
        return float(np.square(losses - offset - slope * x).sum()), float(slope), float(offset)

    low, high = np.log(_EXPONENTS)
    starts = np.linspace(low, high, 25)
    best = min(starts, key=lambda start: regression(math.exp(start))[0])
    step = starts[1] - starts[0]
    bounds = max(low, best - step), min(high, best + step)
    found = minimize_scalar(lambda log: regression(math.exp(log))[0], bounds=bounds, method="bounded")
    exponent = math.exp(float(found.x))  # pyright: ignore[reportAttributeAccessIssue]
    _, slope, offset = regression(exponent)
    if slope <= 0:
        return None
    lowest = offset + slope * math.exp(-exponent * float(scaled[-1]))
    return slope + offset, lowest, lambda loss: float(log_flops[0]) - math.log((loss - offset) / slope) / exponent


def _interpolation(log_flops: Array, losses: Array) -> Inverse | None:
    if (np.diff(losses) >= 0).any():
        return None
    return float(losses[0]), float(losses[-1]), lambda loss: float(np.interp(loss, losses[::-1], log_flops[::-1]))


def flops_of(cell: Cell) -> float | None:
    """Return the training FLOPs of a run of a cell at its best learning rate; None if unknown or not the same."""
    flops = [run.record.compute.flops(run.record.status.tokens) for run in cell.runs_at(cell.best_lr)]
    if not flops or None in flops or not flops[0] or any(other != flops[0] for other in flops):
        return None
    return flops[0]


def speedups(cells: Sequence[Cell], levels: Mapping[str, Setting]) -> list[Speedup | None]:
    """Return the speed-up of each cell over the baseline, at the best learning rate of each cell.

    None for a baseline cell, for a cell with a diverged run, and where the baseline has fewer than `MIN_BUDGETS`
    budgets with the cell's other options. None for all if two of `SIZE_OPTIONS` vary: the losses of deeper models and
    of longer runs are not on one curve over FLOPs, so that a baseline would differ from itself.

    Args:
        cells: All cells of a table.
        levels: The value of each option of the baseline.
    """
    if len(size_options(cells)) > 1:
        return [None] * len(cells)
    laws: dict[tuple[Setting, ...], dict[float, Mapping[Replicate, float]]] = {}
    for index in rank_cells(cells)[::-1]:  # of several baselines with one budget the best one stays
        cell, flops = cells[index], flops_of(cells[index])
        if _is_baseline(cell, levels) and flops is not None and not cell.has_bad_outcome:
            laws.setdefault(_family(cell, levels), {})[flops] = cell.final.losses
    results: list[Speedup | None] = []
    for cell in cells:
        losses, flops = laws.get(_family(cell, levels), {}), flops_of(cell)
        is_valid = flops is not None and not _is_baseline(cell, levels) and not cell.final.diverged
        law = Law(dict(sorted(losses.items()))) if len(losses) >= MIN_BUDGETS else None
        results.append(law.speedup(flops, cell.final.losses) if law and is_valid and flops else None)
    return results


def _is_baseline(cell: Cell, levels: Mapping[str, Setting]) -> bool:
    return all(levels.get(option, value) == value for option, value in cell.levels.items())


def _family(cell: Cell, levels: Mapping[str, Setting]) -> tuple[Setting, ...]:
    """Return the values of the options in which a cell and its baseline must agree."""
    return tuple(v for o, v in cell.levels.items() if o not in levels and o not in SIZE_OPTIONS)
