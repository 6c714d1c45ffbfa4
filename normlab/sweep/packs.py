"""Which runs may train as one stacked computation: those that differ only in numbers.

What changes a shape, a formula or the flow of control keeps runs apart; what is one number for each of them does not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

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


def grouped(configs: Sequence[RunConfig], most: int, alone: Sequence[bool]) -> list[list[int]]:
    """The packs of some runs, as lists of their indices, in the order in which the runs were given.

    Args:
        configs: The runs.
        most: Most runs in a pack.
        alone: Whether each of them goes alone whatever it has in common with others.
    """
    packs: list[list[int]] = []
    not_full: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        # A pass over a fixed batch, or a probe, takes one model at a time.
        if alone[index] or config.stats.names(EXTENDED) or config.stats.names(PROBE):
            packs.append([index])
            continue
        key = pack_key(config)
        pack = not_full.get(key, [])
        if not pack:
            packs.append(pack)
        pack.append(index)
        not_full[key] = pack if len(pack) < most else []
    return packs
