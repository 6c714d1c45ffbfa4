"""Group runs into packs that train as one stacked computation: a pure function of configs.

Runs that differ only in numbers may share a pack. Runs that differ in an option that changes a shape, a formula or the
control flow may not.
"""

import json
import math
from collections.abc import Collection, Sequence

from normlab.base.options import plain_tree
from normlab.catalogue.statistics.statistic import PROBE
from normlab.config.schema import RunConfig


def pack_key(config: RunConfig) -> str:
    """Return as canonical JSON the options that must be equal within a pack."""
    tree = plain_tree(config)
    for option in ("seed", "init", "tracking"):
        del tree[option]
    del tree["data"]["seed"], tree["run"]["name"]
    # It has set the number of steps.
    del tree["train"]["tokens_per_parameter"]
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
    if config.precision == "fp16":
        return "with precision=fp16, each run skips other updates"
    return ""


def make_packs(
    configs: Sequence[RunConfig], indices: Sequence[int], alone: Collection[int], size: int
) -> list[list[int]]:
    """Return packs of at most `size` of the runs `indices`; those in `alone` train alone."""
    groups: dict[str, list[int]] = {}
    for index in indices:
        if index in alone or reason_to_train_alone(configs[index]):
            key = f"alone: {index}"
        else:
            key = pack_key(configs[index])
        groups.setdefault(key, []).append(index)
    packs: list[list[int]] = []
    for group in groups.values():
        packs += split(group, size)
    return packs


def split(group: Sequence[int], largest: int) -> list[list[int]]:
    """Split a group into packs of at most `largest` runs.

    The packs have equal sizes if a size above largest / 2 divides the group; otherwise sizes differ by at most one.
    """
    largest = min(largest, len(group))
    count = math.ceil(len(group) / largest)
    # Packs of one size share a compiled step, so a somewhat smaller size that divides the group is better.
    for size in range(largest, largest // 2, -1):
        if len(group) % size == 0:
            count = len(group) // size
            break
    smallest, larger_packs = divmod(len(group), count)
    packs: list[list[int]] = []
    start = 0
    for number in range(count):
        end = start + smallest + (number < larger_packs)
        packs.append(list(group[start:end]))
        start = end
    return packs
