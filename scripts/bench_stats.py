"""Measure the cost of statistics: normlab's, hooks, and torch-module-monitor.

    python scripts/bench_stats.py              # some minutes on a CPU
    python scripts/bench_stats.py --check      # exit 1 above the limits: 1.10 every step, 1.02 at the default cadence

Every number is a step's time with statistics over the time of the same step without them: 1 is free. All sides run in
one process and one thread, on the same batches, in turns. Each pair of turns gives a ratio; the table shows the median
and the quartiles. On a CPU the steps of two turns are interleaved (one of the first, two of the second, one of the
first), so that neither a slow second nor the cache after a measured step counts for the wrong side; time is CPU time,
which excludes waiting for a core. On a GPU one turn follows the other, timed between events.

- *core*: every core statistic (`normlab list stats`) in every step, copied to the host; turns of two steps.
- *core at the default*: turns of ten steps, one of them measured.
- *hooks and .item()*: a plain PyTorch loop with forward hooks on blocks, sub-layers and norms, hooks on the gradient
  of the stream, and loops over the parameters. The numbers are the same, except those of the head's input and the
  logits, which it leaves out; each is copied to the host by `.item()`, as in most loggers.
- *torch-module-monitor*: the same sites and statistics by that library (`pip install torch-module-monitor`; skipped if
  it is not installed). It has no gradient of the stream, no norm's input, no gain, no angle and no update.

With compile on, blocks are compiled on all sides. Hooks then break graphs, and need their guards
(`skip_nnmodule_hook_guards=False`); without these they silently do nothing.

On a GPU the script also counts how often the host waits in a step, and in ten steps with one copy.

Shapes: B batch, T context.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT
from normlab.model.init import build_model
from normlab.model.runner import SingleRun
from normlab.report.tables import render
from normlab.stats.instrument import InstrumentedNorm
from normlab.stats.measure.core import CoreStatistics
from normlab.stats.statistic import CORE
from normlab.training.machine import apply, resolve
from normlab.training.optim import Optimizer, hyperparameters_at, is_decayed
from normlab.training.step import Step

VOCAB = 512
LIMITS = {"core": 1.10, "core at the default": 1.02}
EVERY = 10
MODELS = {
    "2x32": ["model=gpt2_nano"],
    "6x384": ["model=gpt2_mini", "model.context=128", "train.batch_size=4"],
    "24x128": ["model=gpt2_tiny", "model.depth=24", "model.context=128", "train.batch_size=8"],
}
MODELS_ON_GPU = {
    "6x384": ["model=gpt2_mini", "train.batch_size=64"],
    "24x128": ["model=gpt2_tiny", "model.depth=24", "train.batch_size=64"],
    "12x768": ["model=gpt2_124m", "train.batch_size=16"],
}
WITHOUT_LIMITS = ("2x32",)
"""Models that are measured only by name: a step that is mostly overhead."""
Turn = Callable[[Tensor, Tensor], Any]
"""One step on tokens and targets, (B, T)."""


# The sides.


def ours(config: RunConfig, device: torch.device, compiled: bool) -> Callable[[bool], Turn]:
    """Return normlab's step: with statistics, copied to the host, or without."""
    runner = SingleRun(build_model(config, VOCAB).to(device), compiled=compiled)
    decayed = [name for name, p in runner.params.items() if is_decayed(config.optim, p)]
    optimizer = Optimizer(config.optim, runner.params, decayed)
    measure = CoreStatistics(runner, config.stats.names(CORE))
    step = Step(
        runner, optimizer, clip=config.optim.clip, measure=measure, autocast=resolve(config).autocast(),
        project=None,
    )  # fmt: skip
    hyper = hyperparameters_at(config.optim, config.train.steps, config.optim.warmup_steps or 0)

    def turn(measured: bool) -> Turn:
        def once(tokens: Tensor, targets: Tensor) -> Any:
            statistics = step(tokens, targets, hyper, measured=measured).measured
            return None if statistics is None else statistics.values.cpu()

        return once

    return turn


class Loop:
    """A plain training loop; a logger overrides `before`, `after_backward` and `after`."""

    def __init__(self, config: RunConfig, device: torch.device, compiled: bool) -> None:
        self.model: GPT = build_model(config, VOCAB).to(device)
        self.autocast, self.clip = resolve(config).autocast(), config.optim.clip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.optim.lr, fused=True)
        self.compiled = compiled
        self.values: list[float] = []

    def compile(self) -> Loop:
        """Compile the blocks, after hooks are registered."""
        for block in self.model.blocks if self.compiled else ():
            block.compile()
        return self

    def before(self) -> None:
        """Do nothing."""

    def after_backward(self) -> None:
        """Do nothing."""

    def after(self) -> None:
        """Do nothing."""

    def __call__(self, tokens: Tensor, targets: Tensor) -> None:
        """Make one update."""
        self.values.clear()
        self.before()
        with self.autocast():
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.after_backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.after()


def stream_statistics(x: Tensor) -> list[Tensor]:
    """Return RMS, kurtosis, maximum, fraction of non-finite tokens, and fraction along the vector of ones."""
    x = x.detach().float()
    square = x.square().mean(-1)
    kurt = (x.pow(4).mean(-1) / square.square()).mean()
    uniform = x.shape[-1] * (x.mean(-1).square() / square).mean()
    return [x.square().mean().sqrt(), kurt, x.abs().max(), (~square.isfinite()).float().mean(), uniform]


class Hooked(Loop):
    """The core statistics by hooks, each copied to the host when it is computed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for block in self.model.blocks:
            block.register_forward_hook(self.on_block)
            for name in ("attn", "mlp"):
                block.get_submodule(name).register_forward_hook(self.on_branch)
        for module in self.model.modules():
            if isinstance(module, InstrumentedNorm):
                module.register_forward_hook(self.on_norm)

    def log(self, values: Sequence[Tensor]) -> None:
        """Copy values to the host."""
        self.values += [value.item() for value in values]

    def on_block(self, module: nn.Module, args: Any, after: Tensor) -> None:
        """Measure the stream before a block, its angle to the stream after it, and its gradient."""
        x = args[0]
        self.log([*stream_statistics(x), F.cosine_similarity(x.detach(), after.detach(), dim=-1).mean()])
        if x.requires_grad:
            x.register_hook(lambda grad: self.log([grad.float().square().mean().sqrt()]))

    def on_branch(self, module: nn.Module, args: Any, y: Tensor) -> None:
        """Measure the output of a sub-layer."""
        self.log(stream_statistics(y)[:4])

    def on_norm(self, module: nn.Module, args: Any, y: Tensor) -> None:
        """Measure the input and output of a norm."""
        x, y = args[0].detach().float(), y.detach().float()
        uniform = x.shape[-1] * (x.mean(-1).square() / x.square().mean(-1)).mean()
        self.log([x.square().mean().sqrt(), y.square().mean().sqrt(), uniform])

    def after_backward(self) -> None:
        """Measure gradients, parameters and gains; copy parameters for the updates."""
        self.copies = [p.detach().clone() for p in self.model.parameters()]
        for name, p in self.model.named_parameters():
            assert p.grad is not None
            self.log([p.grad.norm(), p.detach().norm()])
            if name.endswith(".gain"):
                g = p.detach()
                self.log([g.square().mean().sqrt(), g.min(), g.abs().max(), g.std() / g.mean(), (g < 0).float().mean()])

    def after(self) -> None:
        """Measure the updates."""
        for p, copy in zip(self.model.parameters(), self.copies, strict=True):
            self.log([(p.detach() - copy).norm()])


class Monitored(Loop):
    """The same sites and statistics, by torch-module-monitor."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from torch_module_monitor import ModuleMonitor  # pyright: ignore[reportMissingImports]

        self.monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
        self.monitor.set_module(self.model)
        sites = r"blocks\.\d+(\.attn|\.mlp)?$|.*norms\.\w+$|head\.close$"
        for number, name in enumerate(("rms", "kurt", "absmax", "nonfinite", "uniform")):
            self.monitor.add_activation_metric(name, lambda x, number=number: stream_statistics(x)[number], sites)
        self.monitor.add_parameter_metric("norm", lambda p: p.norm())
        self.monitor.add_gradient_metric("norm", lambda g: g.norm())
        self.step = 0

    def before(self) -> None:
        """Start a step."""
        self.monitor.begin_step(self.step)
        self.step += 1

    def after_backward(self) -> None:
        """Measure parameters and gradients."""
        self.monitor.monitor_parameters()
        self.monitor.monitor_gradients()

    def after(self) -> None:
        """End the step and clear the monitor's log, which would grow."""
        self.monitor.end_step()
        self.values = list(self.monitor.get_step_metrics().values())
        self.monitor.storage.log_dict.clear()


# Measuring.


@dataclass(slots=True)
class Pair:
    """A side with statistics and the same side without them."""

    name: str
    side: Sequence[Turn]
    """Steps of a turn."""
    plain: Sequence[Turn]
    ratios: list[float]


def times(pair: Pair, batches: Sequence[tuple[Tensor, Tensor]], on_gpu: bool) -> tuple[float, float]:
    """Return the seconds of one turn with and one without statistics."""
    seconds = {"side": 0.0, "plain": 0.0}
    both = {"side": pair.side, "plain": pair.plain}
    order = ("plain", "side")
    if on_gpu:
        for name in order:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for turn, (tokens, targets) in zip(both[name], batches, strict=True):
                turn(tokens, targets)
            last.record()
            last.synchronize()
            seconds[name] = first.elapsed_time(last) / 1000
    else:
        for number, (tokens, targets) in enumerate(batches):
            for name in order if number % 2 == 0 else reversed(order):
                start = time.process_time()
                both[name][number](tokens, targets)
                seconds[name] += time.process_time() - start
    return seconds["side"], seconds["plain"]


def bench(overrides: Sequence[str], device: str, compiled: bool, rounds: int) -> dict[str, Pair]:
    """Measure all sides of one model."""
    config = compose_run(
        [*overrides, f"device={device}", f"compile={'on' if compiled else 'off'}", "deterministic=false"]
    )
    resolved = resolve(config)
    apply(resolved)
    device_here, on_gpu = resolved.torch_device, resolved.device == "cuda"
    torch.compiler.reset()
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch._logging.set_logs(dynamo=logging.ERROR)  # hooks are known to break graphs
    step = ours(config, device_here, compiled)
    plain, hooked = Loop(config, device_here, compiled).compile(), Hooked(config, device_here, compiled).compile()
    pairs = [
        Pair("core", [step(True)] * 2, [step(False)] * 2, []),
        Pair("core at the default", [step(True)] + [step(False)] * (EVERY - 1), [step(False)] * EVERY, []),
        Pair("hooks and .item()", [hooked] * 2, [plain] * 2, []),
    ]
    try:
        pairs.append(
            Pair("torch-module-monitor", [Monitored(config, device_here, compiled).compile()] * 2, [plain] * 2, [])
        )
    except ImportError:
        print("torch-module-monitor is not installed; skipped", file=sys.stderr)
    generator, batches = torch.Generator().manual_seed(0), []
    shape = (2, config.train.batch_size, config.model.context)
    for number in range(-2, rounds):
        for pair in pairs:
            pairs_BT = [torch.randint(0, VOCAB, shape, generator=generator).to(device_here) for _ in pair.side]
            batches = [(tokens_BT, targets_BT) for tokens_BT, targets_BT in pairs_BT]
            side, plain = times(pair, batches, on_gpu)
            if number >= 0:  # the first two rounds compile
                pair.ratios.append(side / plain)
    for loop in (hooked, *(pair.side[0] for pair in pairs[3:])):  # a hook that is compiled away would be free
        assert len(getattr(loop, "values", ())) > 10 * config.model.depth, f"{loop}: the hooks did not run"
    if on_gpu:
        counts = [count_waits(turns, batches[:1] * len(turns)) for turns in (pairs[1].plain, pairs[1].side)]
        print(
            f"{overrides[0]}, compile {compiled}: host waits in {EVERY} steps: "
            f"{counts[0]} without statistics, {counts[1]} with"
        )
    return {pair.name: pair for pair in pairs}


def count_waits(turns: Sequence[Turn], batches: Sequence[tuple[Tensor, Tensor]]) -> int:
    """Count how often the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for turn, (tokens, targets) in zip(turns, batches, strict=True):
                turn(tokens, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def format_ratios(pair: Pair) -> str:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(pair.ratios, n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=20, help="pairs of turns of each side (default: 20)")
    parser.add_argument("--models", default=None, help="models, separated by commas (default: all with limits)")
    parser.add_argument("--compile", default="off,on", help="off, on, or off,on")
    parser.add_argument("--check", action="store_true", help="exit 1 above the limits")
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = MODELS_ON_GPU if args.device == "cuda" else MODELS
    default = ",".join(name for name in models if name not in WITHOUT_LIMITS)
    names, switches = (args.models or default).split(","), args.compile.split(",")
    for flag, values, known in (("--models", names, models), ("--compile", switches, ("off", "on"))):
        if unknown := [value for value in values if value not in known]:
            parser.error(f"{flag} {unknown[0]}: unknown; choose from {', '.join(known)}")
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: too few for quartiles; choose 2 or more")
    rows, above = [], False
    for name in names:
        for switch in switches:
            pairs = bench(models[name], args.device, switch == "on", args.rounds)
            rows.append({"model": name, "compile": switch, **{key: format_ratios(pair) for key, pair in pairs.items()}})
            if name not in WITHOUT_LIMITS:
                above |= any(statistics.median(pairs[key].ratios) > limit for key, limit in LIMITS.items())
            print(render(rows[-1:], "markdown").splitlines()[-1], file=sys.stderr, flush=True)
    print(render(rows, "markdown"))
    print(
        f"\nlimits: {', '.join(f'{name} {limit}' for name, limit in LIMITS.items())}: {'TOO SLOW' if above else 'ok'}"
    )
    return int(args.check and above)


if __name__ == "__main__":
    sys.exit(main())
