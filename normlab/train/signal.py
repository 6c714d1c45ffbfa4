"""Signal propagation at initialisation: one forward and backward pass and one update, no training.

Shapes: B batch, T time, D width; a profile has one number for each block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT
from normlab.model.init import build_model, derive_seed
from normlab.options import flatten_options
from normlab.stats.instrument import Collector, Selection, main_stream
from normlab.train.optim import Optimizer, hyperparameters_at, is_decayed

Row = dict[str, Any]

VOCAB = 512
"""Vocabulary size. Tokens follow Zipf's law: token r has probability proportional to 1 / r."""


@dataclass(frozen=True, slots=True)
class Signal:
    """Measurements of one forward and backward pass."""

    loss: float
    """Cross-entropy in nats/token on random tokens."""
    embedded: float
    """RMS of the stream before the first block."""
    stream: list[float]
    """RMS of the stream after each block."""
    attn_ratio: list[float]
    """RMS of what attention adds to the stream, after norms and factors, over the RMS of the block's input.

    The statistic of this name; NaN where the stream is 0."""
    mlp_ratio: list[float]
    """The same ratio for the MLP."""
    gradient: list[float]
    """L2 norm of the gradient of each block's `mlp.down.weight`."""
    block_gradient: list[float]
    """L2 norm of the gradient of all parameters of a block."""


def zipf_tokens(batch: int, length: int, seed: int) -> Tensor:
    """Return random tokens, shape (B, T)."""
    weights = 1 / np.arange(1, VOCAB + 1)
    generator = np.random.Generator(np.random.Philox(key=derive_seed(seed, "probe")))
    drawn = generator.random((batch, length))
    edges = np.cumsum(weights / weights.sum())
    return torch.from_numpy(np.searchsorted(edges, drawn).clip(max=VOCAB - 1))


def measure(config: RunConfig) -> tuple[Signal, GPT, dict[str, Tensor]]:
    """Measure one pass at initialisation on random tokens, with the run's batch size and context.

    Returns:
        The measurements, the model, and the gradient of each parameter by name.
    """
    model = build_model(config, VOCAB).train()
    signal, grads = measure_model(model, config)
    return signal, model, grads


def measure_model(model: GPT, config: RunConfig) -> tuple[Signal, dict[str, Tensor]]:
    """Measure one pass of a model as it is; see `measure`."""
    drawn_BT = zipf_tokens(config.train.batch_size, config.model.context + 1, config.seed)
    stream = model.embed(drawn_BT[:, :-1])
    sizes = [_rms(main_stream(stream)).item()]
    ratios: dict[str, list[float]] = {branch: [] for branch in _BRANCHES}
    for block in model.blocks:
        with Collector(_BRANCHES) as collector:
            stream = block(stream)
        names, added = collector.results()
        sizes_added = dict(zip((branch for branch, _ in names), added.tolist(), strict=True))
        for branch, ratio in ratios.items():
            ratio.append(sizes_added.get(branch, math.nan) / sizes[-1] if sizes[-1] else math.nan)
        sizes.append(_rms(main_stream(stream)).item())
    loss = cross_entropy(model.head(stream).flatten(0, 1), drawn_BT[:, 1:].flatten())
    params = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    grads = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(params.items(), gradients, strict=True)}
    signal = Signal(
        loss=loss.item(),
        embedded=sizes[0],
        stream=sizes[1:],
        attn_ratio=ratios["attn"],
        mlp_ratio=ratios["mlp"],
        gradient=[_norm([grads[f"blocks.{layer}.mlp.down.weight"]]) for layer in range(len(model.blocks))],
        block_gradient=[
            _norm([grad for name, grad in grads.items() if name.startswith(f"blocks.{layer}.")])
            for layer in range(len(model.blocks))
        ],
    )
    return signal, grads


def _rms(x: Tensor) -> Tensor:
    return x.detach().double().square().mean().sqrt()


def _norm(tensors: list[Tensor]) -> float:
    return sum(tensor.double().square().sum().item() for tensor in tensors) ** 0.5


_PROFILES = ("stream", "attn_ratio", "mlp_ratio", "gradient", "block_gradient")
_BRANCHES: Selection = {branch: ((branch, lambda view: _rms(view.x)),) for branch in ("attn", "mlp")}
"""RMS of what each sub-layer adds, in float64, where squares of large float32 numbers do not overflow."""


def measure_rows(
    configs: Sequence[RunConfig], seeds: int, report_progress: Callable[[str], None] = lambda _: None
) -> Iterator[Row]:
    """Yield a row for each config: its settings and its profiles, with None for a value that is not finite.

    Args:
        configs: Corpus, steps and schedule have no effect.
        seeds: Number of initialisations and batches to average over, counted from the config's seed.
        report_progress: Receives the name of each row before it is measured.
    """
    for config, options in zip(configs, _varied_options(configs), strict=True):
        report_progress(f"{config.norm.label} {config.placement.name} depth {config.model.depth}")
        samples = [_measure(dataclasses.replace(config, seed=config.seed + number)) for number in range(seeds)]
        yield {
            "norm": config.norm.label,
            "placement": config.placement.name,
            "depth": config.model.depth,
            "width": config.model.width,
            "init": config.init_rule,
            "words": options,
            "seeds": seeds,
            **{name: _mean([sample[name] for sample in samples]) for name in ("loss", "embedded")},
            **{
                name: [_mean(values) for values in zip(*(sample[name] for sample in samples), strict=True)]
                for name in (*_PROFILES, "update")
            },
        }


def _varied_options(configs: Sequence[RunConfig]) -> list[dict[str, Any]]:
    """Return for each config the options that distinguish configs of the same norm, placement, init and depth.

    An option that distinguishes no more configs than the options before it, such as one derived from them, is left out.
    """
    flat = [flatten_options(config) for config in configs]
    known: list[tuple[Any, ...]] = [(config.norm.label, config.placement.name, config.init_rule) for config in configs]
    varied: list[str] = []
    for option in {option: None for tree in flat for option in tree}:
        if option not in ("init", "model.depth", "data.seed"):
            refined = [(*values, repr(tree.get(option))) for values, tree in zip(known, flat, strict=True)]
            if len(set(refined)) > len(set(known)):
                varied.append(option)
                known = refined
    return [{option: tree.get(option) for option in varied} for tree in flat]


def _measure(config: RunConfig) -> Row:
    """Return the loss and the profiles of one initialisation and batch."""
    signal, model, grads = measure(config)
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    before = {name: parameter.clone() for name, parameter in params.items()}
    decayed = [name for name, parameter in params.items() if is_decayed(config.optim, parameter)]
    optimizer = Optimizer(config.optim, params, decayed)
    peak = hyperparameters_at(config.optim, config.train.steps, config.optim.warmup_steps or 0)
    with torch.no_grad():
        optimizer.update(params, grads, peak, torch.tensor(True))
        config.placement.project(params)
    update = []
    for layer in range(config.model.depth):
        names = [name for name in params if name.startswith(f"blocks.{layer}.") and params[name].dim() == 2]
        moved = sum((params[name] - before[name]).double().square().sum().item() for name in names)
        size = sum(before[name].double().square().sum().item() for name in names)
        update.append((moved / size) ** 0.5 if size else math.inf)  # weights that are 0 have no relative update
    return {**dataclasses.asdict(signal), "update": update}


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None if it is not finite: JSON has no number for it."""
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else None
