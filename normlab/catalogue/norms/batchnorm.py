"""Batch norm: mean and variance of each channel over all tokens of the batch.

Shapes: `*batch` any leading axes (batch and time), D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.base.options import option
from normlab.catalogue.norms.affine import NormModule
from normlab.catalogue.norms.base import AffineNormConfig, register_norm
from normlab.system.ranks import moments_over_ranks, ranks_of_statistics


class BatchNorm(NormModule):
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, options: BatchNormConfig):
        super().__init__(width, options)
        self.momentum = options.momentum
        self.unbiased = options.running_var == "unbiased"
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def normalise_batch(self, x_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalised batch, and mean and biased variance over all its tokens, both (D,)."""
        axes = tuple(range(x_D.dim() - 1))
        # With the biased variance, as in algorithm 1 of the paper; only the running variance can be unbiased. Moments
        # are those of all devices, so that a run on several devices has the statistics of the whole batch.
        mean_D, var_D = moments_over_ranks(x_D.mean(axes), x_D.var(axes, unbiased=False))
        return (x_D - mean_D) * torch.rsqrt(var_D + self.eps), mean_D, var_D

    def update_running_statistics(self, mean_D: Tensor, var_D: Tensor, count: int) -> None:
        """Update the running statistics with those of a batch of `count` tokens."""
        # One token has no unbiased variance; use the biased one (0), which avoids a division by zero.
        new_var_D = var_D * (count / (count - 1)) if self.unbiased and count > 1 else var_D
        # vmap and the training step need a reassignment, not a write in place. Without `detach` a running statistic
        # would keep the graph of every batch.
        self.running_mean = torch.lerp(self.running_mean, mean_D.detach().to(self.running_mean.dtype), self.momentum)
        self.running_var = torch.lerp(self.running_var, new_var_D.detach().to(self.running_var.dtype), self.momentum)

    def normalise(self, x_D: Tensor) -> Tensor:
        """Normalise each channel; in training mode also update the running statistics."""
        if self.training:
            y_D, mean_D, var_D = self.normalise_batch(x_D)
            self.update_running_statistics(mean_D, var_D, x_D.numel() // x_D.shape[-1] * ranks_of_statistics())
            return y_D
        # Constants, so that in evaluation a token depends on no other one, and a batch may have any size.
        mean_D, var_D = self.running_mean.to(x_D.dtype), self.running_var.to(x_D.dtype)
        return (x_D - mean_D) * torch.rsqrt(var_D + self.eps)


@register_norm
@dataclass(kw_only=True, slots=True)
class BatchNormConfig(AffineNormConfig):
    """(x - mean) / sqrt(var + eps) * gain + bias, mean and biased variance over every axis but the last.

    In training the statistics are those of the batch, so position t depends on later positions of its sequence:
    the training loss is not causal. In evaluation they are running statistics,
    running <- (1 - momentum) running + momentum batch, updated once per micro-batch. Every evaluation
    records the loss with running statistics and the loss with batch statistics.
    """

    title: ClassVar[str] = "BatchNorm"
    module = BatchNorm
    formula: ClassVar[str] = "(x - mean_batch(x)) / sqrt(var_batch(x) + eps) * gain + bias"
    source: ClassVar[str] = "Ioffe & Szegedy 2015, arXiv:1502.03167, algorithms 1 and 2"
    verified_by: ClassVar[str] = "torch's batch_norm, each token one batch entry"
    reference_kind: ClassVar[str] = "external"
    parameters: ClassVar[str] = "2 * D"
    initial_values: ClassVar[Mapping[str, str]] = {"running_mean": "[0] * D", "running_var": "[1] * D"}
    invariant_to: ClassVar[tuple[str, ...]] = ("scale", "shift")
    pitfalls: ClassVar[tuple[str, ...]] = (
        "In training the statistics contain the tokens that a language model has to predict.",
        "torch and algorithm 2 of the paper evaluate with the unbiased variance, other code with the biased variance.",
        "Gradient accumulation does not enlarge the batch: the statistics are those of the micro-batch.",
    )
    causal: ClassVar[bool] = False
    batch_statistics: ClassVar[bool] = True
    synchronised: ClassVar[bool] = True

    name: str = "batchnorm"
    eps: float = option(1e-5, "Added to the variance, unit of x squared.", at_least=0)
    momentum: float = option(0.1, "Weight of the newest batch in the running statistics.", above=0, at_most=1)
    running_var: str = option(
        "unbiased", choices=("unbiased", "biased"),
        help="Variance for evaluation: over N - 1 as in torch, or over N as in much public code.",
    )  # fmt: skip
    bias: bool = option(True, "Learn a bias per channel, initially 0.")

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Torch's batch_norm in training; not `F.batch_norm`, which rejects a batch of one token."""
        tokens_D = x_D.reshape(-1, x_D.shape[-1])
        y_D = torch.batch_norm(tokens_D, None, None, None, None, True, 0.0, self.eps, False)
        return self.reference_affine(y_D.view_as(x_D), weights)

    def reference_in_eval(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        tokens_D = x_D.reshape(-1, x_D.shape[-1])
        y_D = F.batch_norm(tokens_D, weights["running_mean"], weights["running_var"], eps=self.eps)
        return self.reference_affine(y_D.view_as(x_D), weights)
