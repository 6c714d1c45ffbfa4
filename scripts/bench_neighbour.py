"""What a busy neighbour costs a run on a CPU: milliseconds a step, alone and beside one busy process.

    python scripts/bench_neighbour.py            # two minutes on two CPU cores
    python scripts/bench_neighbour.py --check    # exit 1 where a ratio is over its bar

One process for each way in which OpenMP's threads wait: libgomp's own, normlab's (`normlab/openmp.py`) and PASSIVE.
The processes take turns of a few steps, so that a machine whose speed drifts slows all of them alike. The neighbour is
a loop of one thread. The times are medians over the turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from statistics import median

WAYS = {"libgomp's own": {"GOMP_SPINCOUNT": "300000"}, "normlab's": {}, "passive": {"OMP_WAIT_POLICY": "PASSIVE"}}
"""Environments; with none of the variables set, `limit_spinning` decides."""
ALONE_BAR, BESIDE_BAR = 1.03, 2.0
"""normlab's way alone over libgomp's own alone; and beside a busy process over alone."""
STEPS = 5
"""Steps of a turn."""


def take_turns(overrides: list[str]) -> None:
    """Take STEPS steps for each line of standard input, and print the milliseconds of one."""
    from normlab.openmp import limit_spinning

    limit_spinning()
    from normlab.data.corpus import open_corpus
    from normlab.launch import compose_run
    from normlab.store.runs import RunFolder
    from normlab.train.loop import Loop
    from normlab.train.member import TrainingRun
    from normlab.train.resolve import apply, resolve

    config = compose_run(overrides)
    resolved = resolve(config)
    apply(resolved)
    # A loop that is never run, for its steps; it writes nothing before it is run.
    loop = Loop([TrainingRun(config, RunFolder("nowhere"))], resolved, open_corpus(config.data))
    for step in range(3):
        loop.take_step(step)
    print("ready", flush=True)
    for _ in sys.stdin:
        since = time.perf_counter()
        for step in range(STEPS):
            loop.take_step(step)
        print(1e3 * (time.perf_counter() - since) / STEPS, flush=True)


def measure(runs: dict[str, subprocess.Popen[str]], turns: int) -> dict[str, float]:
    """Return each way's median milliseconds a step, the ways taking turns."""
    times: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(turns):
        for way, run in runs.items():
            assert run.stdin is not None
            assert run.stdout is not None
            run.stdin.write("\n")
            run.stdin.flush()
            times[way].append(float(run.stdout.readline()))
    return {way: median(own) for way, own in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15, help="turns of each way, alone and beside (15)")
    parser.add_argument("--check", action="store_true", help="exit 1 where a ratio is over its bar")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="of the run, as for `normlab train` (the defaults)")
    asked = parser.parse_args()
    overrides = [*asked.overrides, "device=cpu", "compile=off", "stats=off", "tracking.wandb=off"]
    if asked.child:
        take_turns(overrides)
        return 0
    plain = {name: text for name, text in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    runs = {
        way: subprocess.Popen(
            [sys.executable, __file__, "--child", *asked.overrides],
            env=plain | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for way, variables in WAYS.items()
    }  # fmt: skip
    neighbour = None
    try:
        for run in runs.values():
            assert run.stdout is not None
            run.stdout.readline()
        print(f"{os.cpu_count()} cores, load before: {os.getloadavg()[0]:.1f}")
        alone = measure(runs, asked.turns)
        neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        beside = measure(runs, asked.turns)
    finally:
        for process in [*runs.values(), *([neighbour] if neighbour else [])]:
            process.kill()
            process.wait()
    print(f"{'threads wait':14} {'ms/step alone':>14} {'beside':>8} {'beside/alone':>13} {'alone/own':>10}")
    own = alone["libgomp's own"]
    for way in WAYS:
        ratios = f"{beside[way] / alone[way]:13.2f} {alone[way] / own:10.2f}"
        print(f"{way:14} {alone[way]:14.1f} {beside[way]:8.1f} {ratios}")
    kept = alone["normlab's"] <= ALONE_BAR * own and beside["normlab's"] <= BESIDE_BAR * alone["normlab's"]
    print(f"bars: alone {ALONE_BAR:g}, beside {BESIDE_BAR:g}: {'kept' if kept else 'not kept'}")
    return int(asked.check and not kept)


if __name__ == "__main__":
    sys.exit(main())
