"""The sides of the benchmarks: normlab, karpathy/nanoGPT, and a plain PyTorch loop over normlab's model.

Each takes turns of 10 steps (`turns.py`), in a process of its own, on the same text and with the same shapes:

- `Normlab`: `train_pack` with its defaults: batches, step, statistics in every tenth step, local record, progress bar.
- `NanoGPT`: train.py of a clone (`nanogpt.py`), which prints the loss every 10 steps as normlab does.
- `PlainLoop`: random windows, the same model, AdamW(fused=True), the learning rate, and the loss every 10 steps.

None evaluates or writes checkpoints.

Shapes: B batch, T context, N tokens, V vocabulary.
"""

import io
import logging
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from unittest import mock

import nanogpt
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from turns import Pause, Side

from normlab.catalogue.optimizers.options import AdamW
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.data.baselines import count_tokens
from normlab.data.corpus import FILES, Corpus, open_corpus
from normlab.data.tokenizers import BytesTokenizer
from normlab.model.flops import flops_per_token
from normlab.model.init import build_model
from normlab.system.openmp import SPIN_COUNT
from normlab.tracking.console import Console, MetricsRow
from normlab.training import start as run_module
from normlab.training.machine import resolve
from normlab.training.optim import learning_rate

TURN = 10
"""Steps in a turn; one of them has statistics, as by default."""
WARM_UP = 2
"""Turns before the first timed one, in which the steps with and without statistics compile."""
MANY_STEPS = 1_000_000
"""Steps of a run that a benchmark ends."""

MODELS = {
    "2x32": ["norm=layernorm", "model=gpt2_nano"],
    "4x128": ["norm=layernorm", "model=gpt2_tiny"],
    "6x384": ["norm=layernorm", "model=gpt2_mini", "model.context=128", "train.batch_size=2"],
}
"""The smallest, whose step is mostly overhead; the default; and a larger one, with a batch that suits a CPU. All have
nanoGPT's norm."""
MODELS_ON_GPU = {
    **MODELS,
    "6x384": ["norm=layernorm", "model=gpt2_mini", "train.batch_size=64"],
    "gpt2_124m": ["norm=layernorm", "model=gpt2_124m", "train.batch_size=16"],
}
VOCABULARIES = {"gpt2_124m": 50_257}
"""Models with random tokens of another vocabulary than bytes."""
AS_NORMLAB = {"GOMP_SPINCOUNT": str(SPIN_COUNT)}
"""The environment that the command `normlab` gives its processes (`normlab/system/openmp.py`)."""


class RandomTokens(BytesTokenizer):
    """A tokenizer with a vocabulary of any size, which encodes nothing."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


def with_random_tokens(corpus: Corpus, vocab_size: int, folder: Path) -> Corpus:
    """Return a corpus of random tokens of a vocabulary, with its cache in a folder."""
    tokens_N: Any = np.random.default_rng(0).integers(0, vocab_size, 2**22, dtype=np.uint16)
    train_N, val_N = tokens_N, tokens_N[: 2**18]
    count_tokens(train_N, val_N, vocab_size).save(folder / FILES["counts"])
    return replace(corpus, train=train_N, val=val_N, tokenizer=RandomTokens(vocab_size), folder=folder)


class Terminal(io.StringIO):
    """A terminal for the console, so that it draws the progress bar, its more expensive form."""

    def isatty(self) -> bool:
        return True


class Turns:
    """Tracker that ends a turn each time the training loop logs its steps, every 10."""

    def __init__(self, pause: Pause) -> None:
        self._pause, self._turns = pause, 0

    def start(self, run: Mapping[str, Any], first_step: int) -> None:
        """Do nothing."""

    def log(self, rows: Sequence[MetricsRow]) -> None:
        """End a turn, unless the rows are of an evaluation, or of steps that warm up."""
        if rows[-1]["kind"] == "pace":
            self._turns += 1
            if self._turns >= WARM_UP:
                self._pause()

    def finish(self, status: object) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Training(ABC):
    """Trains in turns."""

    overrides: tuple[str, ...]
    compiled: bool = False
    vocab_size: int | None = None
    """Vocabulary of random tokens; None for the text of the config."""

    def config(self, *overrides: str) -> RunConfig:
        """Return the config of a run that is longer than a benchmark, without evaluations and checkpoints."""
        between = ("train.checkpoint_every=0", "eval.every=0", "tracking.wandb=off", f"train.steps={MANY_STEPS}")
        switch = f"compile={'on' if self.compiled else 'off'}"
        config = compose_run([*between, switch, *self.overrides, *overrides])
        assert config.train.log_every == TURN
        return config

    def as_compiled(self, mode: str | None = None) -> Self:
        """Return the same side, compiled; `mode` is one of `torch.compile`."""
        return replace(self, compiled=True, mode=mode) if mode else replace(self, compiled=True)

    def corpus(self, config: RunConfig, folder: Path) -> Corpus:
        corpus = open_corpus(config.data)
        return corpus if self.vocab_size is None else with_random_tokens(corpus, self.vocab_size, folder)

    @abstractmethod
    def __call__(self, pause: Pause, folder: Path) -> None:
        """Train; call `pause` every 10 steps."""


@dataclass(frozen=True, slots=True)
class Normlab(Training):
    """normlab with its defaults."""

    runs: int = 1

    def __call__(self, pause: Pause, folder: Path) -> None:
        logging.disable(logging.WARNING)
        configs = [self.config(f"seed={seed}", f"results_dir={folder}") for seed in range(self.runs)]
        corpus = self.corpus(configs[0], folder)
        trackers: list[list[Any]] = [[] for _ in configs]
        trackers[-1] = [Turns(pause)]
        if self.runs == 1:  # the runs of a pack have no console
            trackers[0].insert(0, Console(Terminal()))
        with mock.patch.object(run_module, "open_corpus", return_value=corpus):
            run_module.train_pack(configs, trackers)


@dataclass(frozen=True, slots=True)
class NanoGPT(Training):
    clone: Path = Path()

    def __call__(self, pause: Pause, folder: Path) -> None:
        config = self.config()
        resolved = resolve(config)
        nanogpt.make_folder(self.clone, folder, self.corpus(config, folder))
        arguments = nanogpt.arguments(
            config, steps=MANY_STEPS, device=resolved.device, precision=resolved.precision, compiled=self.compiled
        )
        logged = 0

        def at_log() -> None:
            nonlocal logged
            logged += 1
            if logged > WARM_UP:  # the first line comes after the first step
                pause()

        nanogpt.run(folder, arguments, at_log)


@dataclass(frozen=True, slots=True)
class PlainLoop(Training):
    """A plain loop over normlab's model, compiled as a whole."""

    mode: str | None = None
    """The mode of `torch.compile`: "reduce-overhead" replays CUDA graphs."""

    def __call__(self, pause: Pause, folder: Path) -> None:
        run, corpus = self.config(), self.corpus(self.config(), folder)
        resolved, optim, context = resolve(run), run.optim, run.model.context
        device, autocast = resolved.torch_device, resolved.autocast()
        model: torch.nn.Module = build_model(run, corpus.tokenizer.vocab_size).to(device)
        forward = torch.compile(model, mode=self.mode) if self.compiled else model
        assert isinstance(optim, AdamW)
        decayed = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
        betas = (optim.beta1, optim.beta2)
        optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=True)
        tokens_N = torch.from_numpy(corpus.train.astype("int64")).to(device)
        span_T = torch.arange(context + 1, device=device)
        for step in range(MANY_STEPS):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(optim, run.train.steps, step)
            starts_B = torch.randint(len(tokens_N) - context, (run.train.batch_size, 1), device=device)
            windows = tokens_N[starts_B + span_T]
            with autocast():
                logits_BTV: Tensor = forward(windows[:, :-1].contiguous())
                loss = F.cross_entropy(logits_BTV.flatten(0, 1), windows[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if optim.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
            optimizer.step()
            if (step + 1) % TURN == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}", file=io.StringIO())
                if step + 1 >= WARM_UP * TURN:
                    pause()


def describe(side: Side, work: Training, seconds: Sequence[float] | None = None) -> dict[str, Any]:
    """Return the measurement of the turns of a side; `seconds` of each turn, if the side did not measure them."""
    config, runs = work.config(), work.runs if isinstance(work, Normlab) else 1
    seconds = [turn.seconds for turn in side.turns] if seconds is None else seconds
    middle = 1000 * statistics.median(seconds) / TURN
    quartiles = [1000 * each / TURN for each in statistics.quantiles(seconds, n=4)[::2]] if len(seconds) > 3 else None
    tokens_per_s = 1000 / middle * runs * config.train.batch_size * config.model.context
    peak_bytes = side.turns[-1].peak_bytes
    return {
        "batch": f"{config.train.batch_size}x{config.model.context}",
        "side": side.name,
        "runs": runs,
        "ms_per_step": middle,
        "quartiles": quartiles,
        "ms_per_step_and_run": middle / runs,
        "cpu_ms_per_step_and_run": 1000 * statistics.median(turn.cpu_seconds for turn in side.turns) / TURN / runs,
        "tokens_per_s": tokens_per_s,
        "flops_per_s": tokens_per_s * flops_per_token(config, work.vocab_size or 257),
        "precision": config.precision,
        "peak_gib": None if peak_bytes is None else peak_bytes / 2**30,
        "setup_s": side.setup_s,
        "turns": len(seconds),
    }
