"""Measure the cost of statistics on a CPU: also of compiled blocks. For a GPU: `scripts/gpu --part statistics`.

    python scripts/bench/bench_stats.py              # some minutes
    python scripts/bench/bench_stats.py --check      # exit 1 above 1.10 every step, 1.02 at the default cadence

Every number is a step's CPU time with statistics over the CPU time of the same step without them: 1 is free. All sides
run in one process and one thread, on the same batches. Each pair of turns gives a ratio; the table shows the median and
the quartiles. The steps of two turns are interleaved (one of the first, two of the second, one of the first), so that
neither a slow second nor the cache after a measured step counts for the wrong side.

- *core*: every core statistic (`normlab list stats`) in every step, copied to the host; turns of two steps.
- *core at the default*: turns of ten steps, one of them measured.

Shapes: B batch, T context.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from turns import table

from normlab.catalogue.statistics.statistic import CORE
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.model.groups import groups_of
from normlab.model.init import build_model
from normlab.model.runner import SingleRun
from normlab.training.machine import apply, resolve
from normlab.training.measure.core import CoreStatistics
from normlab.training.optim import Optimizer, hyperparameters_at
from normlab.training.step import Step

VOCAB = 512
LIMITS = {"core": 1.10, "core at the default": 1.02}
EVERY = 10
MODELS = {
    "2x32": ["model=gpt2_nano"],
    "6x384": ["model=gpt2_mini", "model.context=128", "train.batch_size=4"],
    "24x128": ["model=gpt2_tiny", "model.depth=24", "model.context=128", "train.batch_size=8"],
}
WITHOUT_LIMITS = ("2x32",)
"""Models that are measured only by name: a step that is mostly overhead."""
Turn = Callable[[Tensor, Tensor], Any]
"""One step on tokens and targets, (B, T)."""


def ours(config: RunConfig, compiled: bool) -> Callable[[bool], Turn]:
    """Return normlab's step: with statistics, copied to the host, or without."""
    runner = SingleRun(build_model(config, VOCAB), compiled=compiled)
    optimizer = Optimizer([config.optim], runner.params, groups_of(runner.model))
    measure = CoreStatistics(runner, config.stats.names(CORE))
    step = Step(
        runner, optimizer, clip=config.optim.clip, measure=measure, autocast=resolve(config).autocast(),
        project=None,
    )  # fmt: skip
    hyper = [hyperparameters_at(config.optim, config.train.steps, config.optim.warmup_steps or 0)]

    def turn(measured: bool) -> Turn:
        def once(tokens: Tensor, targets: Tensor) -> Any:
            statistics = step(tokens, targets, hyper, measured=measured).measured
            return None if statistics is None else statistics.values.cpu()

        return once

    return turn


@dataclass(slots=True)
class Pair:
    name: str
    side: Sequence[Turn]
    plain: Sequence[Turn]
    ratios: list[float]


def times(pair: Pair, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Return the CPU seconds of one turn with and one without statistics."""
    seconds = {"side": 0.0, "plain": 0.0}
    both = {"side": pair.side, "plain": pair.plain}
    order = ("plain", "side")
    for number, (tokens, targets) in enumerate(batches):
        for name in order if number % 2 == 0 else reversed(order):
            start = time.process_time()
            both[name][number](tokens, targets)
            seconds[name] += time.process_time() - start
    return seconds["side"], seconds["plain"]


def bench(overrides: Sequence[str], compiled: bool, rounds: int) -> dict[str, Pair]:
    config = compose_run([*overrides, "device=cpu", f"compile={'on' if compiled else 'off'}", "deterministic=false"])
    apply(resolve(config))
    torch.compiler.reset()
    step = ours(config, compiled)
    pairs = [
        Pair("core", [step(True)] * 2, [step(False)] * 2, []),
        Pair("core at the default", [step(True)] + [step(False)] * (EVERY - 1), [step(False)] * EVERY, []),
    ]
    generator = torch.Generator().manual_seed(0)
    shape = (2, config.train.batch_size, config.model.context)
    for number in range(-2, rounds):
        for pair in pairs:
            batches: list[tuple[Tensor, Tensor]] = []
            for _ in pair.side:
                tokens, targets = torch.randint(0, VOCAB, shape, generator=generator)
                batches.append((tokens, targets))
            side_s, plain_s = times(pair, batches)
            if number >= 0:  # the first two rounds compile
                pair.ratios.append(side_s / plain_s)
    return {pair.name: pair for pair in pairs}


def format_ratios(pair: Pair) -> str:
    low, middle, high = statistics.quantiles(pair.ratios, n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="pairs of turns of each side (default: 20)")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=["6x384", "24x128"], help="models")
    parser.add_argument("--compile", nargs="*", choices=["off", "on"], default=["off", "on"], help="default: both")
    parser.add_argument("--check", action="store_true", help="exit 1 above the limits")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, above = [], False
    for name in args.models:
        for switch in args.compile:
            pairs = bench(MODELS[name], switch == "on", args.rounds)
            rows.append({"model": name, "compile": switch, **{key: format_ratios(pair) for key, pair in pairs.items()}})
            print(f"{name}, compile {switch}: measured", file=sys.stderr, flush=True)
            if name not in WITHOUT_LIMITS:
                above |= any(statistics.median(pairs[key].ratios) > limit for key, limit in LIMITS.items())
    limits = ", ".join(f"{name} {limit}" for name, limit in LIMITS.items())
    print(f"{table(rows)}\n\nlimits: {limits}: {'TOO SLOW' if above else 'ok'}")
    return int(args.check and above)


if __name__ == "__main__":
    sys.exit(main())
