#!/usr/bin/env python3
"""Measure the runs/hour of a sweep: packed, one run at a time, and as a plain PyTorch loop; or its wall clock.

    .venv/bin/python scripts/bench_sweep.py [--runs 16] [--steps 2000] [--models 4x128] [--precisions fp32,bf16]
    .venv/bin/python scripts/bench_sweep.py --nanogpt DIR [--runs 16] [--steps 100] [--models 2x32] [--at-once 2]

Without `--nanogpt`, every side trains the same model on the same corpus, in a process of its own (`sides.py`), so that
compiled code is not shared. The sides take turns of a few steps. They are

- *plain*: the plain loop, eager and compiled as a whole, in the precision of the line, one run at a time;
- *single*: normlab with its defaults, one run at a time, eager and compiled;
- *packed*: the same over all runs as one stacked computation, eager and compiled.

The time of a sweep is its set-up (models, and compilation from an empty cache) plus its steps at the median ms/step. Of
runs that compile one after the other only the first compiles; the set-up of the others, from the cache, is measured
too. Evaluations, checkpoints and the start of processes are left out; a pack saves the starts of all its runs but one.
A ratio compares runs/hour with the plain loop in fp32, the plain loop in the same precision (eager, and compiled), and
one run at a time in the same code, which separates the effects of precision, compilation and packing. The quartiles are
of the turns.

With `--nanogpt`, the command `normlab sweep` with its defaults trains the runs, and then as many processes of nanoGPT's
train.py, some at once; both with all starts, evaluations, records and checkpoints. The ratio is that of the seconds per
run. Each side trains all runs once a round.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import nanogpt
import torch
from sides import AS_NORMLAB, MODELS, Normlab, PlainLoop, Training
from turns import Side, take_turns

from normlab.config.compose import compose_run
from normlab.data.corpus import open_corpus
from normlab.training.machine import resolve

DEFAULTS = {False: {"steps": 2000, "models": "4x128", "rounds": 9}, True: {"steps": 100, "models": "2x32", "rounds": 3}}
"""Defaults without and with nanoGPT."""


# Sides that take turns.


class Measured:
    """A side of the table, with the time to set it up."""

    def __init__(self, name: str, precision: str, work: Training, *, twice: bool) -> None:
        self.name, self.precision = name, precision
        self.pack_size = work.runs if isinstance(work, Normlab) else 1
        with tempfile.TemporaryDirectory(prefix="normlab-bench-", ignore_cleanup_errors=True) as cache:
            environment = {**AS_NORMLAB, "TORCHINDUCTOR_CACHE_DIR": cache}
            self.side = Side(name, work, environment)
            self.side.set_up()
            self.first_setup_s, self.next_setup_s = self.side.setup_s, 0.0
            """Set-up time of the first pack or run, and of each later one."""
            if twice:
                self.side.stop()
                self.side = Side(name, work, environment)
                self.side.set_up()
                self.next_setup_s = self.side.setup_s

    @property
    def step_s(self) -> list[float]:
        """Seconds per step in each turn."""
        return [turn.seconds / 10 for turn in self.side.turns]

    def runs_per_hour(self, runs: int, steps: int) -> list[float]:
        """Return the runs/hour at the speed of each turn."""
        packs = runs / self.pack_size
        setup_s = self.first_setup_s + (packs - 1) * self.next_setup_s
        return [3600 * runs / (setup_s + packs * steps * step_s) for step_s in self.step_s]


def sides_of(model: Sequence[str], precision: str, options: argparse.Namespace) -> Iterator[Measured]:
    """Yield every side in a precision."""
    overrides = (*model, f"precision={precision}", "device=cpu")
    plain, single = PlainLoop(overrides), Normlab(overrides)
    kinds = (("eager", False), ("compiled", True))[: 1 + options.compile]
    yield Measured("plain", precision, plain, twice=False)
    if options.compile:
        yield Measured("plain, compiled", precision, replace(plain, compiled=True), twice=options.runs > 1)
    for kind, compiled in kinds:
        for name, runs in (("single", 1), (f"packed by {options.pack}", options.pack)):
            work = replace(single, compiled=compiled, runs=runs)
            yield Measured(f"{name}, {kind}", precision, work, twice=options.runs > runs)


def table(sides: Sequence[Measured], options: argparse.Namespace) -> list[str]:
    """Return one line for each side."""
    median = statistics.median
    speed = {(side.precision, side.name): median(side.runs_per_hour(options.runs, options.steps)) for side in sides}
    lines = [
        f"{'precision':9} {'side':24} {'ms/step per run':>18} {'cpu ms':>8} {'set-up s':>8} {'runs/hour':>12} "
        f"{'/ plain fp32':>13} {'/ plain':>8} {'/ compiled':>10} {'/ single':>8}  quartiles of / plain"
    ]
    for side in sides:
        plain, packed = speed[side.precision, "plain"], speed[side.precision, side.name]
        single = speed.get((side.precision, f"single, {side.name.rpartition(', ')[2]}"), packed)
        of_fp32 = f"{packed / speed['fp32', 'plain']:.2f}" if ("fp32", "plain") in speed else ""
        compiled = speed.get((side.precision, "plain, compiled"))
        of_compiled = "" if compiled is None else f"{packed / compiled:.2f}"
        ratios = [value / plain for value in side.runs_per_hour(options.runs, options.steps)]
        low, _, high = statistics.quantiles(ratios, n=4)
        lines.append(
            f"{side.precision:9} {side.name:24} {1e3 * median(side.step_s) / side.pack_size:18.2f} "
            f"{1e2 * median(turn.cpu_seconds for turn in side.side.turns) / side.pack_size:8.2f} "
            f"{side.first_setup_s:8.1f} {packed:12.2f} {of_fp32:>13} {packed / plain:8.2f} {of_compiled:>10} "
            f"{packed / single:8.2f}  {low:.2f}-{high:.2f}"
        )
    return lines


# The wall clock.


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


def compare_wall_clocks(name: str, options: argparse.Namespace) -> None:
    """Print the seconds per run of both sides in each round, and their ratio."""
    overrides, runs, steps = (*MODELS[name], "device=cpu"), options.runs, options.steps
    ratios: list[float] = []
    for number in range(options.rounds):
        ours = sweep_seconds(overrides, runs, steps) / runs
        theirs = nanogpt_seconds(options.nanogpt, overrides, runs, steps, options.at_once) / runs
        ratios.append(theirs / ours)
        print(
            f"  round {number + 1}: normlab sweep {ours:.2f} s/run, nanoGPT {options.at_once} at once "
            f"{theirs:.2f} s/run, ratio {theirs / ours:.2f}",
            flush=True,
        )
    print(f"  median ratio {statistics.median(ratios):.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--runs", type=int, default=16, help="runs of the sweep (default: 16)")
    parser.add_argument("--steps", type=int, help="steps of each run (default: 2000; with nanoGPT 100)")
    parser.add_argument("--pack", type=int, default=16, help="runs in a pack (default: 16)")
    parser.add_argument("--rounds", type=int, help="turns of each side (default: 9; with nanoGPT 3)")
    parser.add_argument("--models", help="models, separated by commas (default: 4x128; with nanoGPT 2x32)")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="also compiled sides")
    nanogpt.add_option(parser, ", with whose train.py only the wall clock is compared")
    parser.add_argument("--at-once", type=int, default=2, help="processes of nanoGPT at once (default: 2)")
    options = parser.parse_args()
    for key, value in DEFAULTS[options.nanogpt is not None].items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    if unknown := [name for name in options.models.split(",") if name not in MODELS]:
        parser.error(f"--models: {', '.join(unknown)}; choose from {', '.join(MODELS)}")
    if options.nanogpt is None and options.rounds < 2:
        parser.error("--rounds: must be at least 2")
    logging.disable(logging.WARNING)
    for name in options.models.split(","):
        here = resolve(compose_run(["device=cpu"]))
        print(
            f"{name}, {options.runs} runs of {options.steps} steps; torch {torch.__version__}, "
            f"{here.threads} threads, {here.instructions}; load before: {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        if options.nanogpt is not None:
            compare_wall_clocks(name, options)
            continue
        sides: list[Measured] = []
        for precision in options.precisions.split(","):
            for side in sides_of(MODELS[name], precision, options):
                print(f"  {precision} {side.name}: {side.first_setup_s:.1f} s set-up", file=sys.stderr)
                sides.append(side)
        take_turns([side.side for side in sides], options.rounds)
        for side in sides:
            side.side.stop()
        print("\n".join(table(sides, options)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
