"""Time `normlab summarize --by norm,placement` on 1,000 runs of 2,000 steps.

    python scripts/bench_summarize.py            # two minutes on two CPU cores
    python scripts/bench_summarize.py --check    # exit 1 if the median exceeds the limit of two seconds

The folders are those of `synthetic_runs.py`, without statistics: a real run.json, 2,000 training rows with their
paces, 21 evaluations, and a status with the counts of spikes. Five norms, four placements, five learning rates, ten
seeds; one in fifty diverged. The runs are not trained, since the time to read numbers does not depend on them.

Every time is the wall time of a new process.
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

from synthetic_runs import Record, write_run

from normlab.cgroup import allowed_cores
from normlab.store.format import DIVERGED, FINISHED, RUNS_FOLDER

NORMS = ("rmsnorm", "layernorm", "batchnorm", "dyt", "scalenorm")
PLACEMENTS = ("pre", "post", "peri", "deepnorm")
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SEEDS = 10
STEPS = 2000
LIMIT_S = 2.0
"""The limit of the median."""


def record_of(norm: str, placement: str, lr: float, seed: int) -> Record:
    """Return the record of one run."""
    rng = random.Random(f"{norm} {placement} {lr} {seed}")
    at = rng.randrange(200, STEPS) if rng.random() < 0.02 else None
    return Record(
        norm=norm, placement=placement, depth=8, width=256, context=256, lr=lr, seed=seed, steps=STEPS,
        outcome=FINISHED if at is None else DIVERGED, at=at, stats_every=None,
    )  # fmt: skip


def time_once(arguments: list[str]) -> float:
    """Return the seconds of a new process, which must succeed."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "normlab", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"normlab {' '.join(arguments)}: exit {done.returncode}\n{done.stderr}")
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=7, help="processes for each command (default: 7)")
    parser.add_argument("--runs", type=int, default=1000, help="number of runs (default: 1000)")
    parser.add_argument("--check", action="store_true", help="exit 1 above the limit")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="normlab-bench-") as folder:
        start, size, written = time.perf_counter(), 0, 0
        grid = itertools.product(range(SEEDS), RATES, NORMS, PLACEMENTS)
        for seed, lr, norm, placement in itertools.islice(grid, options.runs):
            size += write_run(Path(folder, RUNS_FOLDER), record_of(norm, placement, lr, seed)).size()
            written += 1
        text = f"{written} runs of {STEPS} steps, {size / 2**20:.0f} MiB of rows"
        print(f"{text}, written in {time.perf_counter() - start:.0f} s", flush=True)
        print(f"load before: {os.getloadavg()[0]:.1f} on {allowed_cores()} cores", flush=True)
        by = ["summarize", folder, "--by", "norm,placement"]
        commands = {
            "--by norm,placement": by,
            "... --against norm=layernorm": [*by, "--against", "norm=layernorm"],
            "... --format json": [*by, "--format", "json"],
            "... --target 2.5": [*by, "--target", "2.5"],
        }
        seconds: dict[str, list[float]] = {label: [] for label in commands}
        for _ in range(options.times):
            for label, arguments in commands.items():  # in turns, so that a busy minute affects all of them
                seconds[label].append(time_once(arguments))
    print(f"\n{'normlab summarize':32} {'min':>7} {'median':>7}")
    for label, times in seconds.items():
        print(f"{label:32} {min(times):7.3f} {statistics.median(times):7.3f}")
    median = statistics.median(seconds["--by norm,placement"])
    passed = median < LIMIT_S
    print(f"\n{written} runs in {median:.2f} s, limit {LIMIT_S:g} s: {'ok' if passed else 'TOO SLOW'}")
    return int(options.check and not passed)


if __name__ == "__main__":
    sys.exit(main())
