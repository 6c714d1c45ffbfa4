"""Normlab's training against a plain PyTorch loop over the same model: how much of the speed is left.

    python scripts/bench_train.py              # under five minutes on two CPU cores
    python scripts/bench_train.py --compile    # with torch.compile as well: some minutes more
    python scripts/bench_train.py --check      # exit 1 below the bars: 0.98 for the step, 0.95 for the loop

Every ratio is normlab's tokens per second over the plain loop's, so 1 is as fast and more is faster. Both
train the same `GPT` from the same weights, in one process and one thread, in turns:

- *the step alone*: `train.step.Step` against `logits = model(x); F.cross_entropy; backward;
  clip_grad_norm_; AdamW(fused=True)`, on the same batches. The losses of the two are compared, so that a
  ratio never comes from doing something else.
- *the whole loop*: a real `train.start.train`, with what is on by default (every step's numbers in the local
  record, W&B offline, the console's bar, deterministic kernels on a CPU), against a plain loop that draws
  random windows, sets the learning rate and prints the loss every 10 steps. Evaluations and checkpoints are
  left out of both.

How the whole loop is timed. `train` is given one more sink after its own. The loop calls it once in every
`log_every` = 10 steps, when the other sinks are done; from inside that call the plain loop is run for as many
steps, and then `train` goes on where it stood. What passes between the sink's return and its next call is
10 steps of the real loop with all that belongs to them, in the real order, and nothing is patched or left
out. The step's switch for deterministic kernels is torch's own and global, so it is off while the plain loop
runs. W&B writes from a process of its own; the CPU time of that is shown beside the ratio.

Noise. Machines are shared: both sides are timed in short turns, one next to the other (for the step alone of
one step each, ten pairs a round; for the loop of 10 steps, one pair a round), a ratio is taken of each pair,
and the median of the pairs is shown with the quartiles. Beside it, as a second opinion, is the ratio of CPU
time (all threads of this process), which waiting for a core does not touch, and what normlab takes more, in
milliseconds of CPU time a step. Where other programs keep the cores busy, two threads wait for each other most
of the time; OMP_NUM_THREADS=1 is steadier there.

Model FLOPs utilisation (on a GPU): (6 N + 12 L D T) FLOPs a token over the GPU's dense peak at that
precision, without sparsity, for fp32 without TF32. N counts the weights that are multiplied (position
embeddings are not, token embeddings only where the head reads them), L layers, D width, T context; the second
term is attention, whole although half of it is masked (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.config import AdamW, RunConfig
from normlab.data.corpus import Corpus, open_corpus
from normlab.launch import compose_run
from normlab.model.gpt import GPT
from normlab.model.init import build_model
from normlab.store.runs import RunFolder
from normlab.tracking.background import Background
from normlab.tracking.base import Row
from normlab.tracking.console import Console
from normlab.tracking.wandb import WandbSink
from normlab.train.loop import Loop
from normlab.train.member import TrainingRun
from normlab.train.optim import hyperparameters_at, learning_rate
from normlab.train.resolve import RuntimeSettings, apply, resolve
from normlab.train.start import train

BARS = {"step": 0.98, "loop": 0.95}
PRINT_EVERY = 10
"""Steps between two lines of the plain loop: normlab's own default cadence."""

MODELS = {
    "2x32": ["model=gpt2_nano"],
    "4x128": ["model=gpt2_tiny"],
    "6x384": ["model=gpt2_mini", "model.context=128", "train.batch_size=2"],
}
"""The smallest, whose steps are hardly more than their overhead; the default; and a larger one, at a batch that
keeps its steps short on a CPU."""
MODELS_ON_GPU = {
    **MODELS,
    "6x384": ["model=gpt2_mini", "train.batch_size=64"],
    "12x768": ["model=gpt2_124m", "train.batch_size=16"],
}
WITHOUT_BARS = ("2x32",)
"""Shown for what is added to a step, in milliseconds; no ratio of such steps says anything about training."""

PEAKS = {
    "NVIDIA H200": {"bf16": 989e12, "fp32": 67e12},
    "NVIDIA H100 PCIe": {"bf16": 756e12, "fp32": 51e12},
    "NVIDIA H100 80GB HBM3": {"bf16": 989e12, "fp32": 67e12},
    "NVIDIA A100": {"bf16": 312e12, "fp32": 19.5e12},
}
"""Dense peaks, FLOP/s, by the beginning of the device's name, as NVIDIA's data sheets have them. The H100 with
HBM3 is the SXM board."""


# Measuring.


@dataclass(slots=True)
class Clock:
    """Seconds of one side, wall and CPU. On a GPU wall time runs from event to event on its stream."""

    on_gpu: bool
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One turn, from an idle device to an idle device."""
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
            since = time.perf_counter()
            yield
            self.wall.append(time.perf_counter() - since)
        self.cpu.append(time.process_time() - cpu)


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    model: str
    what: str
    bar: str | None
    """Which bar it is held to, if any."""
    tokens_per_s: tuple[float, float]
    """Normlab's and the plain loop's, medians."""
    ratios: list[float]
    """One for each pair of turns."""
    cpu_ratio: float
    added_ms: float
    """CPU milliseconds a step that normlab takes more than the plain loop, the median of the pairs."""
    utilisation: float | None
    note: str

    @property
    def ratio(self) -> float:
        """The median of the turns."""
        return statistics.median(self.ratios)

    @property
    def failed(self) -> bool:
        """Whether it is below its bar."""
        return self.bar is not None and self.ratio < BARS[self.bar]


def result(run: RunConfig, what: str, bar: str | None, ours: Clock, plain: Clock, steps: int, note: str) -> Result:
    """The line for two clocks whose turns were of `steps` steps each."""
    shape = f"{run.model.depth}x{run.model.width}"
    tokens = steps * run.train.batch_size * run.model.context
    speed = tokens / statistics.median(ours.wall), tokens / statistics.median(plain.wall)
    return Result(
        model=f"{shape}, batch {run.train.batch_size}x{run.model.context}",
        what=what,
        bar=None if shape in WITHOUT_BARS else bar,
        tokens_per_s=speed,
        ratios=[b / a for a, b in zip(ours.wall, plain.wall, strict=True)],
        cpu_ratio=statistics.median(b / a for a, b in zip(ours.cpu, plain.cpu, strict=True)),
        added_ms=statistics.median(1000 * (a - b) / steps for a, b in zip(ours.cpu, plain.cpu, strict=True)),
        utilisation=utilisation(run, speed[0]),
        note=note,
    )


def flops_per_token(run: RunConfig, vocab_size: int) -> float:
    """6 N + 12 L D T: see the top of this file."""
    model = build_model(run, vocab_size)
    idle = 0 if model.embed.positions is None else model.embed.positions.weight.numel()
    if not run.model.tie_embeddings:
        idle += model.embed.tokens.weight.numel()
    multiplied = sum(parameter.numel() for parameter in model.parameters()) - idle
    return 6 * multiplied + 12 * run.model.depth * run.model.width * run.model.context


def utilisation(run: RunConfig, tokens_per_s: float) -> float | None:
    """Model FLOPs utilisation on this GPU, or None where there is none or its peak is not known."""
    resolved = resolve(run)
    peaks = next((peaks for name, peaks in PEAKS.items() if resolved.device_name.startswith(name)), None)
    if resolved.device != "cuda" or peaks is None:
        return None
    return flops_per_token(run, open_corpus(run.data).tokenizer.vocab_size) * tokens_per_s / peaks[resolved.precision]


# The two sides.


class Plain:
    """A training loop as anyone would write it. `compiled` is None, `blocks` or `model`."""

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
        """One update; the loss before it."""
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
        """Updates on random windows, a line for every 10 of them."""
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


# The step alone.


def bench_step(words: Sequence[str], rounds: int, device: str, compiled: str | None) -> Result:
    """Both steps on the same batches. On a CPU they take turns step by step, on a GPU 20 steps at a time."""
    switch = "off" if compiled is None else "on"
    run = compose_run([*words, f"device={device}", f"compile={switch}", "deterministic=false"])
    resolved, corpus = resolve(run), open_corpus(run.data)
    apply(resolved)
    on_gpu = resolved.device == "cuda"
    turns, steps = (rounds, 20) if on_gpu else (rounds * 10, 1)
    # A loop that is never run, for its step and its batches; it writes nothing before it is run.
    loop = Loop([TrainingRun(run, RunFolder("nowhere"))], resolved, corpus)
    step, batches = loop.step, loop.batches
    plain = Plain(run, resolved, corpus, compiled)
    hyper = hyperparameters_at(run.optim, run.train.steps, run.optim.warmup_steps or 0)
    for group in plain.optimizer.param_groups:
        group["lr"] = hyper.lr

    # Both see every batch once, in the same order; the first ones are for compiling and warming up.
    apart = 0.0
    for number in range(3):
        tokens, targets = batches.batch(number)
        losses = step(tokens, targets, hyper).loss, plain.step(tokens, targets)
        apart = max(apart, abs(losses[0].item() - losses[1].item()))
    clocks = Clock(on_gpu), Clock(on_gpu)
    for number in range(turns):
        window = [batches.batch(3 + number * steps + at) for at in range(steps)]
        # Who goes first alternates: the second one finds the batch in the cache.
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            with clocks[side].turn():
                for tokens, targets in window:
                    if side == 0:
                        step(tokens, targets, hyper)
                    else:
                        plain.step(tokens, targets)
    kind = {None: "eager", "blocks": "compiled", "model": "compiled, plain: whole model"}[compiled]
    # A loop that compiles the whole model at once is another way to work, and no bar of ours.
    bar = None if compiled == "model" else "step"
    note = f"first losses agree to {apart:.0e}"
    return result(run, f"step, {kind}", bar, *clocks, steps, note)


# The whole loop.


class Terminal(io.StringIO):
    """Takes the console's output for a terminal's, so that the bar is drawn: the dearer of its two forms."""

    def isatty(self) -> bool:
        """Say so."""
        return True


class TakeTurns:
    """The last sink of a run: each time the loop brings its rows, the plain loop has its turn."""

    def __init__(self, plain: Callable[[], Plain], on_gpu: bool, warm_up: int) -> None:
        self.clocks = Clock(on_gpu), Clock(on_gpu)
        self.make_plain, self.warm_up = plain, warm_up
        self.plain: Plain | None = None
        self.turns = 0
        self.helpers: list[float] = []
        self._open = contextlib.ExitStack()

    def start(self, run: Mapping[str, Any], first_step: int) -> None:
        """Build the plain side, when `train` has brought torch into its state."""
        with not_deterministic():
            self.plain = self.make_plain()

    def log(self, rows: Sequence[Row]) -> None:
        """End the loop's turn, give the plain loop as many steps, begin the loop's next turn."""
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
            self.helpers.append(helper_seconds())
            self._open = contextlib.ExitStack()
            self._open.enter_context(self.clocks[0].turn())

    def look(self, profiles: Any) -> None:
        """Nothing to do."""

    def finish(self, status: Mapping[str, Any]) -> None:
        """Drop the turn that the end of the run is in; it has the last evaluation and checkpoint."""
        rounds = len(self.clocks[0].wall)
        self._open.close()
        del self.clocks[0].wall[rounds:], self.clocks[0].cpu[rounds:]


@contextlib.contextmanager
def not_deterministic() -> Iterator[None]:
    """Torch's own default, which the plain loop has; what `train` has set comes back."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def helper_seconds() -> float:
    """CPU seconds of this process's children so far, which is W&B's process; 0 where Linux does not say."""
    seconds, ticks = 0.0, os.sysconf("SC_CLK_TCK")
    with contextlib.suppress(OSError, ValueError, IndexError):
        for task in Path("/proc/self/task").iterdir():
            for child in (task / "children").read_text().split():
                words = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                seconds += (int(words[11]) + int(words[12])) / ticks
    return seconds


def bench_loop(words: Sequence[str], rounds: int, device: str, compiled: bool, deterministic: str) -> Result:
    """A real `train` against the plain loop, in turns of 10 steps."""
    warm_up = 2
    with tempfile.TemporaryDirectory(prefix="normlab-bench-") as folder:
        run = compose_run(
            [
                *words,
                f"device={device}",
                f"compile={'on' if compiled else 'off'}",
                f"deterministic={deterministic}",
                f"train.steps={(warm_up + rounds) * PRINT_EVERY}",
                "train.checkpoint_every=0",
                "eval.every=0",
                "tracking.wandb=offline",
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
        outcome = train(
            run, sinks=[Console(Terminal()), Background(WandbSink(run.tracking, Path(folder) / "bench"), "W&B"), turns]
        )
    if outcome.state != "finished":
        raise SystemExit(f"the run ended {outcome.state}: nothing was measured")
    helpers = turns.helpers
    spent = (helpers[-1] - helpers[0]) / max(1, len(helpers) - 1)
    mode = f"deterministic={'on' if resolved.deterministic else 'off'}"
    kind = "compiled" if compiled else "eager"
    # The bar is for what a user gets who sets nothing.
    bar = "loop" if deterministic == "null" else None
    note = f"W&B's process: {1000 * spent:.0f} ms CPU per {PRINT_EVERY} steps"
    return result(run, f"loop, {kind}, {mode}", bar, *turns.clocks, PRINT_EVERY, note)


# The table.


HEADER = (
    f"{'model':22} {'what':38} {'normlab':>10} {'plain':>10}  {'ratio':>6} {'quartiles':>13} {'bar':>5} "
    f"{'of CPU':>6} {'ms more':>7} {'MFU':>6}  note"
)


def show(line: Result) -> None:
    low, _, high = statistics.quantiles(line.ratios, n=4)
    bar = "" if line.bar is None else f"{BARS[line.bar]:.2f}"
    used = "" if line.utilisation is None else f"{line.utilisation:.1%}"
    mark = "  BELOW ITS BAR" if line.failed else ""
    print(
        f"{line.model:22} {line.what:38} {line.tokens_per_s[0]:10,.0f} {line.tokens_per_s[1]:10,.0f}  "
        f"{line.ratio:6.3f} {low:6.3f}-{high:6.3f} {bar:>5} {line.cpu_ratio:6.3f} {line.added_ms:+7.2f} "
        f"{used:>6}  {line.note}{mark}",
        flush=True,
    )


def measure(models: Mapping[str, list[str]], options: argparse.Namespace, on_gpu: bool) -> Iterator[Result]:
    """The lines of the table, each as soon as it is measured."""
    device = "cuda" if on_gpu else "cpu"
    compiling = on_gpu if options.compile is None else options.compile
    for name, words in models.items():
        if options.only != "loop":
            for compiled in (None, "blocks", "model") if compiling else (None,):
                yield bench_step(words, options.rounds, device, compiled)
        if options.only != "step":
            # What normlab does by default: compiled on a GPU, eager on a CPU.
            for deterministic in ("null", "false") if name == "4x128" and not on_gpu else ("null",):
                yield bench_loop(words, options.rounds, device, on_gpu and compiling, deterministic)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds for each line (15)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile; on for a GPU")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--models", nargs="*", help="which of them (all)")
    parser.add_argument("--only", choices=("step", "loop"), help="one of the two comparisons")
    parser.add_argument("--check", action="store_true", help="exit 1 below the bars")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: at least 2")

    logging.disable(logging.WARNING)
    since = time.perf_counter()
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
    print(f"{time.perf_counter() - since:.0f} s; load after: {os.getloadavg()[0]:.1f}")
    return int(options.check and failed)


if __name__ == "__main__":
    sys.exit(main())
