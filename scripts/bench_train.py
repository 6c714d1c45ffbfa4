"""Compare the speed of normlab's training with a plain PyTorch loop over the same model.

    python scripts/bench_train.py              # under five minutes on two CPU cores
    python scripts/bench_train.py --compile    # also with torch.compile: some minutes more
    python scripts/bench_train.py --check      # exit 1 below the limits: 0.98 for the step, 0.95 for the loop

Every ratio is normlab's tok/s over the plain loop's: 1 is equal, more is faster. Both train the same `GPT` from the
same weights, in one process and one thread, in turns:

- *step*: `train.step.Step` against `logits = model(x); F.cross_entropy; backward; clip_grad_norm_; AdamW(fused=True)`
  on the same batches. The two losses are compared, so that both sides do the same work.
- *loop*: `train.run.train` with its defaults (local record of every step, progress bar, deterministic kernels on
  a CPU) against a plain loop that draws random windows, sets the learning rate and prints the loss every 10
  steps. Both leave out evaluations and checkpoints.

Timing of the loop. `train` gets one more tracker after its own, which the loop calls every `log_every` = 10 steps.
Inside that call the plain loop runs 10 steps; between two calls `train` runs 10 unpatched steps. The switch for
deterministic kernels is global in torch, so it is off while the plain loop runs. The process that
sends the record to W&B has a bench of its own, `bench_tracking.py`.

Noise. Both sides run in short turns one after the other (the step: one step, ten pairs a round; the loop: 10 steps, one
pair a round). Each pair gives a ratio; the table shows the median and the quartiles. Beside it are the ratio of CPU
times (all threads of this process), which excludes waiting for a core, and normlab's additional CPU ms/step. On busy
cores, where two threads wait for each other, OMP_NUM_THREADS=1 is steadier.

On a GPU the table has the MFU of both sides (`store/throughput.py`) and, in the note, the memory that a step of each
side takes beside the state. The plain loop is compiled by blocks, as a complete model, and with CUDA graphs
(`mode="reduce-overhead"`). `gpt2_124m` has GPT-2's vocabulary, with random tokens; `12x768` is that model with bytes.

Shapes: N tokens, B batch, T context.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.config.compose import compose_run
from normlab.config.memory import format_size
from normlab.config.optim import AdamW
from normlab.config.schema import RunConfig
from normlab.data.corpus import Corpus, open_corpus
from normlab.model.flops import flops_per_token
from normlab.model.gpt import GPT
from normlab.model.init import build_model
from normlab.store.runs import RunFolder
from normlab.store.throughput import peak_flops
from normlab.tracking.console import Console
from normlab.tracking.tracker import Row
from normlab.training.loop import Loop
from normlab.training.machine import RuntimeSettings, apply, resolve
from normlab.training.optim import hyperparameters_at, learning_rate
from normlab.training.run import train
from normlab.training.training_run import TrainingRun

LIMITS = {"step": 0.98, "loop": 0.95}
PRINT_EVERY = 10
"""Steps between two lines of the plain loop, as in normlab's default."""

MODELS = {
    "2x32": ["model=gpt2_nano"],
    "4x128": ["model=gpt2_tiny"],
    "6x384": ["model=gpt2_mini", "model.context=128", "train.batch_size=2"],
}
"""The smallest, whose step is mostly overhead; the default; and a larger one, with a batch that suits a CPU."""
MODELS_ON_GPU = {
    **MODELS,
    "6x384": ["model=gpt2_mini", "train.batch_size=64"],
    "12x768": ["model=gpt2_124m", "train.batch_size=16"],
    "gpt2_124m": ["model=gpt2_124m", "train.batch_size=16"],
}
WITHOUT_LIMITS = ("2x32",)
"""Models whose ratios have no limit; their lines show the additional ms/step."""

VOCABULARIES = {"gpt2_124m": 50_257}
"""Models whose step has random tokens of another vocabulary than bytes; their loop is not measured."""


# Measuring.


@dataclass(slots=True)
class Clock:
    """Wall and CPU seconds of one side. On a GPU wall time is between two events of its stream."""

    on_gpu: bool
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Time one turn; the device is idle before and after."""
        cpu = time.process_time()
        if self.on_gpu:
            torch.cuda.synchronize()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            last.synchronize()
            self.wall.append(first.elapsed_time(last) / 1000)
        else:
            start = time.perf_counter()
            yield
            self.wall.append(time.perf_counter() - start)
        self.cpu.append(time.process_time() - cpu)


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    model: str
    comparison: str
    limit: str | None
    """The key of its limit, if any."""
    tokens_per_s: tuple[float, float]
    """Medians of normlab and the plain loop."""
    ratios: list[float]
    """One for each pair of turns."""
    cpu_ratio: float
    added_ms: float
    """Additional CPU ms/step of normlab, the median of the pairs."""
    mfu: tuple[float | None, float | None]
    """Model FLOPs utilisation of normlab and the plain loop."""
    note: str

    @property
    def ratio(self) -> float:
        """Return the median ratio."""
        return statistics.median(self.ratios)

    @property
    def failed(self) -> bool:
        """Return whether the ratio is below its limit."""
        return self.limit is not None and self.ratio < LIMITS[self.limit]


def result(
    run: RunConfig,
    vocab_size: int,
    comparison: str,
    limit: str | None,
    ours: Clock,
    plain: Clock,
    steps: int,
    note: str,
) -> Result:
    """Return the result of two clocks with turns of `steps` steps."""
    shape = f"{run.model.depth}x{run.model.width}"
    tokens = steps * run.train.batch_size * run.model.context
    speed = tokens / statistics.median(ours.wall), tokens / statistics.median(plain.wall)
    return Result(
        model=f"{shape}, batch {run.train.batch_size}x{run.model.context}",
        comparison=comparison,
        limit=None if shape in WITHOUT_LIMITS else limit,
        tokens_per_s=speed,
        ratios=[b / a for a, b in zip(ours.wall, plain.wall, strict=True)],
        cpu_ratio=statistics.median(b / a for a, b in zip(ours.cpu, plain.cpu, strict=True)),
        added_ms=statistics.median(1000 * (a - b) / steps for a, b in zip(ours.cpu, plain.cpu, strict=True)),
        mfu=(mfu(run, vocab_size, speed[0]), mfu(run, vocab_size, speed[1])),
        note=note,
    )


def mfu(run: RunConfig, vocab_size: int, tokens_per_s: float) -> float | None:
    """Return the model FLOPs utilisation on this GPU, or None without a GPU of known peak."""
    resolved = resolve(run)
    peak = peak_flops(resolved.device_name, resolved.precision)
    return None if peak is None else flops_per_token(run, vocab_size) * tokens_per_s / peak


# The two sides.


class Plain:
    """A plain training loop; `compiled` is None, `blocks`, `model` or `graphs`."""

    def __init__(self, run: RunConfig, resolved: RuntimeSettings, corpus: Corpus, compiled: str | None) -> None:
        self.run, self.device = run, resolved.torch_device
        self.autocast = resolved.autocast()
        self.model: GPT = build_model(run, corpus.tokenizer.vocab_size).to(self.device)
        self.forward: Callable[[Tensor], Tensor] = self.model
        if compiled == "blocks":
            for block in self.model.blocks:
                block.compile()
        elif compiled == "model":
            self.forward = torch.compile(self.model)
        elif compiled == "graphs":
            self.forward = torch.compile(self.model, mode="reduce-overhead")
        optim = run.optim
        assert isinstance(optim, AdamW)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay},
                {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=True,
        )
        self.tokens_N = torch.from_numpy(corpus.train.astype("int64")).to(self.device)
        self.done = 0
        self.log = io.StringIO()

    def step(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Make one update and return the loss before it."""
        with self.autocast():
            logits_BTV = self.forward(x_BT)
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.run.optim.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.optim.clip)
        self.optimizer.step()
        return loss.detach()

    def steps(self, count: int) -> None:
        """Make updates on random windows and print a line every 10."""
        run, context = self.run, self.run.model.context
        span_T = torch.arange(context + 1, device=self.device)
        for _ in range(count):
            lr = learning_rate(run.optim, run.train.steps, self.done)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            starts_B = torch.randint(len(self.tokens_N) - context, (run.train.batch_size, 1), device=self.device)
            windows = self.tokens_N[starts_B + span_T]
            loss = self.step(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
            self.done += 1
            if self.done % PRINT_EVERY == 0:
                print(f"step {self.done}: loss {loss.item():.4f}", file=self.log, flush=True)


# The step.


def with_random_tokens(corpus: Corpus, vocab_size: int) -> Corpus:
    """Return a corpus of random tokens of a vocabulary, which no tokenizer encodes."""
    tokens_N = np.random.default_rng(0).integers(0, vocab_size, 2**22, dtype=np.uint16)
    tokenizer: Any = SimpleNamespace(vocab_size=vocab_size)
    train: Any = tokens_N
    return replace(corpus, train=train, val=train, tokenizer=tokenizer)


def step_memory(step: Callable[[], object]) -> str:
    """Return the memory that a step on a GPU takes beside what is allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return format_size(torch.cuda.max_memory_allocated() - before)


def bench_step(
    overrides: Sequence[str], rounds: int, device: str, compiled: str | None, vocab_size: int | None = None
) -> Result:
    """Compare the steps on the same batches, in turns of 1 step on a CPU and of 20 on a GPU."""
    switch = "off" if compiled is None else "on"
    run = compose_run([*overrides, f"device={device}", f"compile={switch}", "deterministic=false"])
    resolved, corpus = resolve(run), open_corpus(run.data)
    if vocab_size is not None:
        corpus = with_random_tokens(corpus, vocab_size)
    apply(resolved)
    on_gpu = resolved.device == "cuda"
    turns, steps = (rounds, 20) if on_gpu else (rounds * 10, 1)
    # Only the step and the batches of this loop are used; it writes nothing before `run`.
    loop = Loop([TrainingRun(run, RunFolder("nowhere"))], resolved, corpus)
    step, batches = loop.step, loop.batches
    plain = Plain(run, resolved, corpus, compiled)
    hyper = hyperparameters_at(run.optim, run.train.steps, run.optim.warmup_steps or 0)
    for group in plain.optimizer.param_groups:
        group["lr"] = hyper.lr

    # Both sides get the same batches in the same order; the first three compile and warm up.
    difference = 0.0
    for number in range(3):
        tokens, targets = batches.batch(number)
        losses = step(tokens, targets, hyper).loss, plain.step(tokens, targets)
        difference = max(difference, abs(losses[0].item() - losses[1].item()))
    clocks = Clock(on_gpu), Clock(on_gpu)
    for number in range(turns):
        window = [batches.batch(3 + number * steps + at) for at in range(steps)]
        # The first side alternates, since the second one finds the batch in the cache.
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            with clocks[side].turn():
                for tokens, targets in window:
                    if side == 0:
                        step(tokens, targets, hyper)
                    else:
                        plain.step(tokens, targets)
    kinds = {"model": "compiled, plain: whole model", "graphs": "compiled, plain: CUDA graphs"}
    kind = "eager" if compiled is None else kinds.get(compiled, "compiled")
    # normlab compiles blocks, so a loop that compiles the complete model has no limit.
    limit = None if compiled in kinds else "step"
    note = f"first losses agree to {difference:.0e}"
    if on_gpu:
        tokens, targets = batches.batch(0)
        ours, theirs = (
            step_memory(lambda: step(tokens, targets, hyper)),
            step_memory(lambda: plain.step(tokens, targets)),
        )
        note += f"; memory {ours}, plain {theirs}"
    return result(run, corpus.tokenizer.vocab_size, f"step, {kind}", limit, *clocks, steps, note)


# The loop.


class Terminal(io.StringIO):
    """A terminal for the console, so that it draws the progress bar, its more expensive form."""

    def isatty(self) -> bool:
        """Return True."""
        return True


class TakeTurns:
    """The last tracker of a run: runs the plain loop each time the training loop logs its rows."""

    def __init__(self, plain: Callable[[], Plain], on_gpu: bool, warm_up: int) -> None:
        self.clocks = Clock(on_gpu), Clock(on_gpu)
        self.make_plain, self.warm_up = plain, warm_up
        self.plain: Plain | None = None
        self.turns = 0
        self._open = contextlib.ExitStack()

    def start(self, run: Mapping[str, Any], first_step: int) -> None:
        """Build the plain loop, after `train` has set torch up."""
        with not_deterministic():
            self.plain = self.make_plain()

    def log(self, rows: Sequence[Row]) -> None:
        """End the loop's turn, run the plain loop for as many steps, and start the loop's next turn."""
        if rows[-1]["kind"] != "pace":
            return  # the evaluation before the first step
        self._open.close()
        assert self.plain is not None
        self.turns += 1
        with not_deterministic():
            if self.turns <= self.warm_up:
                self.plain.steps(PRINT_EVERY)
            else:
                with self.clocks[1].turn():
                    self.plain.steps(PRINT_EVERY)
        if self.turns >= self.warm_up:
            self._open = contextlib.ExitStack()
            self._open.enter_context(self.clocks[0].turn())

    def log_statistics(self, profiles: Any) -> None:
        """Do nothing."""

    def finish(self, status: object) -> None:
        """Drop the last turn, which contains the last evaluation and checkpoint."""
        rounds = len(self.clocks[0].wall)
        self._open.close()
        del self.clocks[0].wall[rounds:], self.clocks[0].cpu[rounds:]


@contextlib.contextmanager
def not_deterministic() -> Iterator[None]:
    """Use torch's default, as the plain loop does, and restore the setting of `train` at the end."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def bench_loop(overrides: Sequence[str], rounds: int, device: str, compiled: bool, deterministic: str) -> Result:
    """Compare `train` with the plain loop, in turns of 10 steps."""
    warm_up = 2
    with tempfile.TemporaryDirectory(prefix="normlab-bench-") as folder:
        run = compose_run(
            [
                *overrides,
                f"device={device}",
                f"compile={'on' if compiled else 'off'}",
                f"deterministic={deterministic}",
                f"train.steps={(warm_up + rounds) * PRINT_EVERY}",
                "train.checkpoint_every=0",
                "eval.every=0",
                "tracking.wandb=off",
                f"results_dir={folder}",
            ]
        )
        assert run.train.log_every == PRINT_EVERY
        corpus, resolved = open_corpus(run.data), resolve(run)
        turns = TakeTurns(
            lambda: Plain(run, resolved, corpus, "blocks" if compiled else None),
            resolved.device == "cuda",
            warm_up,
        )
        outcome = train(run, trackers=[Console(Terminal()), turns])
    if outcome.state != "finished":
        raise SystemExit(f"the run is {outcome.state}, not finished: nothing was measured")
    mode = f"deterministic={'on' if resolved.deterministic else 'off'}"
    kind = "compiled" if compiled else "eager"
    # The limit applies to the default options.
    limit = "loop" if deterministic == "null" else None
    return result(run, corpus.tokenizer.vocab_size, f"loop, {kind}, {mode}", limit, *turns.clocks, PRINT_EVERY, "")


# The table.


HEADER = (
    f"{'model':22} {'comparison':38} {'normlab':>10} {'plain':>10}  {'ratio':>6} {'quartiles':>13} {'limit':>5} "
    f"{'CPU':>6} {'+ms':>7} {'MFU':>11}  note"
)


def show(line: Result) -> None:
    low, _, high = statistics.quantiles(line.ratios, n=4)
    limit = "" if line.limit is None else f"{LIMITS[line.limit]:.2f}"
    used = "" if None in line.mfu else " ".join(f"{value:.1%}" for value in line.mfu if value is not None)
    mark = "  BELOW THE LIMIT" if line.failed else ""
    print(
        f"{line.model:22} {line.comparison:38} {line.tokens_per_s[0]:10,.0f} {line.tokens_per_s[1]:10,.0f}  "
        f"{line.ratio:6.3f} {low:6.3f}-{high:6.3f} {limit:>5} {line.cpu_ratio:6.3f} {line.added_ms:+7.2f} "
        f"{used:>11}  {line.note}{mark}",
        flush=True,
    )


def measure(models: Mapping[str, list[str]], options: argparse.Namespace, on_gpu: bool) -> Iterator[Result]:
    """Yield the results, each as soon as it is measured."""
    device = "cuda" if on_gpu else "cpu"
    compiling = on_gpu if options.compile is None else options.compile
    for name, overrides in models.items():
        if options.only != "loop":
            variants = ("blocks", "model", *(["graphs"] if on_gpu else []))
            for compiled in (None, *variants) if compiling else (None,):
                yield bench_step(overrides, options.rounds, device, compiled, VOCABULARIES.get(name))
        if options.only != "step" and name not in VOCABULARIES:
            # normlab's default: compiled on a GPU, eager on a CPU.
            for deterministic in ("null", "false") if name == "4x128" and not on_gpu else ("null",):
                yield bench_loop(overrides, options.rounds, device, on_gpu and compiling, deterministic)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds for each line (default: 15)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile; on for a GPU")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--models", nargs="*", help="models to measure (default: all)")
    parser.add_argument("--only", choices=("step", "loop"), help="only one of the comparisons")
    parser.add_argument("--check", action="store_true", help="exit 1 below the limits")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: must be at least 2")

    logging.disable(logging.WARNING)
    start = time.perf_counter()
    resolved = resolve(compose_run([f"device={options.device}"]))
    on_gpu = resolved.device == "cuda"
    models = MODELS_ON_GPU if on_gpu else MODELS
    unknown = [name for name in options.models or () if name not in models]
    if unknown:
        parser.error(f"--models: {', '.join(unknown)}; choose from {', '.join(models)}")
    print(
        f"torch {torch.__version__}, {resolved.device_name}, {resolved.precision}, {resolved.threads} threads, "
        f"{resolved.instructions}; load before: {os.getloadavg()[0]:.1f}\n{HEADER}",
        flush=True,
    )
    failed = False
    for line in measure({name: models[name] for name in options.models or models}, options, on_gpu):
        show(line)
        failed |= line.failed
    print(f"{time.perf_counter() - start:.0f} s; load after: {os.getloadavg()[0]:.1f}")
    return int(options.check and failed)


if __name__ == "__main__":
    sys.exit(main())
