"""Measure how much a busy process slows a run on a CPU, in ms/step.

    python scripts/bench_neighbour.py            # two minutes on two CPU cores
    python scripts/bench_neighbour.py --check    # exit 1 if a ratio exceeds its limit

There is one process for each wait policy of OpenMP's threads: libgomp's default, normlab's (`normlab/openmp.py`) and
PASSIVE. The processes take turns of a few steps, so that a drift of the machine's speed affects all of them. The busy
process is a loop in one thread. The times are medians over the turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from statistics import median

from normlab.cgroup import allowed_cores

POLICIES = {"libgomp": {"GOMP_SPINCOUNT": "300000"}, "normlab": {}, "passive": {"OMP_WAIT_POLICY": "PASSIVE"}}
"""Environment variables of each policy; without variables, `limit_spinning` sets the policy."""
ALONE_LIMIT, BESIDE_LIMIT = 1.03, 2.0
"""Limits of two ratios of ms/step: normlab over libgomp, both alone; normlab beside a busy process over alone."""
STEPS = 5
"""Steps in a turn."""


def take_turns(overrides: list[str]) -> None:
    """Take STEPS steps for each line of standard input, and print the ms/step."""
    from normlab.openmp import limit_spinning

    limit_spinning()
    from normlab.config.compose import compose_run
    from normlab.data.corpus import open_corpus
    from normlab.store.runs import RunFolder
    from normlab.training.loop import Loop
    from normlab.training.machine import apply, resolve
    from normlab.training.training_run import TrainingRun

    config = compose_run(overrides)
    resolved = resolve(config)
    apply(resolved)
    # Only the steps of this loop are called; it writes nothing before `run`.
    loop = Loop([TrainingRun(config, RunFolder("nowhere"))], resolved, open_corpus(config.data))
    for step in range(3):
        loop.take_step(step)
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        for step in range(STEPS):
            loop.take_step(step)
        print(1e3 * (time.perf_counter() - start) / STEPS, flush=True)


def measure(runs: dict[str, subprocess.Popen[str]], turns: int) -> dict[str, float]:
    """Return the median ms/step of each policy, measured in turns."""
    times: dict[str, list[float]] = {policy: [] for policy in runs}
    for _ in range(turns):
        for policy, run in runs.items():
            assert run.stdin is not None
            assert run.stdout is not None
            run.stdin.write("\n")
            run.stdin.flush()
            times[policy].append(float(run.stdout.readline()))
    return {policy: median(values) for policy, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15, help="turns of each policy, alone and beside (default: 15)")
    parser.add_argument("--check", action="store_true", help="exit 1 if a ratio exceeds its limit")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="overrides of the run, as for `normlab train`")
    options = parser.parse_args()
    overrides = [*options.overrides, "device=cpu", "compile=off", "stats=off", "tracking.wandb=off"]
    if options.child:
        take_turns(overrides)
        return 0
    plain = {name: text for name, text in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    runs = {
        policy: subprocess.Popen(
            [sys.executable, __file__, "--child", *options.overrides],
            env=plain | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for policy, variables in POLICIES.items()
    }  # fmt: skip
    neighbour = None
    try:
        for run in runs.values():
            assert run.stdout is not None
            run.stdout.readline()
        print(f"{allowed_cores()} cores, load before: {os.getloadavg()[0]:.1f}")
        alone = measure(runs, options.turns)
        neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        beside = measure(runs, options.turns)
    finally:
        for process in [*runs.values(), *([neighbour] if neighbour else [])]:
            process.kill()
            process.wait()
    print(f"{'wait policy':14} {'ms/step alone':>14} {'beside':>8} {'beside/alone':>13} {'alone/libgomp':>14}")
    libgomp = alone["libgomp"]
    for policy in POLICIES:
        ratios = f"{beside[policy] / alone[policy]:13.2f} {alone[policy] / libgomp:14.2f}"
        print(f"{policy:14} {alone[policy]:14.1f} {beside[policy]:8.1f} {ratios}")
    passed = alone["normlab"] <= ALONE_LIMIT * libgomp and beside["normlab"] <= BESIDE_LIMIT * alone["normlab"]
    print(f"limits: alone {ALONE_LIMIT:g}, beside {BESIDE_LIMIT:g}: {'ok' if passed else 'TOO SLOW'}")
    return int(options.check and not passed)


if __name__ == "__main__":
    sys.exit(main())
