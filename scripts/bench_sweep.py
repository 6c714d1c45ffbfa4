#!/usr/bin/env python3
"""Measure the runs/hour of a sweep: packed, one run at a time, and as a plain PyTorch loop.

    .venv/bin/python scripts/bench_sweep.py [--runs 16] [--steps 2000] [--models 4x128] [--precisions fp32,bf16]

Every side trains the same model on the same corpus, in a process of its own, so that compiled code is not shared. The
sides take turns of a few steps; while one works the others wait. The sides are

- *plain*: `bench_train.Plain`, eager and compiled as a whole, in the precision of the line, one run at a time;
- *single*: normlab's loop (batches, step, statistics in every tenth step), one run at a time, eager and compiled;
- *packed*: the same loop over all runs as one stacked computation, eager and compiled.

The time of a sweep is its set-up (models, and compilation from an empty cache) plus its steps at the median ms/step. Of
runs that compile one after the other only the first compiles; the set-up of the others, from the cache, is measured
too. Evaluations, checkpoints and the start of processes are left out; a pack saves the starts of all its runs but one.

A ratio compares runs/hour with the plain loop in fp32, the plain loop in the same precision (eager, and compiled), and
one run at a time in the same code, which separates the effects of precision, compilation and packing. The quartiles are
of the turns.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from bench_train import MODELS, MODELS_ON_GPU, Plain

from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.data.corpus import open_corpus
from normlab.store.runs import RunFolder
from normlab.training.loop import Loop
from normlab.training.machine import apply, resolve
from normlab.training.training_run import TrainingRun

WARM_UP = 12
"""Steps before a side is timed, in which the steps with and without statistics compile."""
TURN = 10
"""Steps in a turn; one of them has statistics, as by default."""


@dataclass(frozen=True, slots=True)
class Work:
    """The runs that a process of a side trains."""

    overrides: tuple[str, ...]
    runs: int
    """The number of runs in a pack."""
    compiled: bool
    plain: bool = False

    def configs(self) -> list[RunConfig]:
        """Return the configs of the runs."""
        compile_option = f"compile={'on' if self.compiled else 'off'}"
        return [
            compose_run([*self.overrides, compile_option, f"seed={seed}", "tracking.wandb=off"])
            for seed in range(self.runs)
        ]


class Side:
    """One way to train the sweep, in a process of its own that takes steps on request."""

    def __init__(self, name: str, precision: str, work: Work, *, twice: bool) -> None:
        self.name, self.precision, self.pack_size = name, precision, work.runs
        self.turns: list[float] = []
        """Seconds per step in each turn."""
        self.cpu_turns: list[float] = []
        """Processor seconds per step in each turn, of all threads; they hardly depend on other processes."""
        self.first_setup_s, self.next_setup_s = self._start(work), 0.0
        """Set-up time of the first pack or run, and of each later one."""
        if twice:
            self.stop()
            self.next_setup_s = self._start(work)

    def _start(self, work: Work) -> float:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=serve, args=(child, work), daemon=True)
        self._process.start()
        child.close()
        return self._pipe.recv()

    def turn(self, count: int) -> None:
        """Take `count` steps."""
        self._pipe.send(count)
        seconds, cpu_seconds = self._pipe.recv()
        self.turns.append(seconds / count)
        self.cpu_turns.append(cpu_seconds / count)

    def stop(self) -> None:
        """Stop the process."""
        self._pipe.send(0)
        self._process.join()

    def runs_per_hour(self, runs: int, steps: int) -> list[float]:
        """Return the runs/hour at the speed of each turn."""
        packs = runs / self.pack_size
        setup_s = self.first_setup_s + (packs - 1) * self.next_setup_s
        return [3600 * runs / (setup_s + packs * steps * step_s) for step_s in self.turns]


def serve(pipe: Connection, work: Work) -> None:
    """Build a side and send its set-up time, then take steps as the pipe requests, until 0."""
    logging.disable(logging.WARNING)
    configs = work.configs()
    resolved, corpus = resolve(configs[0]), open_corpus(configs[0].data)
    sync = torch.cuda.synchronize if resolved.device == "cuda" else lambda: None
    start = time.perf_counter()
    if work.plain:
        steps = Plain(configs[0], resolved, corpus, "model" if work.compiled else None).steps
        steps(WARM_UP)
    else:
        apply(resolved)
        loop = Loop([TrainingRun(config, RunFolder("nowhere")) for config in configs], resolved, corpus)
        at = iter(range(configs[0].train.steps))

        def steps(count: int) -> None:
            for _ in range(count):
                loop.take_step(next(at))

        steps(WARM_UP)
    sync()
    pipe.send(time.perf_counter() - start)
    while count := pipe.recv():
        start, cpu_start = time.perf_counter(), time.process_time()
        steps(count)
        sync()
        pipe.send((time.perf_counter() - start, time.process_time() - cpu_start))


def sides_of(overrides: Sequence[str], precision: str, options: argparse.Namespace) -> Iterator[Side]:
    """Yield every side in a precision."""
    overrides = (*overrides, f"precision={precision}", f"device={options.device}")
    yield Side("plain", precision, Work(overrides, 1, compiled=False, plain=True), twice=False)
    if options.compile:
        with empty_cache():
            work = Work(overrides, 1, compiled=True, plain=True)
            side = Side("plain, compiled", precision, work, twice=options.runs > 1)
        yield side
    for kind, compiled in (("eager", False), ("compiled", True))[: 1 + options.compile]:
        for name, runs in (("single", 1), (f"packed by {options.pack}", options.pack)):
            with empty_cache():
                side = Side(f"{name}, {kind}", precision, Work(overrides, runs, compiled), twice=options.runs > runs)
            yield side


@contextmanager
def empty_cache() -> Iterator[None]:
    """Use an empty compile cache, as on a first sweep."""
    with tempfile.TemporaryDirectory(prefix="normlab-bench-", ignore_cleanup_errors=True) as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        yield


def measure(sides: Sequence[Side], rounds: int) -> None:
    """Run turns of every side in rotation, each round starting with the next side."""
    for number in range(rounds):
        for side in (*sides[number % len(sides) :], *sides[: number % len(sides)]):
            side.turn(TURN)


def table(sides: Sequence[Side], options: argparse.Namespace) -> list[str]:
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
            f"{side.precision:9} {side.name:24} {1e3 * median(side.turns) / side.pack_size:18.2f} "
            f"{1e3 * median(side.cpu_turns) / side.pack_size:8.2f} "
            f"{side.first_setup_s:8.1f} {packed:12.2f} {of_fp32:>13} {packed / plain:8.2f} {of_compiled:>10} "
            f"{packed / single:8.2f}  {low:.2f}-{high:.2f}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--runs", type=int, default=16, help="runs of the sweep (default: 16)")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each run (default: 2000)")
    parser.add_argument("--pack", type=int, default=16, help="runs in a pack (default: 16)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side (default: 9)")
    parser.add_argument("--models", default="4x128", help="models, separated by commas (default: 4x128)")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="also compiled sides")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    known = MODELS_ON_GPU if options.device == "cuda" else MODELS
    if unknown := [name for name in options.models.split(",") if name not in known]:
        parser.error(f"--models: {', '.join(unknown)}; choose from {', '.join(known)}")
    logging.disable(logging.WARNING)
    for name in options.models.split(","):
        here = resolve(compose_run([f"device={options.device}"]))
        print(
            f"{name}, {options.runs} runs of {options.steps} steps; torch {torch.__version__}, {here.device_name}, "
            f"{here.threads} threads, {here.instructions}; load before: {os.getloadavg()[0]:.1f}"
        )
        sides: list[Side] = []
        for precision in options.precisions.split(","):
            for side in sides_of(known[name], precision, options):
                print(f"  {precision} {side.name}: {side.first_setup_s:.1f} s set-up", file=sys.stderr)
                sides.append(side)
        measure(sides, options.rounds)
        for side in sides:
            side.stop()
        print("\n".join(table(sides, options)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
