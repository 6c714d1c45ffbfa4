"""Signal propagation at initialisation (`normlab propagation`): one forward and backward pass and one update.

The forward pass is the training step's. Norms are computed in float64, unlike in the core statistics: this command
looks for signals that vanish or explode, whose squares leave the range of float32.

Shapes: B batch, T time, D width; a profile has one number for each block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT
from normlab.model.init import build_model, derive_seed
from normlab.model.runner import SingleRun
from normlab.options import flatten_options
from normlab.stats.instrument import Selection
from normlab.training.optim import Optimizer, hyperparameters_at, is_decayed

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


def measure(config: RunConfig, model: GPT | None = None) -> tuple[Signal, GPT, dict[str, Tensor]]:
    """Measure one pass on random tokens, with the run's batch size and context.

    Args:
        config: The run's config; its seed draws the tokens.
        model: The model to measure; None for the run's, at initialisation.

    Returns:
        The measurements, the model, and the gradient of each parameter by name.
    """
    model = build_model(config, VOCAB).train() if model is None else model
    drawn_BT = zipf_tokens(config.train.batch_size, config.model.context + 1, config.seed)
    output = SingleRun(model, compiled=False).loss(drawn_BT[:, :-1], drawn_BT[:, 1:], _RMS)
    rms = {(column.statistic, column.layer): value.item() for column, value in output.statistics.items()}
    layers = range(1, len(model.blocks) + 1)
    ratios = {
        branch: [rms.get((branch, at), math.nan) / rms["resid", at] if rms["resid", at] else math.nan for at in layers]
        for branch in ("attn", "mlp")
    }
    params = dict(model.named_parameters())
    gradients = torch.autograd.grad(output.loss, list(params.values()), materialize_grads=True)
    grads = dict(zip(params, gradients, strict=True))
    signal = Signal(
        loss=output.loss.item(),
        embedded=rms["resid", 1],
        stream=[rms["resid", layer + 1] for layer in layers],
        attn_ratio=ratios["attn"],
        mlp_ratio=ratios["mlp"],
        gradient=[_norm([grads[f"blocks.{layer - 1}.mlp.down.weight"]]) for layer in layers],
        block_gradient=[
            _norm([grad for name, grad in grads.items() if name.startswith(f"blocks.{layer - 1}.")]) for layer in layers
        ],
    )
    return signal, model, grads


def _norm(tensors: Iterable[Tensor]) -> float:
    return sum(tensor.double().square().sum().item() for tensor in tensors) ** 0.5


_RMS: Selection = {
    kind: ((kind, lambda view: view.x.double().square().mean((-2, -1)).sqrt()),) for kind in ("resid", "attn", "mlp")
}
"""RMS in float64: in float32, squares of large numbers overflow and those of small ones vanish."""


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
            "overrides": options,
            "seeds": seeds,
            **{name: _mean([sample[name] for sample in samples]) for name in samples[0]},
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
        matrices = [name for name in params if name.startswith(f"blocks.{layer}.") and params[name].dim() == 2]
        size = _norm(before[name] for name in matrices)
        moved = _norm(params[name] - before[name] for name in matrices)
        update.append(moved / size if size else math.inf)  # weights that are 0 have no relative update
    return {**dataclasses.asdict(signal), "update": update}


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers or profiles, with None for one that is not finite: JSON has no number for it."""
    if isinstance(values[0], list):
        return [_mean(numbers) for numbers in zip(*values, strict=True)]
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else None
