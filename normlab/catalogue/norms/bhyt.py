"""BHyT: the tanh of an RMS norm.

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
from normlab.catalogue.norms.base import AffineNormConfig, register_norm
from normlab.catalogue.parameters import parameter


class BHyT(NormModule):
    def __init__(self, width: int, options: BHyTConfig):
        super().__init__(width, options)
        self.kappa = options.kappa
        self.lam = parameter(torch.tensor(options.lam), role="scalar") if options.learn_lam else options.lam

    def normalise(self, x_D: Tensor) -> Tensor:
        # All factors are numbers of a token, so that only one product is over the channels.
        scale = torch.rsqrt(x_D.square().mean(-1, keepdim=True) + self.eps) * self.lam / self.kappa
        return torch.tanh(scale * x_D)


@register_norm
@dataclass(kw_only=True, slots=True)
class BHyTConfig(AffineNormConfig):
    """tanh(lam / kappa * x / sqrt(mean(x^2) + eps)) * gain + bias, over the last axis.

    A channel of kappa times the rms becomes tanh(lam), so the tanh saturates relative to the token. This is the exact
    form, BHyT_Star in the public code; the faster form of the paper computes exact statistics once per block and needs
    the weights of the block for the second norm.
    """

    title: ClassVar[str] = "BHyT"
    module = BHyT
    formula: ClassVar[str] = "tanh(lam / kappa * x / sqrt(mean(x^2) + eps)) * gain"
    source: ClassVar[str] = "arXiv:2601.09719 (2026), and its public code"
    verified_by: ClassVar[str] = "torch.tanh of torch's rms_norm, whose weight is lam / kappa"
    reference_kind: ClassVar[str] = "self"
    parameters: ClassVar[str] = "D + 1"
    initial_values: ClassVar[Mapping[str, str]] = {"lam": "lam"}
    invariant_to: ClassVar[tuple[str, ...]] = ("scale",)
    equals: ClassVar[str] = "rmsnorm times lam / kappa, to first order in lam / kappa"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "In the public code lam is an nn.Parameter even with learnable_lam=False, which therefore trains it too.",
        "At lam / kappa = 0.2 the tanh is nearly linear: the rms of the output is initially near 0.2, not 1.",
    )

    name: str = "bhyt"
    eps: float = option(1e-6, "Added to the mean square, unit of x squared.", at_least=0)
    lam: float = option(
        2.0, "Argument of tanh for an input of kappa times the rms; the public scripts try 1 to 5.", above=0
    )
    kappa: float = option(10.0, "Multiple of the rms that maps to tanh(lam).", above=0)
    learn_lam: bool = option(True, "Learn lam, one scalar, as every configuration of the authors does.")

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        slope_D = (weights["lam"] if self.learn_lam else x_D.new_tensor(self.lam)).expand(x_D.shape[-1]) / self.kappa
        return self.reference_affine(torch.tanh(F.rms_norm(x_D, x_D.shape[-1:], slope_D, self.eps)), weights)
