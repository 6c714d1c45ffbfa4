"""The best learning rate of a cell, and the sensitivity of its loss to the learning rate.

The loss of a diverged run is infinity. A learning rate is bad if one of its runs diverged, is stuck, regressed, or
ended above the band around the unigram entropy (`store/outcome.py`). Runs with the same learning rate and replicate (a
seed and a data seed) count as one value, their mean, because on a CPU in the same pack they are bit-identical.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from normlab.analysis.intervals import Replicate, mean_interval

Losses = Mapping[float, Mapping[Replicate, float]]
"""Loss by learning rate and replicate."""
Ranking = Mapping[float, tuple[bool, float, float]]
"""Sort key of each learning rate; the best has the smallest."""

NEAR_BEST = 0.02
"""A learning rate is near the best one if its loss is at most this many nats/token higher."""
TOO_HIGH = 0.1
"""A learning rate above the best one is too high if its loss is more than this many nats/token higher."""

BAD = "one at which a run diverged, is stuck, regressed, or ended above the band around the unigram entropy"
DEFINITIONS = {
    "S": "sensitivity to the learning rate: with l = min(loss, ln V), the mean of l over all learning rates minus the "
    "lowest l among those that are not bad; a diverged run counts as ln V, so read S together with the number of "
    "diverged runs; -: every learning rate is bad",
    "near-best lr": "the learning rates around the best one that are not bad and at most "
    f"{NEAR_BEST:g} nats/token worse",
    "too-high lr": "the lowest learning rate above the best one that is bad or more than "
    f"{TOO_HIGH:g} nats/token worse",
}
"""The columns about learning rates; `BAD` is the definition of a bad learning rate, which they use."""


class Sensitivity(NamedTuple):
    """Dependence of the loss on the learning rate over a grid; all None if every learning rate is bad."""

    value: float | None
    """S in nats/token; None with fewer than two learning rates."""
    near_best: tuple[float, float] | None
    """Lowest and highest learning rate of the range around the best: none is bad, all are within `NEAR_BEST` of it."""
    too_high: float | None
    """The lowest learning rate above the best that is bad or more than `TOO_HIGH` worse, or None."""


def arrange(values: Iterable[tuple[float, Replicate, float]]) -> dict[float, dict[Replicate, float]]:
    """Return the mean loss by learning rate (ascending) and replicate."""
    repeated: dict[float, dict[Replicate, list[float]]] = {}
    for lr, replicate, loss in values:
        repeated.setdefault(lr, {}).setdefault(replicate, []).append(loss)
    return {lr: {key: sum(each) / len(each) for key, each in repeated[lr].items()} for lr in sorted(repeated)}


def badness(losses: Iterable[float]) -> tuple[float, float]:
    """Return a sort key: the share of diverged replicates, then the mean loss of the others.

    A learning rate with a diverged seed is therefore worse than any learning rate without one.
    """
    losses = list(losses)
    finite = [loss for loss in losses if math.isfinite(loss)]
    return 1 - len(finite) / len(losses), math.fsum(finite) / len(finite) if finite else math.inf


def ranking(losses: Losses, bad: Collection[float] = ()) -> Ranking:
    """Return the sort key of each learning rate: the bad ones last, then by `badness`."""
    return {lr: (lr in bad, *badness(by_replicate.values())) for lr, by_replicate in losses.items()}


def best_lr(ranking: Ranking) -> float | None:
    """Return the best learning rate, the lowest one in a tie; None if the ranking is empty."""
    return min(ranking, key=lambda lr: (*ranking[lr], lr), default=None)


def shared_lr(rankings: Sequence[Ranking]) -> float | None:
    """Return the learning rate with the best mean rank over all cells, or None.

    Only learning rates that every cell has are ranked. Equal mean ranks are decided by the worst rank, then in favour
    of the lower learning rate.
    """
    common = sorted(set[float].intersection(*map(set, rankings))) if rankings else []
    ranks: dict[float, list[int]] = {lr: [] for lr in common}
    for ranking in rankings:
        keys = [ranking[lr] for lr in common]
        for lr, key in zip(common, keys, strict=True):
            # Twice the rank, because ties share their mean rank, which may be half-integral.
            ranks[lr].append(sum((other < key) + (other <= key) for other in keys) + 1)
    return min(common, key=lambda lr: (sum(ranks[lr]), max(ranks[lr]), lr), default=None)


def sensitivity(losses: Losses, loss_at_start: float | None, bad: Collection[float] = ()) -> Sensitivity:
    """Return the learning-rate sensitivity of a cell.

    S = mean over the grid of max(l(lr), l*) - l*, in nats/token.

    l(lr) is the mean over replicates of min(loss, l0), so that a diverged run counts as the loss at initialisation l0.
    l* is the lowest l(lr) of the learning rates that are not bad. S depends on the grid and on the number of
    divergences: report it with both.

    Args:
        losses: Loss by learning rate and replicate.
        loss_at_start: l0 = ln V, the loss of a uniform guess; None if the record lacks it.
        bad: The bad learning rates.

    Source: Wortsman et al. 2023, arXiv:2309.14322, who sweep 3e-4 to 3e-1.
    """
    best = best_lr(ranking(losses, bad))
    if len(losses) < 2 or loss_at_start is None or best is None or best in bad:
        return Sensitivity(None, None, None)
    means = {
        lr: mean_interval({key: min(loss, loss_at_start) for key, loss in by_replicate.items()}).estimate
        for lr, by_replicate in sorted(losses.items())
    }
    lrs, lowest = list(means), means[best]
    at = lrs.index(best)
    low, high = (
        list(takewhile(lambda lr: means[lr] <= lowest + NEAR_BEST and lr not in bad, side))
        for side in (lrs[at::-1], lrs[at:])
    )
    too_high = next((lr for lr in lrs[at + 1 :] if means[lr] > lowest + TOO_HIGH or lr in bad), None)
    value = math.fsum(max(mean, lowest) for mean in means.values()) / len(means) - lowest
    return Sensitivity(value, (low[-1], high[-1]), too_high)
