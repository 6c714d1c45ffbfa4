"""What statistics cost: the step that measures against the plain one, and against what one would otherwise use.

    python scripts/bench_stats.py              # some minutes on a CPU
    python scripts/bench_stats.py --check      # exit 1 above the bars: 1.10 every step, 1.02 at the default cadence

Every figure is a step's time with statistics over that of the same step without them, so 1 is free. All sides run in
one process and one thread, on the same batches, by turns; a ratio is taken of each pair of turns, and the median of the
pairs is shown with its quartiles. On a CPU two turns are run at once, a step of one, two of the other and one of the
first again, so that neither what slows the machine down for a second nor what a measured step leaves behind (it is
followed by a step of its own turn) is counted to the wrong one; time is CPU time, which waiting for a core does not
touch. On a GPU one turn follows the other, timed from event to event.

- *core*: every core statistic (`normlab list stats`) in every step, and the copy of them to the host; turns of two.
- *core at the default*: turns of ten steps, of which one is measured.
- *hooks and .item()*: a plain PyTorch loop with forward hooks on blocks, sub-layers and norms, hooks on the gradient
  of the stream, and loops over the parameters: the same numbers but for those of the head's input and the logits, which
  it does without, each brought to the host by `.item()`, as most loggers do. Over the same loop without them.
- *torch-module-monitor*: the same sites and statistics by that library (`pip install torch-module-monitor`; left out
  where it is not there). It sees no gradient of the stream, no norm's input, no gain, no angle and no update.

With compile on, blocks are compiled in all of them. Hooks then break graphs; their guards are switched on
(`skip_nnmodule_hook_guards=False`), for without that they silently do nothing.

On a GPU also: how often a step, and an interval of ten steps with its copy, makes the host wait.

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

from normlab.config import RunConfig
from normlab.launch import compose_run
from normlab.model.gpt import GPT
from normlab.model.init import build_model
from normlab.report.render import render
from normlab.stats.show import InstrumentedNorm
from normlab.stats.statistic import CORE
from normlab.train.bound import SingleRun
from normlab.train.measure import Measure
from normlab.train.optim import Optimizer, hyperparameters_at, is_decayed
from normlab.train.resolve import apply, resolve
from normlab.train.step import Step

VOCAB = 512
BARS = {"core": 1.10, "core at the default": 1.02}
EVERY = 10
MODELS = {
    "6x384": ["model=gpt2_mini", "model.context=128", "train.batch_size=4"],
    "24x128": ["model=gpt2_tiny", "model.depth=24", "model.context=128", "train.batch_size=8"],
}
MODELS_ON_GPU = {
    "6x384": ["model=gpt2_mini", "train.batch_size=64"],
    "24x128": ["model=gpt2_tiny", "model.depth=24", "train.batch_size=64"],
    "12x768": ["model=gpt2_124m", "train.batch_size=16"],
}
Turn = Callable[[Tensor, Tensor], Any]
"""One step on tokens and targets, (B, T)."""


# What is compared.


def ours(config: RunConfig, device: torch.device, compiled: bool) -> Callable[[bool], Turn]:
    """Normlab's step: measured, its numbers copied to the host, or not."""
    runner = SingleRun(build_model(config, VOCAB).to(device), compiled=compiled)
    decayed = [name for name, p in runner.params.items() if is_decayed(config.optim, p)]
    optimizer = Optimizer(config.optim, runner.params, decayed)
    measure = Measure(runner, config.stats.names(CORE))
    step = Step(
        runner, optimizer, clip=config.optim.clip, measure=measure, autocast=resolve(config).autocast(),
        project=None,
    )  # fmt: skip
    hyper = hyperparameters_at(config.optim, config.train.steps, config.optim.warmup_steps or 0)

    def turn(measured: bool) -> Turn:
        def once(tokens: Tensor, targets: Tensor) -> Any:
            seen = step(tokens, targets, hyper, measured=measured).measured
            return None if seen is None else seen.values.cpu()

        return once

    return turn


class Loop:
    """A training loop as anyone would write it; `before` and `after` are what a logger adds."""

    def __init__(self, config: RunConfig, device: torch.device, compiled: bool) -> None:
        self.model: GPT = build_model(config, VOCAB).to(device)
        self.autocast, self.clip = resolve(config).autocast(), config.optim.clip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.optim.lr, fused=True)
        self.compiled = compiled
        self.values: list[float] = []

    def compile(self) -> Loop:
        """Compile the blocks, once hooks are on them."""
        for block in self.model.blocks if self.compiled else ():
            block.compile()
        return self

    def before(self) -> None:
        """Nothing."""

    def after_backward(self) -> None:
        """Nothing."""

    def after(self) -> None:
        """Nothing."""

    def __call__(self, tokens: Tensor, targets: Tensor) -> None:
        """One update."""
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


def of_stream(x: Tensor) -> list[Tensor]:
    """RMS, kurtosis, largest, non-finite, and the share of the vector of ones."""
    x = x.detach().float()
    square = x.square().mean(-1)
    kurt = (x.pow(4).mean(-1) / square.square()).mean()
    uniform = x.shape[-1] * (x.mean(-1).square() / square).mean()
    return [x.square().mean().sqrt(), kurt, x.abs().max(), (~square.isfinite()).float().mean(), uniform]


class Hooked(Loop):
    """The core statistics by hooks, each brought to the host when it is computed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for block in self.model.blocks:
            block.register_forward_hook(self.of_block)
            for name in ("attn", "mlp"):
                block.get_submodule(name).register_forward_hook(self.of_branch)
        for module in self.model.modules():
            if isinstance(module, InstrumentedNorm):
                module.register_forward_hook(self.of_norm)

    def keep(self, values: Sequence[Tensor]) -> None:
        """To the host."""
        self.values += [value.item() for value in values]

    def of_block(self, module: nn.Module, args: Any, after: Tensor) -> None:
        """The stream before a block, the angle to that after it, and the gradient's."""
        x = args[0]
        self.keep([*of_stream(x), F.cosine_similarity(x.detach(), after.detach(), dim=-1).mean()])
        if x.requires_grad:
            x.register_hook(lambda grad: self.keep([grad.float().square().mean().sqrt()]))

    def of_branch(self, module: nn.Module, args: Any, y: Tensor) -> None:
        """What a sub-layer writes."""
        self.keep(of_stream(y)[:4])

    def of_norm(self, module: nn.Module, args: Any, y: Tensor) -> None:
        """What enters and leaves a norm."""
        x, y = args[0].detach().float(), y.detach().float()
        uniform = x.shape[-1] * (x.mean(-1).square() / x.square().mean(-1)).mean()
        self.keep([x.square().mean().sqrt(), y.square().mean().sqrt(), uniform])

    def after_backward(self) -> None:
        """Gradients, parameters and gains; copies for the updates."""
        self.copies = [p.detach().clone() for p in self.model.parameters()]
        for name, p in self.model.named_parameters():
            assert p.grad is not None
            self.keep([p.grad.norm(), p.detach().norm()])
            if name.endswith(".gain"):
                g = p.detach()
                self.keep(
                    [g.square().mean().sqrt(), g.min(), g.abs().max(), g.std() / g.mean(), (g < 0).float().mean()]
                )

    def after(self) -> None:
        """Updates."""
        for p, copy in zip(self.model.parameters(), self.copies, strict=True):
            self.keep([(p.detach() - copy).norm()])


class Monitored(Loop):
    """The same sites and statistics by torch-module-monitor."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from torch_module_monitor import ModuleMonitor  # pyright: ignore[reportMissingImports]

        self.monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
        self.monitor.set_module(self.model)
        sites = r"blocks\.\d+(\.attn|\.mlp)?$|.*norms\.\w+$|head\.close$"
        for number, name in enumerate(("rms", "kurt", "absmax", "nonfinite", "uniform")):
            self.monitor.add_activation_metric(name, lambda x, number=number: of_stream(x)[number], sites)
        self.monitor.add_parameter_metric("norm", lambda p: p.norm())
        self.monitor.add_gradient_metric("norm", lambda g: g.norm())
        self.step = 0

    def before(self) -> None:
        """A step begins."""
        self.monitor.begin_step(self.step)
        self.step += 1

    def after_backward(self) -> None:
        """Parameters and gradients."""
        self.monitor.monitor_parameters()
        self.monitor.monitor_gradients()

    def after(self) -> None:
        """The step ends, and its numbers are forgotten: they would only pile up."""
        self.monitor.end_step()
        self.values = list(self.monitor.get_step_metrics().values())
        self.monitor.storage.log_dict.clear()


# Measuring.


@dataclass(slots=True)
class Pair:
    """A side and what it is compared with."""

    name: str
    side: Sequence[Turn]
    """The steps of a turn."""
    plain: Sequence[Turn]
    ratios: list[float]


def times(pair: Pair, batches: Sequence[tuple[Tensor, Tensor]], on_gpu: bool) -> tuple[float, float]:
    """What a turn of the side takes and what one of the plain steps does, in seconds."""
    took = {"side": 0.0, "plain": 0.0}
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
            took[name] = first.elapsed_time(last) / 1000
    else:
        for number, (tokens, targets) in enumerate(batches):
            for name in order if number % 2 == 0 else reversed(order):
                since = time.process_time()
                both[name][number](tokens, targets)
                took[name] += time.process_time() - since
    return took["side"], took["plain"]


def bench(words: Sequence[str], device: str, compiled: bool, rounds: int) -> dict[str, Pair]:
    """All sides of one model."""
    config = compose_run([*words, f"device={device}", f"compile={'on' if compiled else 'off'}", "deterministic=false"])
    resolved = resolve(config)
    apply(resolved)
    where, on_gpu = resolved.torch_device, resolved.device == "cuda"
    torch.compiler.reset()
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch._logging.set_logs(dynamo=logging.ERROR)  # that hooks break graphs is known
    mine = ours(config, where, compiled)
    plain, hooked = Loop(config, where, compiled).compile(), Hooked(config, where, compiled).compile()
    pairs = [
        Pair("core", [mine(True)] * 2, [mine(False)] * 2, []),
        Pair("core at the default", [mine(True)] + [mine(False)] * (EVERY - 1), [mine(False)] * EVERY, []),
        Pair("hooks and .item()", [hooked] * 2, [plain] * 2, []),
    ]
    try:
        pairs.append(Pair("torch-module-monitor", [Monitored(config, where, compiled).compile()] * 2, [plain] * 2, []))
    except ImportError:
        print("torch-module-monitor is not installed and is left out", file=sys.stderr)
    generator, batches = torch.Generator().manual_seed(0), []
    shape = (2, config.train.batch_size, config.model.context)
    for number in range(-2, rounds):
        for pair in pairs:
            drawn = [torch.randint(0, VOCAB, shape, generator=generator).to(where) for _ in pair.side]
            batches = [(one[0], one[1]) for one in drawn]
            side, plain = times(pair, batches, on_gpu)
            if number >= 0:  # the first two are for compiling
                pair.ratios.append(side / plain)
    for loop in (hooked, *(pair.side[0] for pair in pairs[3:])):  # a hook that a compiler left out would be free
        assert len(getattr(loop, "values", ())) > 10 * config.model.depth, f"{loop}: the hooks did not run"
    if on_gpu:
        counts = [waits(turns, batches[:1] * len(turns)) for turns in (pairs[1].plain, pairs[1].side)]
        print(
            f"{words[0]}, compile {compiled}: host waits in {EVERY} plain steps {counts[0]}, in an interval {counts[1]}"
        )
    return {pair.name: pair for pair in pairs}


def waits(turns: Sequence[Turn], batches: Sequence[tuple[Tensor, Tensor]]) -> int:
    """How often the host waits for the GPU in some steps."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for turn, (tokens, targets) in zip(turns, batches, strict=True):
                turn(tokens, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught)


def shown(pair: Pair) -> str:
    """The median, and the quartiles."""
    low, middle, high = statistics.quantiles(pair.ratios, n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=20, help="pairs of turns of each side")
    parser.add_argument("--models", default=None, help="some of them, with commas between")
    parser.add_argument("--compile", default="off,on", help="off, on, or off,on")
    parser.add_argument("--check", action="store_true", help="exit 1 above the bars")
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = MODELS_ON_GPU if args.device == "cuda" else MODELS
    names, switches = args.models.split(",") if args.models else list(models), args.compile.split(",")
    for word, given, known in (("--models", names, models), ("--compile", switches, ("off", "on"))):
        if wrong := [one for one in given if one not in known]:
            parser.error(f"{word} {wrong[0]}: is none of {', '.join(known)}")
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: quartiles take 2 at least")
    rows, above = [], False
    for name in names:
        for switch in switches:
            pairs = bench(models[name], args.device, switch == "on", args.rounds)
            rows.append({"model": name, "compile": switch, **{key: shown(pair) for key, pair in pairs.items()}})
            above |= any(statistics.median(pairs[key].ratios) > bar for key, bar in BARS.items())
            print(render(rows[-1:], "markdown").splitlines()[-1], file=sys.stderr, flush=True)
    print(render(rows, "markdown"))
    print(f"\nbars: {', '.join(f'{name} {bar}' for name, bar in BARS.items())}: {'above' if above else 'held'}")
    return int(args.check and above)


if __name__ == "__main__":
    sys.exit(main())
