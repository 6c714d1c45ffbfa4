"""What the losses of one seed at all learning rates of a grid say: how much the rate matters, and which rates train.

Each number is of one seed, so that its interval is that of a mean over seeds. A loss counts as at most ln V, that of a
uniform guess. Between two rates of the grid the loss is interpolated, linearly in ln rate.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from normlab.analysis.intervals import Replicate
from normlab.store.record import RunRecord

NEAR = 0.1
"""How far from the lowest loss of its seed a run may be that has trained well, nats/token."""
BAND = 0.02
"""How far from the lowest loss of its seed the loss is in the band of best rates, nats/token."""


def by_seed(runs: Sequence[RunRecord]) -> dict[Replicate, list[RunRecord]]:
    """Return the runs of each seed."""
    seeds: dict[Replicate, list[RunRecord]] = {}
    for run in runs:
        seeds.setdefault(run.replicate, []).append(run)
    return seeds


def complete_seeds(runs: Sequence[RunRecord]) -> dict[Replicate, list[RunRecord]]:
    """Return the completed runs of the seeds that have all learning rates, and as many runs as any seed.

    The others have not trained every run of the grid yet; in a study, later seeds have the chosen learning rates only.
    """
    completed = [run for run in runs if run.has_loss]
    grid = {run.lr for run in completed}
    seeds = by_seed(completed)
    most = max(map(len, seeds.values()), default=0)
    complete: dict[Replicate, list[RunRecord]] = {}
    for seed, runs_of_seed in seeds.items():
        rates = {run.lr for run in runs_of_seed}
        if rates == grid and len(runs_of_seed) == most:
            complete[seed] = runs_of_seed
    return complete


def sensitivity(runs: Sequence[RunRecord], others: Sequence[RunRecord] = ()) -> float:
    """Return S = mean_r min(loss_r, ln V) - min_r loss_r over the runs of a seed, nats/token.

    If no run has learned, the lowest loss is that of `others` too: a flat curve of losses near the start would have a
    small S. It is the S of Wortsman et al. 2023 (arXiv:2309.14322) for each seed.
    """
    start = _start(runs)
    lowest = min(run.loss for run in runs)
    if not _has_learned(runs):
        for run in others:
            lowest = min(lowest, run.loss)
    if math.isinf(lowest):
        return math.nan
    mean = math.fsum(min(run.loss, start) for run in runs) / len(runs)
    return mean - min(lowest, start)


def log_highest_rate(runs: Sequence[RunRecord], _: Sequence[RunRecord] = ()) -> float:
    """Return ln of the highest rate whose loss is within `NEAR` of the lowest; below the grid by one step if none is.

    It is ln of the highest rate of the grid if that is such a rate.
    """
    curve = _curve(runs, NEAR)
    good = curve.good
    if good:
        return curve.crossing(good[-1], 1)
    steps = [higher - lower for lower, higher in pairwise(sorted(set(curve.rates)))]
    return curve.rates[0] - max(steps, default=0.0)


def has_gap(runs: Sequence[RunRecord]) -> bool:
    """Whether a rate between two whose losses are within `NEAR` of the lowest has a higher loss."""
    good = _curve(runs, NEAR).good
    # Without a gap, the indices follow each other.
    return bool(good) and len(good) <= good[-1] - good[0]


def log_band(runs: Sequence[RunRecord], _: Sequence[RunRecord] = ()) -> float:
    """Return ln of the ratio of the ends of the band around the best rate with losses within `BAND` of the lowest.

    The band ends with the grid. It is NaN if no run has learned.
    """
    curve = _curve(runs, BAND)
    if math.isnan(curve.limit):
        return math.nan
    # The band is the one around the best rate: beyond a rate outside it, another rate inside does not count.
    upper = lower = curve.best
    while upper + 1 < len(curve.losses) and curve.losses[upper + 1] <= curve.limit:
        upper += 1
    while lower > 0 and curve.losses[lower - 1] <= curve.limit:
        lower -= 1
    return curve.crossing(upper, 1) - curve.crossing(lower, -1)


def reaches_top(runs: Sequence[RunRecord]) -> bool:
    """Whether the highest rate of the grid is within `NEAR` of the lowest loss, so that a higher one may be."""
    return log_highest_rate(runs) == math.log(max(run.lr for run in runs))


def band_reaches_an_end(runs: Sequence[RunRecord]) -> bool:
    """Whether the band around the best rate holds an end of the grid, so that it may be wider."""
    curve = _curve(runs, BAND)
    below_best, above_best = curve.losses[: curve.best + 1], curve.losses[curve.best :]
    return max(below_best) <= curve.limit or max(above_best) <= curve.limit


@dataclass(frozen=True, slots=True)
class _Curve:
    """The losses of one seed over the learning rates of its grid."""

    rates: Sequence[float]
    """Ln of the rates, in order."""
    losses: Sequence[float]
    """At these rates, at most ln V."""
    limit: float
    """The lowest loss of a run that has learned plus a margin; NaN, which no loss is below, if no run has learned."""

    @property
    def best(self) -> int:
        """The index of the lowest loss."""
        return self.losses.index(min(self.losses))

    @property
    def good(self) -> list[int]:
        """The indices of the losses that are not above the limit."""
        return [index for index, loss in enumerate(self.losses) if loss <= self.limit]

    def crossing(self, index: int, step: int) -> float:
        """Return where the loss rises above the limit between a rate and the next one, in ln rate; at an end that rate.

        `step` is 1 for the next higher rate and -1 for the next lower one.
        """
        after = index + step
        if not 0 <= after < len(self.losses):
            return self.rates[index]
        rate, loss = self.rates[index], self.losses[index]
        return rate + (self.rates[after] - rate) * (self.limit - loss) / (self.losses[after] - loss)


def _curve(runs: Sequence[RunRecord], margin: float) -> _Curve:
    """Return the curve of the runs of one seed."""
    start = _start(runs)
    points: list[tuple[float, float]] = []
    losses_of_learned: list[float] = []
    for run in runs:
        points.append((math.log(run.lr), min(run.loss, start)))
        if run.has_learned:
            losses_of_learned.append(run.loss)
    rates, losses = zip(*sorted(points), strict=True)
    lowest = min(losses_of_learned, default=math.nan)
    return _Curve(rates, losses, lowest + margin)


def _has_learned(runs: Sequence[RunRecord]) -> bool:
    return any(run.has_learned for run in runs)


def _start(runs: Sequence[RunRecord]) -> float:
    """Return ln V, the loss of a uniform guess, nats/token."""
    return max(run.corpus.baselines.uniform for run in runs)


@dataclass(frozen=True, slots=True)
class RateNumber:
    """One of these numbers, as the tests of `normlab summarize` show it."""

    title: str
    unit: str
    text: str
    of: Callable[[Sequence[RunRecord], Sequence[RunRecord]], float]
    """The number of a seed, from its runs and those of the other cells."""
    is_log: bool = False
    """Whether it is a logarithm: then its mean is geometric, and two cells are compared by their ratio."""
    is_open: Callable[[Sequence[RunRecord]], bool] | None = None
    """Whether the number of a seed may be larger than the grid shows."""
    least: float = -math.inf
    """Lowest possible value for one seed; intervals are cut there. For a logarithm, the lowest logarithm."""

    def cut_off(self, seeds: Collection[Sequence[RunRecord]]) -> tuple[bool, bool]:
        """Return whether the number of one of the seeds may be larger than the grid shows, or smaller."""
        if self.is_open is None:
            return False, False
        # A seed that has learned at no rate may have a number below the grid.
        return any(map(self.is_open, seeds)), not all(map(_has_learned, seeds))


SENSITIVITY = RateNumber(
    "S", "nats/token",
    "S: for each seed the mean over the learning rates of min(loss, ln V), where V is the vocabulary size, minus its "
    "lowest loss in the cell (in any cell if the seed has learned at no rate of this one); it depends on the grid; its "
    "interval is cut at 0, the lowest possible S (Wortsman et al. 2023, arXiv:2309.14322)",
    sensitivity, least=0.0,
)  # fmt: skip
HIGHEST = RateNumber(
    "highest rate", "learning rate",
    f"highest rate: for each seed the highest learning rate whose loss is within {NEAR} nats/token of its lowest loss "
    "in the cell, interpolated in ln rate; one step below the grid for a seed that has learned at no rate",
    log_highest_rate, is_log=True, is_open=reaches_top,
)  # fmt: skip
WIDTH = RateNumber(
    "band", "ratio of rates",
    f"band: for each seed the ratio of the ends of the band around the best learning rate where the loss is within "
    f"{BAND} nats/token of its lowest loss in the cell, interpolated in ln rate; its interval is cut at 1, the lowest "
    "possible ratio",
    log_band, is_log=True, is_open=band_reaches_an_end, least=0.0,
)  # fmt: skip
