"""Signal propagation at initialisation: one forward and backward pass, no training.

Shapes: B batch, T time, D width; a profile has one number for each block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from normlab.config import RunConfig
from normlab.model.gpt import GPT
from normlab.model.init import build_model, derive_seed
from normlab.stats.instrument import Collector, Selection, main_stream

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


def slope(depths: list[int], values: list[float]) -> float:
    """Return the power of L by which values grow: the least-squares slope of log(value) over log(L)."""
    x, y = np.log(depths), np.log(values)
    return float(np.polyfit(x, y, 1)[0])


def _rms(x: Tensor) -> Tensor:
    return x.detach().double().square().mean().sqrt()


def _norm(tensors: list[Tensor]) -> float:
    return sum(tensor.double().square().sum().item() for tensor in tensors) ** 0.5


_BRANCHES: Selection = {branch: ((branch, lambda view: _rms(view.x)),) for branch in ("attn", "mlp")}
"""RMS of what each sub-layer adds, in float64, where squares of large float32 numbers do not overflow."""
