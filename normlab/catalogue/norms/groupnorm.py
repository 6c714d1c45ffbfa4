"""Group norm, per token: layer norm within each group of channels.

Shapes: `*batch` any leading axes, D width, G groups, C channels of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from normlab.base.errors import ConfigError
from normlab.base.options import option
from normlab.catalogue.norms.affine import NormModule
from normlab.catalogue.norms.base import AffineNormConfig, register_norm


class GroupNorm(NormModule):
    def __init__(self, width: int, options: GroupNormConfig):
        super().__init__(width, options)
        self.groups = options.groups

    def normalise(self, x_D: Tensor) -> Tensor:
        # Not torch's group_norm: its channels are axis 1, and it averages over all later axes, so over time as well.
        x_GC = x_D.unflatten(-1, (self.groups, -1))
        return F.layer_norm(x_GC, x_GC.shape[-1:], eps=self.eps).flatten(-2)


@register_norm
@dataclass(kw_only=True, slots=True)
class GroupNormConfig(AffineNormConfig):
    """(x - mean) / sqrt(var + eps) * gain + bias, mean and biased variance over one token's group of channels.

    The statistics are those of one token, so the norm is causal. With one group it is layer norm.
    """

    title: ClassVar[str] = "GroupNorm"
    module = GroupNorm
    formula: ClassVar[str] = "(x_g - mean(x_g)) / sqrt(var(x_g) + eps) * gain + bias, for each group g of channels"
    source: ClassVar[str] = "Wu & He 2018, arXiv:1803.08494, per token"
    verified_by: ClassVar[str] = "torch's group_norm on single tokens"
    reference_kind: ClassVar[str] = "external"
    parameters: ClassVar[str] = "2 * D"
    invariant_to: ClassVar[tuple[str, ...]] = ("scale", "shift")
    equals: ClassVar[str] = "layernorm at groups=1"
    example_options: ClassVar[Mapping[str, Any]] = {"groups": 2}
    pitfalls: ClassVar[tuple[str, ...]] = (
        "torch.nn.GroupNorm on (B, D, T) averages over time too: each position depends on later positions.",
    )

    name: str = "groupnorm"
    eps: float = option(1e-5, "Added to the variance, unit of x squared.", at_least=0)
    groups: int = option(4, "Groups of neighbouring channels; must divide the width.", at_least=1)
    bias: bool = option(True, "Learn a bias per channel, initially 0.")

    def check_width(self, width: int) -> None:
        if width % self.groups:
            divisors = [n for n in range(1, 4 * self.groups + 1) if width % n == 0]
            raise ConfigError(
                f"norm.groups={self.groups}: does not divide a norm's width of {width}; "
                f"choose one of {', '.join(map(str, divisors))}"
            )

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Torch's group_norm with every token as one batch entry."""
        tokens_D = x_D.reshape(-1, x_D.shape[-1])
        return self.reference_affine(F.group_norm(tokens_D, self.groups, eps=self.eps).view_as(x_D), weights)
