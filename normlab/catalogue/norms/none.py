"""No norm: the control.

Shapes: `*batch` any leading axes, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from normlab.catalogue.norms.base import NormConfig, register_norm


@register_norm
@dataclass(kw_only=True, slots=True)
class NoNormConfig(NormConfig):
    """y = x. Training depends on the init rule: stable with N(0, 0.02), the stream explodes with Xavier at depth 24."""

    title: ClassVar[str] = "no norm"
    formula: ClassVar[str] = "x"
    source: ClassVar[str] = "the control; cf. Zhang, Dauphin & Ma 2019, arXiv:1901.09321 (Fixup)"
    verified_by: ClassVar[str] = "the input itself"
    reference_kind: ClassVar[str] = "identity"
    parameters: ClassVar[str] = "0"
    is_identity: ClassVar[bool] = True
    equals: ClassVar[str] = "pointwise with function=linear_clip and alpha=1, while |x| < 1"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "The init rule decides: the stream is stable with N(0, 0.02) and explodes with Xavier at depth.",
    )

    incompatible_inits: ClassVar[Mapping[str, str]] = {
        "xavier": (
            "nothing bounds the stream, whose RMS grows exponentially with depth: to about 5 at 12 blocks, 2e3 at 24, "
            "2e8 at 48 (`normlab sweep norm=none init=xavier,gpt2_scaled train.steps=0`)"
        )
    }

    name: str = "none"

    def build(self, width: int) -> nn.Module:
        return nn.Identity()

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return x_D
