"""Measure the wall clock of a sweep: `normlab sweep` in packs and one run at a time, and processes of nanoGPT.

    python scripts/bench/bench_sweep.py [--nanogpt DIR] [--runs 16] [--steps 100] [--model 2x32] [--at-once 2]

Each side trains all runs once a round, with all starts, evaluations, records and checkpoints. nanoGPT's train.py is one
process for each run, some at once. The ratios are those of the seconds per run.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import nanogpt
from sides import MODELS

from normlab.config.compose import compose_run
from normlab.data.corpus import open_corpus
from normlab.training.machine import resolve


def sweep_seconds(overrides: Sequence[str], runs: int, steps: int) -> float:
    """Return the wall clock of the command `normlab sweep` over some seeds."""
    with tempfile.TemporaryDirectory(prefix="normlab-bench-") as folder:
        command = [
            sys.executable, "-m", "normlab", "sweep", *overrides, f"seed=range({runs})", f"train.steps={steps}",
            "tracking.wandb=off", f"results_dir={folder}", "sweep.name=bench",
        ]  # fmt: skip
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return seconds


def nanogpt_seconds(
    clone: Path, overrides: Sequence[str], runs: int, steps: int, at_once: int, *, compiled: bool = False
) -> float:
    """Return the wall clock of one process of nanoGPT's train.py for each run, some at once."""
    config = compose_run([*overrides, f"train.steps={steps}"])
    resolved = resolve(config)
    arguments = nanogpt.arguments(
        config, steps=steps, device=resolved.device, precision=resolved.precision, compiled=compiled, evaluates=True
    )
    with tempfile.TemporaryDirectory(prefix="normlab-bench-") as folder:
        nanogpt.make_folder(clone, Path(folder), open_corpus(config.data))
        running: list[subprocess.Popen[bytes]] = []
        start = time.perf_counter()
        try:
            for run in range(runs):
                if len(running) == at_once:
                    wait_for_one(running)
                command = [sys.executable, "train.py", *arguments, f"--out_dir=out{run}"]
                running.append(subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL))
            while running:
                wait_for_one(running)
        finally:
            for process in running:
                process.kill()
        return time.perf_counter() - start


def wait_for_one(running: list[subprocess.Popen[bytes]]) -> None:
    """Wait until one of some processes has ended, and remove it."""
    while all(process.poll() is None for process in running):
        time.sleep(0.01)
    done = next(process for process in running if process.poll() is not None)
    if done.returncode:
        raise SystemExit(f"nanoGPT's train.py: exit code {done.returncode}")
    running.remove(done)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=16, help="runs of the sweep (default: 16)")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run (default: 100)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (default: 3)")
    parser.add_argument("--model", choices=MODELS, default="2x32", help="the model (default: 2x32)")
    nanogpt.add_option(parser, " to compare with")
    parser.add_argument("--at-once", type=int, default=2, help="processes of nanoGPT at once (default: 2)")
    options = parser.parse_args()
    overrides, runs, steps = (*MODELS[options.model], "device=cpu"), options.runs, options.steps
    sides = {
        "normlab": lambda: sweep_seconds(overrides, runs, steps),
        "normlab, packs off": lambda: sweep_seconds([*overrides, "sweep.pack=off"], runs, steps),
    }
    if options.nanogpt is not None:
        sides["nanoGPT"] = lambda: nanogpt_seconds(options.nanogpt, overrides, runs, steps, options.at_once)
    print(f"{options.model}, {runs} runs of {steps} steps; load before: {os.getloadavg()[0]:.1f}", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.rounds):
        for name, measure in sides.items():
            seconds[name].append(measure() / runs)
            print(f"  round {number + 1}: {name} {seconds[name][-1]:.2f} s/run", flush=True)
    for name, times in seconds.items():
        ratio = statistics.median(theirs / ours for theirs, ours in zip(times, seconds["normlab"], strict=True))
        print(f"{name}: {statistics.median(times):.2f} s/run, {ratio:.2f} times normlab's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
