"""Batch norm per position: mean and variance over the tokens of the batch at the same position.

Shapes: `*batch` any leading axes, of which the second is time (the first where there is one), T time, N tokens of
one position, D width, F features: T times D.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from normlab.norms.base import register_norm
from normlab.norms.batchnorm import BatchNorm, BatchNormConfig
from normlab.norms.batchnorm_past import time_back, time_first
from normlab.options import option


@register_norm
@dataclass(kw_only=True, slots=True)
class BatchNormPositionConfig(BatchNormConfig):
    """(x - mean_t) / sqrt(var_t + eps) * gain + bias, over the tokens of the batch at position t.

    In training no position depends on another, but each sequence depends on the others of its batch. Evaluation uses
    running statistics of the whole batch at every position, as batchnorm does, so the sequence length is free; it
    reports the gap. The second axis is time.
    """

    formula: ClassVar[str] = "(x - mean_batch(x_t)) / sqrt(var_batch(x_t) + eps) * gain + bias, for each position t"
    source: ClassVar[str] = "batch norm (arXiv:1502.03167, algorithm 1), each position and channel one feature"
    verified_by: ClassVar[str] = "torch's batch_norm of T * D features, sequences as its batch"
    reference_kind: ClassVar[str] = "external"
    parameters: ClassVar[str] = "2 * D"
    invariant_to: ClassVar[tuple[str, ...]] = ("scale", "shift")
    equals: ClassVar[str] = "batchnorm where there is one position, and in evaluation"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "With one sequence in the batch no position has a variance: every output is the bias.",
        "Statistics of a few sequences are noisy, and each sequence depends on the others of its batch.",
        "Running statistics per position would fix the context length; this norm keeps those of all tokens.",
    )
    causal: ClassVar[bool] = True

    name: str = "batchnorm_position"
    running_var: str = option("unbiased", choices=("unbiased", "biased"))
    """Variance for evaluation: over N - 1, or over N, for N tokens of the batch."""

    def build(self, width: int) -> nn.Module:
        """Return the module for vectors of this width."""
        return BatchNormPosition(width, self)

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Torch's batch_norm with positions and channels as features; the operator, which accepts one sequence."""
        x_TND = time_first(x_D)
        features_NF = x_TND.transpose(0, 1).flatten(1)
        y_NF = torch.batch_norm(features_NF, None, None, None, None, True, 0.0, self.eps, False)
        y_TND = y_NF.unflatten(1, (len(x_TND), -1)).transpose(0, 1)
        return self.reference_affine(time_back(y_TND, x_D), weights)


class BatchNormPosition(BatchNorm):
    """The module of `BatchNormPositionConfig`. Maps (*batch, D) to the same shape and dtype; rounds once, last."""

    def normalise(self, x_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the batch normalised per position, and mean and biased variance over all tokens, both (D,)."""
        x_TND = time_first(x_D)
        mean_TD, var_TD = x_TND.mean(1), x_TND.var(1, unbiased=False)
        y_TND = (x_TND - mean_TD.unsqueeze(1)) * torch.rsqrt(var_TD.unsqueeze(1) + self.eps)
        # The variance over all tokens is that within positions plus that of their means.
        return time_back(y_TND, x_D), mean_TD.mean(0), var_TD.mean(0) + mean_TD.var(0, unbiased=False)
