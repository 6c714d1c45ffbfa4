"""Cross entropy of large logits in chunks of tokens, with gradients that are computed in the forward pass.

The logits of one chunk exist at a time, and so do their gradient and their float32 copy. The forward pass therefore
computes the gradients of the loss with respect to the head's input and parameters, and the backward pass only scales
them: no logits are stored or computed twice.

Shapes: N tokens, D width, V vocabulary; `...R` marks an axis that only stacked runs have.

Source: Hsu et al. 2024, arXiv:2410.10989 (Liger Kernel), section 3.2.
"""

from __future__ import annotations  # torch's compiler cannot trace the annotations of a nested function

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from normlab.catalogue.statistics.profiles import StatisticColumn
from normlab.catalogue.statistics.registry import STATISTICS
from normlab.config.memory import LARGE_LOGITS, MOST_CHUNKS
from normlab.model.instrument import Collector, StatisticsSelection
from normlab.model.statistics import compute


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean", z_loss: float = 0.0) -> Tensor:
    """Return the negative log-likelihood in nats, in float32 or better.

    Its gradient is that of its sum with z (ln sum exp logits)^2, which keeps the logits from drifting.

    Source of the z-loss: Chowdhery et al. 2022, arXiv:2204.02311 (PaLM), section 5.

    Args:
        logits: Shape (*batch, V).
        targets: Shape (*batch).
        reduction: `mean` or `sum` over the tokens; `none` returns a value for each.
        z_loss: z.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)
    if not z_loss:
        return loss
    penalty = z_loss * logits.flatten(0, -2).logsumexp(-1).square()
    if reduction == "sum":
        penalty = penalty.sum()
    elif reduction == "mean":
        penalty = penalty.mean()
    # The value stays the cross entropy, by which runs with and without a z-loss are compared.
    return loss + (penalty - penalty.detach())


def has_large_logits(head: nn.Module, targets: Tensor) -> bool:
    """Return whether the logits of each run for targets of shape (...R, B, T) are large.

    The number of stacked runs does not matter, so that a run computes its loss alike alone and in a pack.
    """
    return math.prod(targets.shape[-2:]) * _vocab_size(head) > LARGE_LOGITS


def chunked_cross_entropy(
    head: nn.Module, params: Mapping[str, Tensor], selection: StatisticsSelection, x: Tensor, targets: Tensor,
    scale: Tensor | None = None,
) -> tuple[Tensor, dict[StatisticColumn, Tensor]]:  # fmt: skip
    """Return the mean negative log-likelihood in nats/token, (...R), and the statistics of the logits, (...R) each.

    The mean of a statistic over tokens is the mean of its chunks' values, weighted by their tokens.

    Args:
        head: A module that maps x and `part="unembed"` to logits.
        params: The parameters of that part, each (...R, *shape).
        selection: The statistics to collect.
        x: The input of that part, (...R, B, T, D).
        targets: The next tokens, (...R, B, T).
        scale: The loss scale, so that the gradients do not vanish in float16.
    """
    tokens = math.prod(targets.shape[-2:])

    def chunk_loss(
        params: Mapping[str, Tensor], x_ND: Tensor, targets_N: Tensor
    ) -> tuple[Tensor, dict[StatisticColumn, Tensor]]:
        with Collector(selection) as collector:
            logits_NV = functional_call(head, dict(params), (x_ND,), {"part": "unembed"})
        loss = cross_entropy(logits_NV, targets_N, "sum", _z_loss(head)) / tokens
        if scale is not None:
            loss = loss * scale
        return loss, compute(selection, collector.observations)

    chunks = _run_chunks(chunk_loss, _vocab_size(head), params, x.flatten(-3, -2), targets.flatten(-2, -1))
    loss = torch.stack(chunks.losses).sum(0)
    if chunks.x_grads:
        x_grad = torch.cat(chunks.x_grads, -2).view_as(x)
        loss = _WithGradients.apply(loss, [x_grad, *chunks.param_grads], x, *params.values())
    if scale is not None:
        loss = loss / scale
    return loss, _merge_statistics(chunks.statistics, chunks.shares)


class _Chunks(NamedTuple):
    """The results of each chunk of tokens; gradients of parameters are summed over the chunks."""

    losses: list[Tensor]
    """(...R) each; their sum is the mean over all tokens."""
    statistics: list[dict[StatisticColumn, Tensor]]
    shares: list[float]
    """The share of all tokens that each chunk has."""
    x_grads: list[Tensor]
    """(...R, N, D) each; none where gradients are off."""
    param_grads: list[Tensor]
    """(...R, *shape) each; none where gradients are off."""


def _run_chunks(
    chunk_loss: Callable[..., Any], vocab_size: int, params: Mapping[str, Tensor], x_ND: Tensor, targets_N: Tensor
) -> _Chunks:
    """Call a function of parameters, inputs (...R, N, D) and targets (...R, N) for one chunk of tokens at a time."""
    has_gradients = torch.is_grad_enabled()
    run: Any = chunk_loss
    if has_gradients:
        run = grad_and_value(run, argnums=(0, 1), has_aux=True)
    runs, tokens = 1, targets_N.shape[-1]
    if targets_N.dim() > 1:
        run, runs = vmap(run), len(targets_N)
    # The logits of all runs exist at once, so they share the limit of a chunk.
    size = max(LARGE_LOGITS // (runs * vocab_size), math.ceil(tokens / MOST_CHUNKS))
    losses: list[Tensor] = []
    statistics: list[dict[StatisticColumn, Tensor]] = []
    shares: list[float] = []
    x_grads: list[Tensor] = []
    param_grads: list[Tensor] = []
    device = x_ND.device.type
    # Autocast must not cache: it would keep a copy of the weights for each chunk.
    with (
        torch.no_grad(),
        torch.autocast(
            device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), cache_enabled=False
        ),
    ):
        for x_part, targets_part in zip(x_ND.split(size, -2), targets_N.split(size, -1), strict=True):
            output = run(params, x_part, targets_part)
            if has_gradients:
                (of_params, of_x), output = output
                x_grads.append(of_x)
                # Added in place: the gradients of all chunks would take the memory of as many heads.
                if param_grads:
                    for total, name in zip(param_grads, params, strict=True):
                        total.add_(of_params[name])
                else:
                    param_grads = [of_params[name] for name in params]
            losses.append(output[0])
            statistics.append(output[1])
            shares.append(targets_part.shape[-1] / tokens)
    return _Chunks(losses, statistics, shares, x_grads, param_grads)


def _merge_statistics(parts: list[dict[StatisticColumn, Tensor]], shares: list[float]) -> dict[StatisticColumn, Tensor]:
    """Return the statistics of all tokens, from those of chunks and the share of the tokens that each chunk has."""
    merged: dict[StatisticColumn, Tensor] = {}
    for column in parts[0]:
        values = [part[column] for part in parts]
        if STATISTICS[column.statistic].merge == "max":
            merged[column] = torch.stack(values).amax(0)
        else:
            weighted = [share * value for share, value in zip(shares, values, strict=True)]
            merged[column] = torch.stack(weighted).sum(0)
    return merged


class _WithGradients(torch.autograd.Function):
    """A loss, (...R), whose gradients of the inputs, (...R, *shape), are known. It has no second derivative."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        scaled: list[Tensor] = []
        for gradient in ctx.saved_tensors:
            # (...R, 1, 1): each run's gradients are scaled by the gradient of its own loss.
            factor = grad.view(*grad.shape, *[1] * (gradient.dim() - grad.dim()))
            scaled.append(gradient * factor.to(gradient.dtype))
        return None, None, *scaled


def _z_loss(head: nn.Module) -> float:
    z_loss = head.z_loss
    assert isinstance(z_loss, float)
    return z_loss


def _vocab_size(head: nn.Module) -> int:
    weight = head.weight
    assert isinstance(weight, Tensor)
    return len(weight)
