"""Group runs into packs that train as one stacked computation: a pure function of configs and memory.

Runs that differ only in numbers may train together. An option that changes a shape, a formula or the control flow keeps
runs apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from itertools import accumulate

from normlab.config.schema import RunConfig
from normlab.options import plain_tree
from normlab.stats.statistic import EXTENDED, PROBE


def pack_key(config: RunConfig) -> str:
    """Return the options that the runs of a pack share, as canonical JSON."""
    tree = plain_tree(config)
    for option in ("seed", "init", "tracking"):
        del tree[option]
    del tree["data"]["seed"], tree["run"]["name"]
    for option in config.optim.per_run:
        del tree["optim"][option]
    # A threshold per run is a tensor; training with and without clipping are two computations.
    tree["optim"]["clip"] = config.optim.clip is not None
    return json.dumps(tree, sort_keys=True)


def make_packs(
    configs: Sequence[RunConfig], indices: Sequence[int], alone: Collection[int], size: int
) -> list[list[int]]:
    """Return the packs of some runs, as lists of indices.

    Args:
        configs: All configs.
        indices: The runs.
        alone: Those of them that train alone in any case.
        size: Most runs in a pack.
    """
    groups: dict[str, list[int]] = {}
    for index in indices:
        stats = configs[index].stats
        # Extended statistics and probes handle one model at a time.
        trains_alone = index in alone or stats.names(EXTENDED) or stats.names(PROBE)
        groups.setdefault(f"alone: {index}" if trains_alone else pack_key(configs[index]), []).append(index)
    return [pack for group in groups.values() for pack in split(group, size)]


def auto_pack_size(device: str, precision: str, width: int, run_bytes: int, memory_bytes: int) -> int:
    """Return the largest pack size of `sweep.pack=auto`. It is a rule; nothing is timed.

    - cpu, fp32: 1. A pack of 16 trains 0.77 (eager) and 0.92 (compiled) as many runs/hour as one run at a time.
    - cpu, bf16: 16 up to width 128, the measured width (1.26 eager, 1.58 compiled); 1 above.
    - cuda: 8 up to width 512, where steps are bound by kernel launches; 4 up to width 1024; 1 above. Not measured on a
      GPU.

    The CPU's ratios are in `results/bench_sweep.md`. A pack uses at most half of the memory by this count, since
    `run_bytes` is a lower bound.

    Args:
        device: cpu or cuda, of the machine that trains.
        precision: fp32 or bf16.
        width: Width of the model.
        run_bytes: Lower bound on the memory of one run, in bytes (`memory.estimate`).
        memory_bytes: Memory of the process that trains a pack, in bytes.
    """
    if device == "cuda":
        size = 8 if width <= 512 else 4 if width <= 1024 else 1
    else:
        size = 16 if precision == "bf16" and width <= 128 else 1
    return max(1, min(size, memory_bytes // (2 * run_bytes)))


def split(group: Sequence[int], largest: int) -> list[list[int]]:
    """Split a group into packs of at most `largest` runs: equal packs if a size above largest / 2 allows it.

    Otherwise the sizes of two packs differ by at most one run.
    """
    equal = next((size for size in range(largest, largest // 2, -1) if len(group) % size == 0), None)
    packs = len(group) // equal if equal else math.ceil(len(group) / largest)
    sizes = [len(group) // packs + (number < len(group) % packs) for number in range(packs)]
    ends = list(accumulate(sizes))
    return [list(group[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
