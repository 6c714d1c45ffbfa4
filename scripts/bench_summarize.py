"""How long `normlab summarize --by norm,placement` takes over 1,000 runs of 2,000 steps.

    python scripts/bench_summarize.py            # two minutes on two CPU cores
    python scripts/bench_summarize.py --check    # exit 1 above the bar: the median of two seconds

The folders are those of `records.py`, without statistics: a run.json as long as a real one, 2,000 rows of training with
their paces, 21 evaluations, and a status with the counts of spikes. Five norms, four placements, five learning rates,
ten seeds; one in fifty diverged. They are not trained: what reading costs does not depend on what the numbers are.

Every time is that of a fresh process, from its start to its end, as a shell sees it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from records import Record, write_run

from normlab.store.schema import DIVERGED, FINISHED, RUNS_FOLDER

NORMS = ("rmsnorm", "layernorm", "batchnorm", "dyt", "scalenorm")
PLACEMENTS = ("pre", "post", "peri", "deepnorm")
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SEEDS = 10
STEPS = 2000
BAR = 2.0
"""Seconds, of the median."""


def record_of(norm: str, placement: str, lr: float, seed: int) -> Record:
    """One of the runs."""
    chance = random.Random(f"{norm} {placement} {lr} {seed}")
    at = chance.randrange(200, STEPS) if chance.random() < 0.02 else None
    return Record(
        norm=norm, placement=placement, depth=8, width=256, context=256, lr=lr, seed=seed, steps=STEPS,
        outcome=FINISHED if at is None else DIVERGED, at=at, stats_every=None,
    )  # fmt: skip


def time_once(words: list[str]) -> float:
    """Seconds of a fresh process that must succeed."""
    since = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "normlab", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"normlab {' '.join(words)}: exit {done.returncode}\n{done.stderr}")
    return time.perf_counter() - since


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=7, help="fresh processes for each command (7)")
    parser.add_argument("--runs", type=int, default=1000, help="run folders (1000)")
    parser.add_argument("--check", action="store_true", help="exit 1 above the bar")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="normlab-bench-") as folder:
        since, size, written = time.perf_counter(), 0, 0
        grid = itertools.product(range(SEEDS), RATES, NORMS, PLACEMENTS)
        for seed, lr, norm, placement in itertools.islice(grid, options.runs):
            size += write_run(Path(folder, RUNS_FOLDER), record_of(norm, placement, lr, seed)).size()
            written += 1
        told = f"{written} runs of {STEPS} steps, {size / 2**20:.0f} MiB of rows"
        print(f"{told}, written in {time.perf_counter() - since:.0f} s", flush=True)
        print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
        by = ["summarize", folder, "--by", "norm,placement"]
        commands = {
            "--by norm,placement": by,
            "... --against norm=layernorm": [*by, "--against", "norm=layernorm"],
            "... --format json": [*by, "--format", "json"],
            "... --target 2.5": [*by, "--target", "2.5"],
        }
        seconds: dict[str, list[float]] = {label: [] for label in commands}
        for _ in range(options.times):
            for label, words in commands.items():  # in turns: a busy minute of the machine falls on all of them
                seconds[label].append(time_once(words))
    print(f"\n{'normlab summarize':32} {'least':>7} {'median':>7}")
    for label, times in seconds.items():
        print(f"{label:32} {min(times):7.3f} {statistics.median(times):7.3f}")
    median = statistics.median(seconds["--by norm,placement"])
    kept = median < BAR
    print(f"\n{written} runs in {median:.2f} s, the bar being {BAR:g} s: {'kept' if kept else 'NOT KEPT'}")
    return int(options.check and not kept)


if __name__ == "__main__":
    sys.exit(main())
