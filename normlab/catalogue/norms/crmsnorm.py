"""Compressed RMS norm: layer norm of a zero-mean vector stored without its last channel.

Shapes: `*batch` any leading axes, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.base.options import option
from normlab.catalogue.norms.affine import NormModule
from normlab.catalogue.norms.base import NormConfig, register_norm


class CRMSNorm(NormModule):
    def normalise(self, x_D: Tensor) -> Tensor:
        # The channel that is not stored is minus the sum of the others; its square belongs to the mean of squares.
        squares = x_D.square().sum(-1, keepdim=True) + x_D.sum(-1, keepdim=True).square()
        return x_D * torch.rsqrt(squares / (x_D.shape[-1] + 1) + self.eps)


@register_norm
@dataclass(kw_only=True, slots=True)
class CRMSNormConfig(NormConfig):
    """x / sqrt((sum(x^2) + sum(x)^2) / (D + 1) + eps), over the last axis.

    If D + 1 numbers have mean 0, the first D determine the last. This norm gets the first D numbers and returns the
    first D outputs of layer norm (without gain and bias) for all D + 1.
    """

    title: ClassVar[str] = "CRMSNorm"
    module = CRMSNorm
    formula: ClassVar[str] = "x / sqrt((sum(x^2) + sum(x)^2) / (D + 1) + eps)"
    source: ClassVar[str] = "Jiang, Gu, Zhu & Pan 2023, arXiv:2305.14858"
    verified_by: ClassVar[str] = "torch's layer_norm of the vector with its last channel put back"
    reference_kind: ClassVar[str] = "identity"
    parameters: ClassVar[str] = "0"
    invariant_to: ClassVar[tuple[str, ...]] = ("scale",)
    equals: ClassVar[str] = "the first D outputs of layernorm without gain and bias, on the D + 1 numbers"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "It equals layer norm only in a model rewritten as in the paper; in place of layer norm in an unchanged model "
        "it is another function of the D numbers.",
    )

    name: str = "crmsnorm"
    eps: float = option(1e-5, "Added to the mean square, unit of x squared.", at_least=0)

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Torch's layer_norm of D + 1 channels, where the last one makes the mean 0."""
        full = torch.cat([x_D, -x_D.sum(-1, keepdim=True)], dim=-1)
        return F.layer_norm(full, full.shape[-1:], eps=self.eps)[..., :-1]
