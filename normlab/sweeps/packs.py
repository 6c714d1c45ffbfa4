"""Group runs into packs that train as one stacked computation: a pure function of configs and memory.

Runs that differ only in numbers may share a pack. Runs that differ in an option that changes a shape, a formula or the
control flow may not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from itertools import accumulate

from normlab.config.schema import RunConfig
from normlab.options import plain_tree
from normlab.stats.statistic import PROBE

PROCESS_BYTES = 2**30
"""Assumed memory of a process beside its runs: torch, the compiler and the corpus."""


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


def make_packs(
    configs: Sequence[RunConfig], indices: Sequence[int], alone: Collection[int], size: int
) -> list[list[int]]:
    """Return packs of the given runs, as lists of indices.

    Args:
        configs: The configs of all runs.
        indices: The runs to group.
        alone: The runs among `indices` that must train alone.
        size: Most runs in a pack.
    """
    groups: dict[str, list[int]] = {}
    for index in indices:
        # A probe differentiates twice, through one model; several devices share the batch of one run. In fp16 each run
        # skips other updates, and the coefficients of stacked runs are those of one number of updates.
        config = configs[index]
        trains_alone = index in alone or config.stats.names(PROBE) or config.devices > 1 or config.precision == "fp16"
        groups.setdefault(f"alone: {index}" if trains_alone else pack_key(configs[index]), []).append(index)
    return [pack for group in groups.values() for pack in split(group, size)]


def auto_pack_size(device: str, precision: str, width: int, run_bytes: int, memory_bytes: int) -> int:
    """Return the largest pack size of `sweep.pack=auto`, by a fixed rule.

    - cpu, fp32: 16 up to width 32 (measured: 0.64 of the processor time of a single run); 1 above (width 64: 1.02).
    - cpu, bf16: 16 up to width 128 (measured: 1.26 times eager, 1.58 compiled); 1 above.
    - cuda: 8 up to width 512, where steps are bound by kernel launches; 4 up to width 1024; 1 above. Not measured.

    `results/bench_sweep.md` has the measurements. The size is reduced until `run_bytes` of all runs fill at most half
    of the memory, since `run_bytes` is a lower bound.

    Args:
        device: Device of the training process: cpu or cuda.
        precision: A resolved precision.
        width: Width of the model.
        run_bytes: Lower bound on the memory of one run, in bytes (`memory.estimate`).
        memory_bytes: Memory of the process that trains a pack, in bytes.
    """
    if device == "cuda":
        size = 8 if width <= 512 else 4 if width <= 1024 else 1
    else:
        size = 16 if width <= (128 if precision == "bf16" else 32) else 1
    return max(1, min(size, memory_bytes // (2 * run_bytes)))


def auto_jobs(width: int, run_bytes: int, cores: int, memory_bytes: int) -> int:
    """Return the number of packs that train at once on a CPU without `sweep.jobs`, by a fixed rule.

    Up to width 128, one for each core, with one thread each: two threads wait for each other in every operation, so
    that two processes train 1.4 (width 128) to 2.1 (width 32) times the runs/hour of one. 1 above (not measured).
    The number is reduced until twice `run_bytes` and `PROCESS_BYTES` of each process fit into the memory.

    Args:
        width: Width of the model.
        run_bytes: As for `auto_pack_size`.
        cores: Cores for one device of each run.
        memory_bytes: Memory of this machine, in bytes.
    """
    jobs = cores if width <= 128 else 1
    return max(1, min(jobs, memory_bytes // (2 * run_bytes + PROCESS_BYTES)))


def split(group: Sequence[int], largest: int) -> list[list[int]]:
    """Split a group into packs of at most `largest` runs.

    The packs have equal sizes if a size above largest / 2 divides the group; otherwise sizes differ by at most one.
    """
    equal = next((size for size in range(largest, largest // 2, -1) if len(group) % size == 0), None)
    packs = len(group) // equal if equal else math.ceil(len(group) / largest)
    sizes = [len(group) // packs + (number < len(group) % packs) for number in range(packs)]
    ends = list(accumulate(sizes))
    return [list(group[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
