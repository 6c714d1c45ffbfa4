"""Min-max: the channels of a token scaled to [0, 1].

Shapes: `*batch` any leading axes, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from normlab.base.options import option
from normlab.catalogue.norms.affine import NormModule
from normlab.catalogue.norms.base import AffineNormConfig, register_norm


class MinMax(NormModule):
    def normalise(self, x_D: Tensor) -> Tensor:
        # Between equal extremes amin and amax share the gradient, while min and max give all of it to one of them.
        low, high = x_D.amin(-1, keepdim=True), x_D.amax(-1, keepdim=True)
        return (x_D - low) / (high - low + self.eps)


@register_norm
@dataclass(kw_only=True, slots=True)
class MinMaxConfig(AffineNormConfig):
    """(x - min) / (max - min + eps) over the last axis, of one token.

    The gradient of the extreme channels comes only from min and max, shared evenly between ties.
    """

    title: ClassVar[str] = "min-max scaling"
    module = MinMax
    formula: ClassVar[str] = "(x - min(x)) / (max(x) - min(x) + eps)"
    source: ClassVar[str] = "the textbook's feature scaling"
    verified_by: ClassVar[str] = "the affine map of x to [0, 1], from its extreme values"
    reference_kind: ClassVar[str] = "self"
    parameters: ClassVar[str] = "0"
    invariant_to: ClassVar[tuple[str, ...]] = ("scale", "shift")
    pitfalls: ClassVar[tuple[str, ...]] = (
        "It does not centre: the mean of the outputs is about 1/2, and every block reads that constant.",
        "One extreme channel sets the scale of all others.",
        "Without eps it is NaN for a token whose channels are all the same.",
    )

    name: str = "minmax"
    eps: float = option(1e-6, "Added to the range, unit of x.", at_least=0)
    gain: bool = option(False, "Learn a gain per channel.")

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """(x - min) / (range + eps) as slope * x + offset; extremes are averaged over ties."""
        top, bottom = (x_D == end for end in (x_D.max(-1, keepdim=True)[0], x_D.min(-1, keepdim=True)[0]))
        high, low = ((x_D * at).sum(-1, keepdim=True) / at.sum(-1, keepdim=True) for at in (top, bottom))
        slope = torch.reciprocal(high - low + self.eps)
        return self.reference_affine(torch.addcmul(-low * slope, slope, x_D), weights)
