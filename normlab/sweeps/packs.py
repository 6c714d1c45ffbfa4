"""Group runs into packs that train as one stacked computation: a pure function of configs.

Runs that differ only in numbers may share a pack. Runs that differ in an option that changes a shape, a formula or the
control flow may not.
"""

import json
import math
from collections.abc import Collection, Sequence
from itertools import accumulate

from normlab.base.options import plain_tree
from normlab.catalogue.statistics.statistic import PROBE
from normlab.config.schema import RunConfig


def pack_key(config: RunConfig) -> str:
    """Return as canonical JSON the options that must be equal within a pack."""
    tree = plain_tree(config)
    for option in ("seed", "init", "tracking"):
        del tree[option]
    del tree["data"]["seed"], tree["run"]["name"]
    for option in config.optim.per_run:
        del tree["optim"][option]
    # A threshold per run is a tensor; training with and without clipping are two computations.
    tree["optim"]["clip"] = config.optim.clip is not None
    return json.dumps(tree, sort_keys=True)


def reason_to_train_alone(config: RunConfig) -> str:
    """Return why a run cannot train in a pack, or an empty text."""
    if config.stats.names(PROBE):
        return "a probe differentiates one model twice"
    if config.devices > 1:
        return "several devices share the batch of one run"
    # The coefficients of stacked runs are those of one number of updates.
    return "with precision=fp16, each run skips other updates" if config.precision == "fp16" else ""


def make_packs(
    configs: Sequence[RunConfig], indices: Sequence[int], alone: Collection[int], size: int
) -> list[list[int]]:
    """Return packs of at most `size` of the runs `indices`; those in `alone` train alone."""
    groups: dict[str, list[int]] = {}
    for index in indices:
        trains_alone = index in alone or reason_to_train_alone(configs[index])
        groups.setdefault(f"alone: {index}" if trains_alone else pack_key(configs[index]), []).append(index)
    return [pack for group in groups.values() for pack in split(group, size)]


def split(group: Sequence[int], largest: int) -> list[list[int]]:
    """Split a group into packs of at most `largest` runs.

    The packs have equal sizes if a size above largest / 2 divides the group; otherwise sizes differ by at most one.
    """
    largest = min(largest, len(group))
    equal = next((size for size in range(largest, largest // 2, -1) if len(group) % size == 0), None)
    packs = len(group) // equal if equal else math.ceil(len(group) / largest)
    sizes = [len(group) // packs + (number < len(group) % packs) for number in range(packs)]
    ends = list(accumulate(sizes))
    return [list(group[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
