"""Which runs may train as one stacked computation: those that differ only in numbers.

What changes a shape, a formula or the flow of control keeps runs apart; what is one number for each of them does not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import accumulate

from normlab.config import RunConfig
from normlab.options import plain_tree
from normlab.stats.statistic import EXTENDED, PROBE

_PER_RUN = {
    "data": ("seed",),
    "optim": (
        *("lr", "weight_decay", "beta1", "beta2", "momentum"),
        *("warmup_steps", "schedule", "final_lr_fraction", "decay_fraction"),
    ),
    "run": ("name",),
}
"""The options, by their group, in which the runs of a pack may differ. `seed`, `init` and all of tracking besides."""


def pack_key(config: RunConfig) -> str:
    """What two runs must have in common to train in one pack, as canonical text."""
    tree = plain_tree(config)
    for word in ("seed", "init", "tracking"):
        del tree[word]
    for group, words in _PER_RUN.items():
        for word in words:
            tree[group].pop(word, None)
    # One threshold for each is a tensor; with and without clipping are two computations.
    tree["optim"]["clip"] = config.optim.clip is not None
    return json.dumps(tree, sort_keys=True)


def alike(configs: Sequence[RunConfig], alone: Sequence[bool]) -> list[list[int]]:
    """The groups of runs that may train together, as lists of their indices, in the order in which they were given.

    Args:
        configs: The runs.
        alone: Whether each of them goes alone whatever it has in common with others.
    """
    groups: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        # A pass over a fixed batch, or a probe, takes one model at a time.
        goes_alone = alone[index] or config.stats.names(EXTENDED) or config.stats.names(PROBE)
        groups.setdefault(f"alone: {index}" if goes_alone else pack_key(config), []).append(index)
    return list(groups.values())


def split(group: Sequence[int], most: int) -> list[list[int]]:
    """A group in packs of at most so many, no two of which differ by more than one run."""
    packs = math.ceil(len(group) / most)
    sizes = [len(group) // packs + (number < len(group) % packs) for number in range(packs)]
    ends = list(accumulate(sizes))
    return [list(group[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
