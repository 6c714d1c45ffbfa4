"""A cell's runs arranged by learning rate and seed: which rate is best, and how much it matters.

A diverged run's loss is infinity. A learning rate is unusable where a run of it diverged, is stuck, regressed, or ended
above the band around the unigram entropy (`store/outcome.py`). Runs of one learning rate and one replicate (a seed and
a data order) are one value, their mean: on a CPU and in the same pack they are bit for bit the same, and count for no
more than one.

Shapes: k learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from normlab.report.intervals import Replicate, mean_interval

Losses = Mapping[float, Mapping[Replicate, float]]
"""Loss by learning rate and replicate."""
Ranking = Mapping[float, tuple[bool, float, float]]
"""What learning rates are ordered by, the best first."""

USABLE = 0.02
EDGE = 0.1
"""Nats above the best loss: up to the first a learning rate is as usable, above the second it is over the edge."""


class Sensitivity(NamedTuple):
    """How much the loss depends on the learning rate, over a grid of them."""

    value: float | None
    """S, nats; None with fewer than two learning rates, or without a usable one."""
    usable: tuple[float, float] | None
    """The lowest and the highest learning rate of the stretch around the best whose loss is within `USABLE` of it."""
    edge: float | None
    """The lowest learning rate above the best that is unusable, or whose loss is more than `EDGE` above the best; None:
    not in the grid."""


def arrange(values: Iterable[tuple[float, Replicate, float]]) -> dict[float, dict[Replicate, float]]:
    """Loss by learning rate, lowest first, and replicate."""
    found: dict[float, dict[Replicate, list[float]]] = {}
    for lr, replicate, loss in values:
        found.setdefault(lr, {}).setdefault(replicate, []).append(loss)
    return {
        lr: {replicate: sum(losses) / len(losses) for replicate, losses in found[lr].items()} for lr in sorted(found)
    }


def badness(losses: Iterable[float]) -> tuple[float, float]:
    """What learning rates are ordered by: the share of replicates that diverged, then the mean loss of the others.

    One at which a seed diverges is therefore worse than any at which none does.
    """
    losses = list(losses)
    finite = [loss for loss in losses if math.isfinite(loss)]
    return 1 - len(finite) / len(losses), math.fsum(finite) / len(finite) if finite else math.inf


def ranking(losses: Losses, unusable: Collection[float] = ()) -> Ranking:
    """Return what learning rates are ordered by: usable ones before any other, then `badness`."""
    return {lr: (lr in unusable, *badness(own.values())) for lr, own in losses.items()}


def best_lr(ranking: Ranking) -> float | None:
    """The learning rate that is best, the lower one of equals; None where there is none."""
    return min(ranking, key=lambda lr: (*ranking[lr], lr), default=None)


def shared_lr(cells: Sequence[Ranking]) -> float | None:
    """The learning rate that every cell has with the best mean rank over the cells; None where there is none.

    In each cell those learning rates are ranked as for `best_lr`. Equals go by their worst rank, then the lower one.
    """
    common = sorted(set[float].intersection(*map(set, cells))) if cells else []
    ranks: dict[float, list[int]] = {lr: [] for lr in common}
    for cell in cells:
        order = [cell[lr] for lr in common]
        for lr, own in zip(common, order, strict=True):
            # Twice the mean rank of those that are as good.
            ranks[lr].append(sum((other < own) + (other <= own) for other in order) + 1)
    return min(common, key=lambda lr: (sum(ranks[lr]), max(ranks[lr]), lr), default=None)


def sensitivity(losses: Losses, at_start: float | None, unusable: Collection[float] = ()) -> Sensitivity:
    """S = mean over the grid of max(l(lr), l*) - l*, in nats.

    l(lr) is the mean over replicates of min(loss, l0), so that a diverged run counts as the loss at initialisation l0,
    and l* the least l(lr) of the usable learning rates. Each divergence moves S by a step, and another grid has another
    S: read it with both. Without a usable learning rate there is no S: runs that never train do not depend on it.

    Args:
        losses: Loss by learning rate and replicate.
        at_start: l0: ln V, what guessing scores before the first update; None where the record has none.
        unusable: Learning rates at which a run diverged, is stuck, regressed, or has not learned.

    Source: Wortsman et al. 2023, arXiv:2309.14322, who sweep 3e-4 to 3e-1.
    """
    best = best_lr(ranking(losses, unusable))
    if len(losses) < 2 or at_start is None or best is None or best in unusable:
        return Sensitivity(None, None, None)
    means = {
        lr: mean_interval({one: min(loss, at_start) for one, loss in own.items()}).estimate
        for lr, own in sorted(losses.items())
    }
    rates, least = list(means), means[best]
    low = high = at = rates.index(best)
    good = [means[lr] <= least + USABLE and lr not in unusable for lr in rates]
    while low > 0 and good[low - 1]:
        low -= 1
    while high < len(rates) - 1 and good[high + 1]:
        high += 1
    edge = next((lr for lr in rates[at + 1 :] if means[lr] > least + EDGE or lr in unusable), None)
    value = math.fsum(max(mean, least) for mean in means.values()) / len(means) - least
    return Sensitivity(value, (rates[low], rates[high]), edge)
