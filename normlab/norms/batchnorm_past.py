"""Batch norm that sees no future: at each position, mean and variance of the tokens up to there.

Shapes: `*batch` any leading axes, of which the second is time (the first where there is one), T time, N tokens of
one position, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.norms.base import register_norm
from normlab.norms.batchnorm import BatchNorm, BatchNormConfig
from normlab.options import option


def time_first(x_D: Tensor) -> Tensor:
    """(B, T, ..., D) as (T, N, D), N the tokens that share a position; (T, D) as (T, 1, D)."""
    x_TD = x_D.movedim(1, 0) if x_D.dim() > 2 else x_D
    return x_TD.reshape(len(x_TD), -1, x_D.shape[-1])


def time_back(y_TND: Tensor, like: Tensor) -> Tensor:
    """What `time_first` moved, back in the shape of `like`."""
    if like.dim() <= 2:
        return y_TND.view_as(like)
    return y_TND.unflatten(1, (len(like), *like.shape[2:-1])).movedim(0, 1)


def past_average(x_TD: Tensor) -> Tensor:
    """The average of x_1 ... x_t in place of each x_t; a product with a matrix, deterministic on every device."""
    steps = len(x_TD)
    weights_TT = x_TD.new_ones(steps, steps).tril() / torch.arange(1, steps + 1, device=x_TD.device).unsqueeze(1)
    with torch.autocast(x_TD.device.type, enabled=False):
        return weights_TT @ x_TD


@register_norm
@dataclass(kw_only=True, slots=True)
class BatchNormPastConfig(BatchNormConfig):
    """(x - mean_t) / sqrt(var_t + eps) * gain + bias, over all tokens of the batch at or before x's own position t.

    In training batchnorm shows each position the later ones; this one does not, at the price of statistics that
    are poor at the first positions. In evaluation the statistics are running ones of the whole batch, as in
    batchnorm, for every position; the gap is reported with every validation loss. The second axis is time.
    """

    formula: ClassVar[str] = "(x - mean(x_1 ... x_t)) / sqrt(var(x_1 ... x_t) + eps) * gain + bias, over the batch too"
    source: ClassVar[str] = (
        "batch norm (arXiv:1502.03167) over the past, as Megalodon's timestep norm, arXiv:2404.08801"
    )
    oracle: ClassVar[str] = "torch's batch_norm of every beginning of the batch, its last position kept"
    oracle_kind: ClassVar[str] = "identity"
    parameters: ClassVar[str] = "2 * D"
    blind_to: ClassVar[tuple[str, ...]] = ("scale", "shift")
    equals: ClassVar[str] = "batchnorm at the last position, and in evaluation"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "Megalodon's norm is of one sequence and of groups of channels; this is of the batch and of each channel.",
        "mean(x^2) - mean(x)^2 of running sums loses its digits where the mean is large, and can be negative.",
        "With one sequence in the batch the first position has no variance: its output is the bias.",
    )
    causal: ClassVar[bool] = True

    name: str = "batchnorm_past"
    running_var: str = option("unbiased", choices=("unbiased", "biased"))
    """Variance that is kept for evaluation: over N-1, or over N, for N tokens of the batch."""

    def build(self, width: int) -> nn.Module:
        """The module, for vectors of `width` numbers."""
        return BatchNormPast(width, self)

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Torch's batch_norm, once for each position; the operator, for the function refuses a batch of one token."""
        time = 1 if x_D.dim() > 2 else 0
        positions = []
        for t in range(x_D.shape[time]):
            past_D = x_D.narrow(time, 0, t + 1)
            tokens_D = past_D.reshape(-1, past_D.shape[-1])
            y_D = torch.batch_norm(tokens_D, None, None, None, None, True, 0.0, self.eps, False)
            positions.append(y_D.view(past_D.shape).select(time, t))
        return self.reference_affine(torch.stack(positions, time), weights)


class BatchNormPast(BatchNorm):
    """The module of `BatchNormPastConfig`. Maps (*batch, D) to the same shape and dtype; rounds once, at the end."""

    def statistics(self, x_TND: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of all tokens up to each position, (T, D) both.

        A position adds to the sum of squares what its tokens deviate from their own mean, and what that mean
        deviates from the past's: (t - 1) / t (m_t - mean_{t-1})^2 a token. Every term is positive, so that no
        digits are lost in a difference.
        """
        own_TD, within_TD = x_TND.mean(1), x_TND.var(1, unbiased=False)
        mean_TD = past_average(own_TD)
        count_T1 = torch.arange(2, len(own_TD) + 1, device=x_TND.device, dtype=x_TND.dtype).unsqueeze(1)
        between_TD = (own_TD[1:] - mean_TD[:-1]).square() * ((count_T1 - 1) / count_T1)
        return mean_TD, past_average(within_TD + F.pad(between_TD, (0, 0, 1, 0)))

    def normalise(self, x_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The batch normalised up to each position, and mean and biased variance of all its tokens, (D,) both."""
        x_TND = time_first(x_D)
        mean_TD, var_TD = self.statistics(x_TND)
        y_TND = (x_TND - mean_TD.unsqueeze(1)) * torch.rsqrt(var_TD.unsqueeze(1) + self.eps)
        return time_back(y_TND, x_D), mean_TD[-1], var_TD[-1]
