"""How a signal goes through a model at its start: forward and back once, no training.

Shapes: B batch, T time, D width; profiles have one number a block.
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
from normlab.stats.show import Wanted, looking
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
    attn_ratio: list[float]
    """RMS of what each block's attention adds to the stream, after norms and factors, over the RMS of the stream that
    enters the block: the statistic of this name. Not a number where the stream is 0."""
    mlp_ratio: list[float]
    """The same of each block's MLP."""
    gradient: list[float]
    """L2 norm of the loss's gradient with respect to each block's `mlp.down.weight`."""
    block_gradient: list[float]
    """L2 norm of the gradient with respect to all of a block's parameters."""


def zipf_tokens(batch: int, length: int, seed: int) -> Tensor:
    """Random tokens, shape (B, T)."""
    weights = 1 / np.arange(1, VOCAB + 1)
    generator = np.random.Generator(np.random.Philox(key=derive_seed(seed, "probe")))
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
    sizes = [_rms(first(stream)).item()]
    ratios: dict[str, list[float]] = {branch: [] for branch in _BRANCHES}
    for block in model.blocks:
        with looking(_BRANCHES) as seen:
            stream = block(stream)
        names, added = seen.taken()
        found = dict(zip((branch for branch, _ in names), added.tolist(), strict=True))
        for branch, ratio in ratios.items():
            ratio.append(found.get(branch, math.nan) / sizes[-1] if sizes[-1] else math.nan)
        sizes.append(_rms(first(stream)).item())
    loss = cross_entropy(model.head(stream).flatten(0, 1), drawn_BT[:, 1:].flatten())
    params = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    grads = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(params.items(), found, strict=True)}
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
    return signal, model, grads


def slope(depths: list[int], values: list[float]) -> float:
    """The power of L by which values grow: the least-squares slope of log(value) in log(L)."""
    x, y = np.log(depths), np.log(values)
    return float(np.polyfit(x, y, 1)[0])


def _rms(x: Tensor) -> Tensor:
    return x.detach().double().square().mean().sqrt()


def _norm(tensors: list[Tensor]) -> float:
    return sum(tensor.double().square().sum().item() for tensor in tensors) ** 0.5


_BRANCHES: Wanted = {branch: ((branch, lambda view: _rms(view.x)),) for branch in ("attn", "mlp")}
"""The size of what each sub-layer adds, in float64: what float32 cannot square is still seen."""
