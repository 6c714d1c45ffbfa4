"""Which runs train as one stacked computation, and how many of them: a pure function of configs and memory.

Runs that differ only in numbers may train together. An option that changes a shape, a formula or the flow of control
keeps runs apart.
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


def auto_pack_size(device: str, precision: str, width: int, run_bytes: int, memory_bytes: int) -> int:
    """Return the most runs that `sweep.pack=auto` puts in one pack. A rule: nothing is timed.

    - cpu, fp32: 1. A pack of 16 trains 0.77 (eager) and 0.92 (compiled) as many runs an hour as one run at a time.
    - cpu, bf16: 16 up to width 128, the width that was measured (1.26 eager, 1.58 compiled); 1 above.
    - cuda: 8 up to width 512, where steps are bound by kernel launches; 4 up to width 1024; 1 above. Not measured on a
      GPU.

    The CPU's ratios are those of `results/bench_sweep.md`. A pack is at most as large as half of the memory holds,
    since `run_bytes` is a lower bound.

    Args:
        device: cpu or cuda, of the machine that trains.
        precision: fp32 or bf16.
        width: Width of the model's stream.
        run_bytes: Memory that one run needs at least, in bytes (`memory.estimate`).
        memory_bytes: Memory of the process that trains a pack, in bytes.
    """
    if device == "cuda":
        size = 8 if width <= 512 else 4 if width <= 1024 else 1
    else:
        size = 16 if precision == "bf16" and width <= 128 else 1
    return max(1, min(size, memory_bytes // (2 * run_bytes)))


def split(group: Sequence[int], most: int) -> list[list[int]]:
    """Split a group into packs of at most `most` runs: of one size where that size is above most / 2.

    Otherwise the sizes of two packs differ by at most one run.
    """
    equal = next((size for size in range(most, most // 2, -1) if len(group) % size == 0), None)
    packs = len(group) // equal if equal else math.ceil(len(group) / most)
    sizes = [len(group) // packs + (number < len(group) % packs) for number in range(packs)]
    ends = list(accumulate(sizes))
    return [list(group[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
