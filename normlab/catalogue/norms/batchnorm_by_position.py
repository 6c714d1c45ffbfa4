"""Batch norm with statistics per position: over tokens up to it, or over tokens at it.

Shapes: `*batch` any leading axes: the second one, or the only one, is time; T time, N tokens of one position, D width,
F features: T times D.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.base.options import option
from normlab.catalogue.norms.base import register_norm
from normlab.catalogue.norms.batchnorm import BatchNorm, BatchNormConfig
from normlab.system.ranks import moments_over_ranks


def time_first(x_D: Tensor) -> Tensor:
    """Return (B, T, ..., D) as (T, N, D), N the tokens of one position; (T, D) as (T, 1, D)."""
    x_TD = x_D.movedim(1, 0) if x_D.dim() > 2 else x_D
    return x_TD.reshape(len(x_TD), -1, x_D.shape[-1])


def undo_time_first(y_TND: Tensor, like: Tensor) -> Tensor:
    """Return an output of `time_first` in the shape of `like`, the tensor before it."""
    if like.dim() <= 2:
        return y_TND.view_as(like)
    return y_TND.unflatten(1, (len(like), *like.shape[2:-1])).movedim(0, 1)


def past_average(x_TD: Tensor) -> Tensor:
    """Return the average of x_1 ... x_t for each t, by a (deterministic) matrix product."""
    steps = len(x_TD)
    # Not torch's cumulative sum, which has no deterministic kernel for floats on a GPU.
    weights_TT = x_TD.new_ones(steps, steps).tril() / torch.arange(1, steps + 1, device=x_TD.device).unsqueeze(1)
    # Autocast would compute the averages, and so the statistics, in a narrow dtype.
    with torch.autocast(x_TD.device.type, enabled=False):
        return weights_TT @ x_TD


class BatchNormPast(BatchNorm):
    def statistics(self, x_TND: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and biased variance over all tokens up to each position, both (T, D).

        Position t adds two terms to the sum of squares: the deviations of its tokens from their mean m_t, and
        (t - 1) / t (m_t - mean_{t-1})^2 per token. All terms are positive, so no digits cancel.
        """
        position_TD, within_TD = moments_over_ranks(x_TND.mean(1), x_TND.var(1, unbiased=False))
        mean_TD = past_average(position_TD)
        count_T1 = torch.arange(2, len(position_TD) + 1, device=x_TND.device, dtype=x_TND.dtype).unsqueeze(1)
        between_TD = (position_TD[1:] - mean_TD[:-1]).square() * ((count_T1 - 1) / count_T1)
        return mean_TD, past_average(within_TD + F.pad(between_TD, (0, 0, 1, 0)))

    def normalise_batch(self, x_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_TND = time_first(x_D)
        mean_TD, var_TD = self.statistics(x_TND)
        # The last position has seen all tokens, so the running statistics equal those of `batchnorm`.
        y_TND = (x_TND - mean_TD.unsqueeze(1)) * torch.rsqrt(var_TD.unsqueeze(1) + self.eps)
        return undo_time_first(y_TND, x_D), mean_TD[-1], var_TD[-1]


@register_norm
@dataclass(kw_only=True, slots=True)
class BatchNormPastConfig(BatchNormConfig):
    """(x - mean_t) / sqrt(var_t + eps) * gain + bias, over all tokens of the batch at positions up to t.

    Unlike batchnorm it is causal in training, but its statistics are noisy at the first positions. In evaluation
    every position uses the running statistics over all positions, as in batchnorm, and the record has the loss with
    batch statistics, too. Axis 1 is time.
    """

    title: ClassVar[str] = "BatchNorm over past tokens"
    module = BatchNormPast
    formula: ClassVar[str] = "(x - mean(x_1 ... x_t)) / sqrt(var(x_1 ... x_t) + eps) * gain + bias, over the batch too"
    source: ClassVar[str] = (
        "batch norm (arXiv:1502.03167) over the past, as Megalodon's timestep norm, arXiv:2404.08801"
    )
    verified_by: ClassVar[str] = "torch's batch_norm of every prefix of the batch, at its last position"
    reference_kind: ClassVar[str] = "identity"
    equals: ClassVar[str] = "batchnorm at the last position, and in evaluation"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "Megalodon's norm averages over one sequence and a group of channels; this norm over the batch, per channel.",
        "A variance computed as mean(x^2) - mean(x)^2 loses digits if the mean is large, and can be negative.",
        "With one sequence in the batch the first position has no variance: its output is the bias.",
    )
    causal: ClassVar[bool] = True

    name: str = "batchnorm_past"
    running_var: str = option(
        "unbiased", choices=("unbiased", "biased"),
        help="Variance for evaluation: over N - 1, or over N, for N tokens of the batch.",
    )  # fmt: skip

    def matmul_flops(self, shape: Sequence[int]) -> int:
        """Two averages over the past, each a product of (T, T) constants and (T, D), and its gradient."""
        return 8 * shape[1] ** 2 * shape[-1]

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Torch's batch_norm for each position; not `F.batch_norm`, which rejects a batch of one token."""
        time = 1 if x_D.dim() > 2 else 0
        positions = []
        for t in range(x_D.shape[time]):
            past_D = x_D.narrow(time, 0, t + 1)
            tokens_D = past_D.reshape(-1, past_D.shape[-1])
            y_D = torch.batch_norm(tokens_D, None, None, None, None, True, 0.0, self.eps, False)
            positions.append(y_D.view(past_D.shape).select(time, t))
        return self.reference_affine(torch.stack(positions, time), weights)


class BatchNormPosition(BatchNorm):
    def normalise_batch(self, x_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_TND = time_first(x_D)
        mean_TD, var_TD = moments_over_ranks(x_TND.mean(1), x_TND.var(1, unbiased=False))
        y_TND = (x_TND - mean_TD.unsqueeze(1)) * torch.rsqrt(var_TD.unsqueeze(1) + self.eps)
        # The variance over all tokens is the mean variance within positions plus the variance of their means.
        return undo_time_first(y_TND, x_D), mean_TD.mean(0), var_TD.mean(0) + mean_TD.var(0, unbiased=False)


@register_norm
@dataclass(kw_only=True, slots=True)
class BatchNormPositionConfig(BatchNormConfig):
    """(x - mean_t) / sqrt(var_t + eps) * gain + bias, over the tokens of the batch at position t.

    In training no position depends on another, but each sequence depends on the others of its batch. In evaluation
    every position uses the running statistics over all positions, as in batchnorm, so the sequence length is free; the
    record has the loss with batch statistics, too. Axis 1 is time.
    """

    title: ClassVar[str] = "BatchNorm by position"
    module = BatchNormPosition
    formula: ClassVar[str] = "(x - mean_batch(x_t)) / sqrt(var_batch(x_t) + eps) * gain + bias, for each position t"
    source: ClassVar[str] = "batch norm (arXiv:1502.03167, algorithm 1), each position and channel one feature"
    verified_by: ClassVar[str] = "torch's batch_norm of T * D features, each sequence one batch entry"
    reference_kind: ClassVar[str] = "external"
    equals: ClassVar[str] = "batchnorm with one position, and in evaluation"
    example_sequences: ClassVar[int] = 2  # over one sequence a position has no variance
    pitfalls: ClassVar[tuple[str, ...]] = (
        "With one sequence in the batch no position has a variance: every output is the bias.",
        "Statistics of a few sequences are noisy, and each sequence depends on the others of its batch.",
        "Running statistics per position would fix the context length; this norm keeps those of all tokens.",
    )
    causal: ClassVar[bool] = True

    name: str = "batchnorm_position"
    running_var: str = option(
        "unbiased", choices=("unbiased", "biased"),
        help="Variance for evaluation: over N - 1, or over N, for N tokens of the batch.",
    )  # fmt: skip

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Torch's batch_norm with positions and channels as features; `F.batch_norm` rejects one sequence."""
        x_TND = time_first(x_D)
        features_NF = x_TND.transpose(0, 1).flatten(1)
        y_NF = torch.batch_norm(features_NF, None, None, None, None, True, 0.0, self.eps, False)
        y_TND = y_NF.unflatten(1, (len(x_TND), -1)).transpose(0, 1)
        return self.reference_affine(undo_time_first(y_TND, x_D), weights)
