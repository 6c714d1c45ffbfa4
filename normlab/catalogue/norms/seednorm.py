"""SeeDNorm: an RMS norm whose gain depends on the token.

Shapes: `*batch` any leading axes, D width.
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
from normlab.catalogue.norms.base import NormConfig, register_norm
from normlab.catalogue.parameters import parameter


class SeeDNorm(NormModule):
    def __init__(self, width: int, options: SeeDNormConfig):
        super().__init__(width, options)
        self.unit_offset = options.unit_offset
        self.alpha = parameter(torch.full((width,), options.alpha), role="scalar")
        self.beta = parameter(torch.zeros(width), role="scalar")
        self.gamma = parameter(torch.zeros(width) if options.unit_offset else torch.ones(width), role="gain")

    def normalise(self, x_D: Tensor) -> Tensor:
        alpha_D, beta_D, gamma_D = (vector.to(x_D.dtype) for vector in (self.alpha, self.beta, self.gamma))
        if self.unit_offset:
            # In the working dtype: in a narrow one 1 + gamma is exactly 1 for a small gamma.
            gamma_D = 1 + gamma_D
        # A sum instead of a matrix product, because autocast computes matrix products in a narrow dtype.
        gain_D = torch.tanh((x_D * beta_D).sum(-1, keepdim=True)) * alpha_D + gamma_D
        return gain_D * x_D * torch.rsqrt(x_D.square().mean(-1, keepdim=True) + self.eps)


@register_norm
@dataclass(kw_only=True, slots=True)
class SeeDNormConfig(NormConfig):
    """(tanh(x . beta) alpha + gamma) * x / sqrt(mean(x^2) + eps), over the last axis.

    alpha, beta and gamma are learned vectors of width D, and x . beta is one number per token. Initially alpha = 1 and
    beta = 0, as in public code (swiss-ai's Megatron-LM), where the norm equals rmsnorm. x . beta restores the scale of
    x, which rmsnorm removes. The paper's form with several heads is not implemented. Weight decay skips alpha, beta and
    gamma, as all vectors; optim.decay=all decays all three, while the public code decays alpha and beta only.
    """

    title: ClassVar[str] = "SeeDNorm"
    module = SeeDNorm
    formula: ClassVar[str] = "(tanh(x . beta) * alpha + gamma) * x / sqrt(mean(x^2) + eps)"
    source: ClassVar[str] = "Cai, Zhu, Liu & Min 2025, arXiv:2510.22777"
    verified_by: ClassVar[str] = "torch's rms_norm, times the gain by torch's linear and sigmoid"
    reference_kind: ClassVar[str] = "self"
    parameters: ClassVar[str] = "3 * D"
    initial_values: ClassVar[Mapping[str, str]] = {
        "alpha": "[alpha] * D",
        "beta": "[0] * D",
        "gamma": "[1 - unit_offset] * D",
    }
    equals: ClassVar[str] = "rmsnorm where beta = 0, as initially"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "alpha and beta must not both be initially 0: the gradient of each is 0 where the other is 0.",
        "x . beta is not normalised: when the stream grows, the tanh saturates and beta's gradient vanishes.",
    )

    name: str = "seednorm"
    eps: float = option(1e-6, "Added to the mean square, unit of x squared.", at_least=0)
    alpha: float = option(1.0, "Initial value of every channel of alpha.")
    unit_offset: bool = option(
        False, "Use 1 + gamma, with gamma initially 0: weight decay then pulls towards the identity."
    )

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Torch's rms_norm times the gain, tanh(z) written 2 sigmoid(2 z) - 1."""
        alpha, beta, gamma = weights["alpha"], weights["beta"], weights["gamma"] + float(self.unit_offset)
        gate = 2 * torch.sigmoid(2 * F.linear(x_D, beta.unsqueeze(0))) - 1
        plain = F.rms_norm(x_D, x_D.shape[-1:], eps=self.eps)
        return plain * gamma + plain * alpha * gate
