"""SeeDNorm: an RMS norm whose gain moves with the token.

Shapes: `*batch` any leading axes, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.norms.affine import working_dtype
from normlab.norms.base import NormConfig, register_norm
from normlab.options import option


@register_norm
@dataclass(kw_only=True, slots=True)
class SeeDNormConfig(NormConfig):
    """(tanh(x . beta) alpha + gamma) * x / sqrt(mean(x^2) + eps), over the last axis.

    alpha, beta and gamma are learned vectors of D, x . beta one number a token. alpha starts at 1 and beta at 0, as
    in public code (swiss-ai's Megatron-LM), so that the norm starts as rmsnorm. The scale of x, which rmsnorm
    forgets, comes back through x . beta. The paper's form with several heads is left out. Weight decay, which that
    code gives to alpha and beta alone, is here as for all vectors: none, or with optim.decay=all for gamma too.
    """

    formula: ClassVar[str] = "(tanh(x . beta) * alpha + gamma) * x / sqrt(mean(x^2) + eps)"
    source: ClassVar[str] = "Cai, Zhu, Liu & Min 2025, arXiv:2510.22777"
    oracle: ClassVar[str] = "torch's rms_norm, times the gain by torch's linear and sigmoid"
    oracle_kind: ClassVar[str] = "self"
    parameters: ClassVar[str] = "3 * D"
    starts: ClassVar[Mapping[str, str]] = {
        "alpha": "[alpha] * D",
        "beta": "[0] * D",
        "gamma": "[1 - unit_offset] * D",
    }
    equals: ClassVar[str] = "rmsnorm where beta = 0, as at the start"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "alpha and beta must not both start at 0: the gradient of each is 0 where the other is.",
        "x . beta is not normalised: in a stream that grows, the tanh saturates and beta's gradient vanishes.",
    )

    name: str = "seednorm"
    eps: float = option(1e-6, at_least=0)
    """Added to the mean square, unit of x squared."""
    alpha: float = option(1.0)
    """What every channel of alpha starts from."""
    unit_offset: bool = False
    """Use 1 + gamma, gamma starting at 0: weight decay then pulls towards the identity."""

    def build(self, width: int) -> nn.Module:
        """The module, for vectors of `width` numbers."""
        return SeeDNorm(width, self)

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Torch's rms_norm times the gain, tanh(z) written 2 sigmoid(2 z) - 1."""
        alpha, beta, gamma = weights["alpha"], weights["beta"], weights["gamma"] + float(self.unit_offset)
        toward = 2 * torch.sigmoid(2 * F.linear(x_D, beta.unsqueeze(0))) - 1
        plain = F.rms_norm(x_D, x_D.shape[-1:], eps=self.eps)
        return plain * gamma + plain * alpha * toward


class SeeDNorm(nn.Module):
    """The module of `SeeDNormConfig`. Maps (*batch, D) to the same shape and dtype; rounds once, at the end."""

    def __init__(self, width: int, options: SeeDNormConfig):
        super().__init__()
        self.eps = options.eps
        self.unit_offset = options.unit_offset
        self.alpha = nn.Parameter(torch.full((width,), options.alpha))
        self.beta = nn.Parameter(torch.zeros(width))
        self.gamma = nn.Parameter(torch.zeros(width) if options.unit_offset else torch.ones(width))

    def forward(self, x_D: Tensor) -> Tensor:
        """Normalise the last axis, with the gain that the token asks for."""
        work_D = x_D.to(working_dtype(x_D.dtype))
        alpha_D, beta_D, gamma_D = (vector.to(work_D.dtype) for vector in (self.alpha, self.beta, self.gamma))
        if self.unit_offset:
            gamma_D = 1 + gamma_D
        # A sum, not a matrix product, which autocast would do in a narrow dtype.
        gain_D = torch.tanh((work_D * beta_D).sum(-1, keepdim=True)) * alpha_D + gamma_D
        return (gain_D * work_D * torch.rsqrt(work_D.square().mean(-1, keepdim=True) + self.eps)).to(x_D.dtype)
