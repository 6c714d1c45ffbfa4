"""How a signal goes through a model at its start: forward and back once, no training.

Shapes: B batch, T time, D width; profiles have one number a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from normlab.config import RunConfig
from normlab.model.gpt import GPT
from normlab.model.init import build_model, seed_of
from normlab.stats.tap import first

VOCAB = 512
"""Tokens that there are, drawn by Zipf's law: the r-th with a probability as 1 / r."""


@dataclass(frozen=True, slots=True)
class Signal:
    """What was seen in one forward and backward pass."""

    loss: float
    """Cross-entropy in nats per token, of tokens that follow no rule."""
    embedded: float
    """RMS of the stream before the first block."""
    stream: list[float]
    """RMS of the stream after each block."""
    change: list[float]
    """RMS of what each block changed in the stream, over the stream's RMS before it."""
    gradient: list[float]
    """L2 norm of the loss's gradient with respect to each block's `mlp.down.weight`."""
    block_gradient: list[float]
    """L2 norm of the gradient with respect to all of a block's parameters."""


def zipf_tokens(batch: int, length: int, seed: int) -> Tensor:
    """Random tokens, shape (B, T)."""
    weights = 1 / np.arange(1, VOCAB + 1)
    generator = np.random.Generator(np.random.Philox(key=seed_of(seed, "probe")))
    drawn = generator.random((batch, length))
    edges = np.cumsum(weights / weights.sum())
    return torch.from_numpy(np.searchsorted(edges, drawn).clip(max=VOCAB - 1))


def measure(config: RunConfig) -> tuple[Signal, GPT, dict[str, Tensor]]:
    """One pass at initialisation on random tokens, a batch of the run's size and context.

    Returns:
        What was seen, the model, and the gradient of each of its parameters by name.
    """
    model = build_model(config, VOCAB).train()
    drawn_BT = zipf_tokens(config.train.batch_size, config.model.context + 1, config.seed)
    stream = model.embed(drawn_BT[:, :-1])
    streams = [first(stream)]
    for block in model.blocks:
        stream = block(stream)
        streams.append(first(stream))
    loss = cross_entropy(model.head(stream).flatten(0, 1), drawn_BT[:, 1:].flatten())
    params = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    grads = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(params.items(), found, strict=True)}
    sizes = [_rms(x_BTD) for x_BTD in streams]
    pairs = list(pairwise(streams))
    signal = Signal(
        loss=loss.item(),
        embedded=sizes[0],
        stream=sizes[1:],
        change=[_rms(after - before) / max(_rms(before), 1e-30) for before, after in pairs],
        gradient=[_norm([grads[f"blocks.{layer}.mlp.down.weight"]]) for layer in range(len(pairs))],
        block_gradient=[
            _norm([grad for name, grad in grads.items() if name.startswith(f"blocks.{layer}.")])
            for layer in range(len(pairs))
        ],
    )
    return signal, model, grads


def slope(depths: list[int], values: list[float]) -> float:
    """The power of L by which values grow: the least-squares slope of log(value) in log(L)."""
    x, y = np.log(depths), np.log(values)
    return float(np.polyfit(x, y, 1)[0])


def _rms(x: Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item()


def _norm(tensors: list[Tensor]) -> float:
    return sum(tensor.double().square().sum().item() for tensor in tensors) ** 0.5
