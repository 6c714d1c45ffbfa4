"""The best learning rate of a cell.

The loss of a diverged run is infinity. A learning rate is bad if one of its runs diverged, is stuck, regressed, or
ended above the band around the unigram entropy (`store/outcome.py`). Runs with the same learning rate and replicate (a
seed and a data seed) count as one value, their mean, because on a CPU in the same pack they are bit-identical.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence

from normlab.analysis.intervals import Replicate

Losses = Mapping[float, Mapping[Replicate, float]]
"""Loss by learning rate and replicate."""
Ranking = Mapping[float, tuple[bool, float, float]]
"""Sort key of each learning rate; the best has the smallest."""


def arrange(values: Iterable[tuple[float, Replicate, float]]) -> dict[float, dict[Replicate, float]]:
    """Return the mean loss by learning rate (ascending) and replicate."""
    repeated: dict[float, dict[Replicate, list[float]]] = {}
    for lr, replicate, loss in values:
        repeated.setdefault(lr, {}).setdefault(replicate, []).append(loss)
    means: dict[float, dict[Replicate, float]] = {}
    for lr in sorted(repeated):
        means[lr] = {}
        for replicate, losses in repeated[lr].items():
            means[lr][replicate] = sum(losses) / len(losses)
    return means


def badness(losses: Iterable[float]) -> tuple[float, float]:
    """Return a sort key: the share of diverged replicates, then the mean loss of the others.

    A learning rate with a diverged seed is therefore worse than any learning rate without one.
    """
    losses = list(losses)
    finite = list(filter(math.isfinite, losses))
    mean = math.inf
    if finite:
        mean = math.fsum(finite) / len(finite)
    return 1 - len(finite) / len(losses), mean


def ranking(losses: Losses, bad: Collection[float] = ()) -> Ranking:
    """Return the sort key of each learning rate: the bad ones last, then by `badness`."""
    keys: dict[float, tuple[bool, float, float]] = {}
    for lr, by_replicate in losses.items():
        keys[lr] = (lr in bad, *badness(by_replicate.values()))
    return keys


def best_lr(ranking: Ranking) -> float | None:
    """Return the best learning rate, the lowest one in a tie; None if the ranking is empty."""
    return min(ranking, key=lambda lr: (*ranking[lr], lr), default=None)


def shared_lr(rankings: Sequence[Ranking]) -> float | None:
    """Return the learning rate with the best mean rank over all cells, or None.

    Only learning rates that every cell has are ranked. Equal mean ranks are decided by the worst rank, then in favour
    of the lower learning rate.
    """
    if not rankings:
        return None
    common = sorted(set[float].intersection(*map(set, rankings)))
    ranks: dict[float, list[int]] = {lr: [] for lr in common}
    for ranking in rankings:
        keys = sorted(ranking[lr] for lr in common)
        for lr in common:
            # Twice the rank, because ties share their mean rank, which may be half-integral.
            lower, not_higher = bisect_left(keys, ranking[lr]), bisect_right(keys, ranking[lr])
            ranks[lr].append(lower + not_higher + 1)
    return min(common, key=lambda lr: (sum(ranks[lr]), max(ranks[lr]), lr), default=None)
