#!/usr/bin/env python3
"""Runs an hour of a sweep: packed, one after the other through the same code, and as a plain PyTorch loop.

    .venv/bin/python scripts/bench_sweep.py [--runs 16] [--steps 2000] [--models 4x128] [--precisions fp32,bf16]

Every side trains the same model on the same corpus, in a process of its own: one's compiled code would be another's
limit. They take turns of a few steps; while one works the others wait. A side is

- *plain*: `bench_train.Plain`, eager, in the precision of the line: one run after the other;
- *alone*: normlab's own loop (batches, step, what is seen inside every tenth step), one run at a time, eager and
  compiled;
- *packed*: the same loop over all runs as one stacked computation, eager and compiled.

What a sweep of so many runs of so many steps takes is what comes before its steps (models and what is compiled, from an
empty cache of its own) and its steps at the median of their times; of runs that are compiled one after the other the
first alone compiles, and the rest take it from the cache, which is measured too. Evaluations, checkpoints and the start
of processes are left out of every side; a pack saves the starts of all its runs but one.

A ratio is of runs an hour: beside the plain loop's in fp32, the plain loop's in the same precision, and one run at a
time through the same code, so that what comes from the precision, from compiling and from packing can be told apart.
The quartiles are of the turns.
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

from normlab.config import RunConfig
from normlab.data.corpus import open_corpus
from normlab.launch import compose_run
from normlab.store.runs import RunFolder
from normlab.train.loop import Loop
from normlab.train.member import TrainingRun
from normlab.train.resolve import apply, resolve

WARM_UP = 12
"""Steps before a side is timed: both kinds of step, of which one is seen into, are compiled then."""
TURN = 10
"""Steps of a turn: one of them is seen into, as by default."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a process of a side is to train."""

    words: tuple[str, ...]
    runs: int
    """At once."""
    compiled: bool
    plain: bool = False

    def configs(self) -> list[RunConfig]:
        """The runs."""
        switch = f"compile={'on' if self.compiled else 'off'}"
        return [compose_run([*self.words, switch, f"seed={seed}", "tracking.wandb=off"]) for seed in range(self.runs)]


class Side:
    """One way to train the sweep, in a process of its own that takes steps when it is told to."""

    def __init__(self, name: str, precision: str, work: Work, *, twice: bool) -> None:
        self.name, self.precision, self.at_once = name, precision, work.runs
        self.turns: list[float] = []
        """Seconds a step, of each turn."""
        self.first_s, self.again_s = self._begin(work), 0.0
        """What comes before the steps of the first pack or run, and of each after it."""
        if twice:
            self.end()
            self.again_s = self._begin(work)

    def _begin(self, work: Work) -> float:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, work), daemon=True)
        self._process.start()
        theirs.close()
        return self._pipe.recv()

    def turn(self, count: int) -> None:
        """Take so many steps."""
        self._pipe.send(count)
        self.turns.append(self._pipe.recv() / count)

    def end(self) -> None:
        """End the process."""
        self._pipe.send(0)
        self._process.join()

    def runs_an_hour(self, runs: int, steps: int) -> list[float]:
        """At each turn's speed."""
        packs = runs / self.at_once
        before = self.first_s + (packs - 1) * self.again_s
        return [3600 * runs / (before + packs * steps * step_s) for step_s in self.turns]


def serve(pipe: Connection, work: Work) -> None:
    """Build a side, tell how long that took, and take as many steps as the pipe says, until it says none."""
    logging.disable(logging.WARNING)
    configs = work.configs()
    resolved, corpus = resolve(configs[0]), open_corpus(configs[0].data)
    sync = torch.cuda.synchronize if resolved.device == "cuda" else lambda: None
    begun = time.perf_counter()
    if work.plain:
        steps = Plain(configs[0], resolved, corpus, None).steps
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
    pipe.send(time.perf_counter() - begun)
    while count := pipe.recv():
        begun = time.perf_counter()
        steps(count)
        sync()
        pipe.send(time.perf_counter() - begun)


def sides_of(words: Sequence[str], precision: str, options: argparse.Namespace) -> Iterator[Side]:
    """Every side in a precision."""
    words = (*words, f"precision={precision}", f"device={options.device}")
    yield Side("plain", precision, Work(words, 1, compiled=False, plain=True), twice=False)
    for kind, compiled in (("eager", False), ("compiled", True)):
        for name, runs in (("alone", 1), (f"packed by {options.pack}", options.pack)):
            with empty_cache():
                side = Side(f"{name}, {kind}", precision, Work(words, runs, compiled), twice=options.runs > runs)
            yield side


@contextmanager
def empty_cache() -> Iterator[None]:
    """Nothing is compiled yet: what a first sweep finds."""
    with tempfile.TemporaryDirectory(prefix="normlab-bench-", ignore_cleanup_errors=True) as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        yield


def measure(sides: Sequence[Side], rounds: int) -> None:
    """Turns of every side, one after the other; who begins moves on."""
    for number in range(rounds):
        for side in (*sides[number % len(sides) :], *sides[: number % len(sides)]):
            side.turn(TURN)


def table(sides: Sequence[Side], options: argparse.Namespace) -> list[str]:
    """A line a side."""
    median = statistics.median
    speed = {(side.precision, side.name): median(side.runs_an_hour(options.runs, options.steps)) for side in sides}
    lines = [
        f"{'precision':9} {'side':24} {'ms a step of a run':>18} {'s before':>8} {'runs an hour':>12} "
        f"{'of plain fp32':>13} {'of plain':>8} {'of alone':>8}  quartiles, of plain"
    ]
    for side in sides:
        plain, mine = speed[side.precision, "plain"], speed[side.precision, side.name]
        alone = speed.get((side.precision, f"alone, {side.name.rpartition(', ')[2]}"), mine)
        of_fp32 = f"{mine / speed['fp32', 'plain']:.2f}" if ("fp32", "plain") in speed else ""
        each = [found / plain for found in side.runs_an_hour(options.runs, options.steps)]
        low, _, high = statistics.quantiles(each, n=4)
        lines.append(
            f"{side.precision:9} {side.name:24} {1e3 * median(side.turns) / side.at_once:18.2f} "
            f"{side.first_s:8.1f} {mine:12.2f} {of_fp32:>13} {mine / plain:8.2f} {mine / alone:8.2f}  "
            f"{low:.2f}-{high:.2f}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--runs", type=int, default=16, help="runs of the sweep (16)")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each (2000)")
    parser.add_argument("--pack", type=int, default=16, help="runs in a pack (16)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side (9)")
    parser.add_argument("--models", default="4x128", help="which, separated by commas")
    parser.add_argument("--precisions", default="fp32,bf16")
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
                print(f"  {precision} {side.name}: {side.first_s:.1f} s before its steps", file=sys.stderr)
                sides.append(side)
        measure(sides, options.rounds)
        for side in sides:
            side.end()
        print("\n".join(table(sides, options)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
