"""Compare the speed of normlab's training with a plain PyTorch loop over the same model, and with nanoGPT.

    python scripts/bench_train.py                    # some minutes on two CPU cores
    python scripts/bench_train.py --compile          # also with torch.compile: some minutes more
    python scripts/bench_train.py --only nanogpt --nanogpt DIR --threads 1 2
    python scripts/bench_train.py --check            # exit 1 below the limits

Every ratio is normlab's tok/s over the other side's: 1 is equal, more is faster. The sides take turns.

- *step*: `train.step.Step` against `logits = model(x); F.cross_entropy; backward; clip_grad_norm_; AdamW(fused=True)`,
  in one process, on the same weights and batches. The two losses are compared, so that both sides do the same work.
- *loop*: normlab with its defaults against a plain loop, both in turns of 10 steps (`sides.py`).
- *nanogpt*: the same, with LayerNorm, against train.py of a clone of karpathy/nanoGPT, which prints the loss every 10
  steps too.

Noise. Both sides run in short turns one after the other (the step: one step; the loops: 10). Each pair gives a ratio;
the table shows the median and the quartiles. Beside it are the ratio of CPU times (all threads of the process), which
excludes waiting for a core, and normlab's additional CPU ms/step. On busy cores, where two threads wait for each other,
`--threads 1` is steadier. The process that sends the record to W&B has a bench of its own, `bench_tracking.py`.
GPUs: `scripts/gpu`.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import nanogpt
import torch
from sides import AS_NORMLAB, MODELS, TURN, NanoGPT, Normlab, Plain, PlainLoop, Training
from turns import Side, Turn, take_turns

from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.data.corpus import open_corpus
from normlab.store.runs import RunFolder
from normlab.training.loop import Loop
from normlab.training.machine import apply, resolve
from normlab.training.optim import hyperparameters_at
from normlab.training.training_run import TrainingRun

LIMITS = {"step": 0.98, "loop": 0.95, "nanogpt": 1 / 1.02}
WITHOUT_LIMITS = {"2x32": ("step", "loop"), "6x384": ("nanogpt",)}
"""Comparisons without a limit, by model; a step of the smallest model is mostly overhead."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    model: str
    comparison: str
    limit: float | None
    tokens: int
    """Tokens in a turn."""
    steps: int
    """Steps in a turn."""
    ours: Sequence[Turn]
    theirs: Sequence[Turn]
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        """The ratio of tok/s of each pair of turns."""
        return [theirs.seconds / ours.seconds for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def failed(self) -> bool:
        """Whether the median ratio is below its limit."""
        return self.limit is not None and statistics.median(self.ratios) < self.limit


def shape_of(run: RunConfig) -> str:
    """Return the name of a model and its batch."""
    return f"{run.model.depth}x{run.model.width}, batch {run.train.batch_size}x{run.model.context}"


@dataclass(slots=True)
class Clock:
    """The turns of one side of a comparison in one process."""

    turns: list[Turn] = field(default_factory=list)
    _start: tuple[float, float] = (0.0, 0.0)

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def __exit__(self, *error: object) -> None:
        wall, cpu = self._start
        self.turns.append(Turn(time.perf_counter() - wall, time.process_time() - cpu, None))


def bench_step(overrides: Sequence[str], rounds: int, device: str, *, compiled: bool) -> Result:
    """Compare the steps on the same batches, in turns of one step."""
    switch = "on" if compiled else "off"
    run = compose_run([*overrides, f"device={device}", f"compile={switch}", "deterministic=false"])
    resolved, corpus = resolve(run), open_corpus(run.data)
    apply(resolved)
    # Only the step and the batches of this loop are used; it writes nothing before `run`.
    loop = Loop([TrainingRun(run, RunFolder("nowhere"))], resolved, corpus)
    step, batches = loop.step, loop.batches
    plain = Plain(run, resolved, corpus, compiled=compiled)
    hyper = hyperparameters_at(run.optim, run.train.steps, run.optim.warmup_steps or 0)
    for group in plain.optimizer.param_groups:
        group["lr"] = hyper.lr
    # Both sides get the same batches in the same order; the first three compile and warm up.
    difference = 0.0
    for number in range(3):
        tokens, targets = batches.batch(number)
        losses = step(tokens, targets, hyper).loss, plain.step(tokens, targets)
        difference = max(difference, abs(losses[0].item() - losses[1].item()))
    clocks = Clock(), Clock()
    for number in range(rounds * 10):
        tokens, targets = batches.batch(3 + number)
        # The first side alternates, since the second one finds the batch in the cache.
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            with clocks[side]:
                if side == 0:
                    step(tokens, targets, hyper)
                else:
                    plain.step(tokens, targets)
    return Result(
        shape_of(run), f"step, {'compiled' if compiled else 'eager'}", LIMITS["step"],
        run.train.batch_size * run.model.context, 1, clocks[0].turns, clocks[1].turns,
        f"first losses agree to {difference:.0e}",
    )  # fmt: skip


def bench_loop(
    ours: Training, theirs: Training, rounds: int, threads: int | None, comparison: str, limit: float | None
) -> Result:
    """Compare two training loops in turns of 10 steps, each with a number of threads or its default."""
    environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    sides = [Side("normlab", ours, {**AS_NORMLAB, **environment}), Side("other", theirs, environment)]
    try:
        for side in sides:
            side.set_up()
        take_turns(sides, rounds)
    finally:
        for side in sides:
            side.stop()
    run, count = ours.config(), "" if threads is None else f", {threads} thread{'s' * (threads > 1)}"
    return Result(
        shape_of(run), comparison + count, limit,
        TURN * run.train.batch_size * run.model.context, TURN, sides[0].turns, sides[1].turns,
    )  # fmt: skip


HEADER = (
    f"{'model':22} {'comparison':38} {'normlab':>10} {'other':>10}  {'ratio':>6} {'quartiles':>13} {'limit':>5} "
    f"{'CPU':>6} {'+ms':>7}  note"
)


def show(line: Result) -> None:
    low, ratio, high = statistics.quantiles(line.ratios, n=4)
    speeds = [line.tokens / statistics.median(turn.seconds for turn in turns) for turns in (line.ours, line.theirs)]
    pairs = [(ours.cpu_seconds, theirs.cpu_seconds) for ours, theirs in zip(line.ours, line.theirs, strict=True)]
    cpu_ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    added_ms = statistics.median(1000 * (ours - theirs) / line.steps for ours, theirs in pairs)
    limit = "" if line.limit is None else f"{line.limit:.2f}"
    mark = "  BELOW THE LIMIT" if line.failed else ""
    print(
        f"{line.model:22} {line.comparison:38} {speeds[0]:10,.0f} {speeds[1]:10,.0f}  {ratio:6.3f} "
        f"{low:6.3f}-{high:6.3f} {limit:>5} {cpu_ratio:6.3f} {added_ms:+7.2f}  {line.note}{mark}",
        flush=True,
    )


def measure(options: argparse.Namespace) -> Iterator[Result]:
    """Yield the results, each as soon as it is measured."""
    for name in options.models:
        overrides = (*MODELS[name], "device=cpu")
        limits = {key: None if key in WITHOUT_LIMITS.get(name, ()) else value for key, value in LIMITS.items()}
        for compiled in (False, True) if options.compile else (False,):
            kind = "compiled" if compiled else "eager"
            ours = Normlab(overrides, compiled)
            if "step" in options.only and options.threads == [None]:
                yield bench_step(overrides, options.rounds, "cpu", compiled=compiled)
            for threads in options.threads:
                if "loop" in options.only:
                    plain = PlainLoop(overrides, compiled)
                    yield bench_loop(ours, plain, options.rounds, threads, f"plain loop, {kind}", limits["loop"])
                if "nanogpt" in options.only and options.nanogpt is not None:
                    theirs = NanoGPT(overrides, compiled, clone=options.nanogpt)
                    ours = Normlab((*overrides, "norm=layernorm"), compiled)
                    yield bench_loop(ours, theirs, options.rounds, threads, f"nanoGPT, {kind}", limits["nanogpt"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds for each line (default: 15)")
    parser.add_argument("--compile", action="store_true", help="also with torch.compile")
    parser.add_argument("--models", nargs="*", choices=MODELS, help="models to measure (default: all)")
    parser.add_argument("--only", nargs="*", choices=LIMITS, help="some of the comparisons")
    nanogpt.add_option(parser, " to compare with")
    parser.add_argument("--threads", nargs="*", type=int, help="OMP_NUM_THREADS of the loops (default: as it is)")
    parser.add_argument("--check", action="store_true", help="exit 1 below the limits")
    options = parser.parse_args()
    options.models, options.only = options.models or [*MODELS], options.only or [*LIMITS]
    options.threads = options.threads or [None]
    if options.rounds < 2:
        parser.error("--rounds: must be at least 2")
    if options.nanogpt is None and options.only == ["nanogpt"]:
        parser.error("--only nanogpt: needs --nanogpt DIR")

    logging.disable(logging.WARNING)
    start = time.perf_counter()
    resolved = resolve(compose_run(["device=cpu"]))
    commit = "" if options.nanogpt is None else f", nanoGPT {nanogpt.commit_of(options.nanogpt)[:12]}"
    print(
        f"torch {torch.__version__}, {resolved.precision}, {resolved.threads} threads, {resolved.instructions}"
        f"{commit}; load before: {os.getloadavg()[0]:.1f}\n{HEADER}",
        flush=True,
    )
    failed = False
    for line in measure(options):
        show(line)
        failed |= line.failed
    print(f"{time.perf_counter() - start:.0f} s; load after: {os.getloadavg()[0]:.1f}")
    return int(options.check and failed)


if __name__ == "__main__":
    sys.exit(main())
