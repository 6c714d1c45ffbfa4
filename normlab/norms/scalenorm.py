"""ScaleNorm: an L2 norm whose length is one learned number.

Shapes: `*batch` any leading axes, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from normlab.norms.base import register_norm
from normlab.norms.l2norm import L2NormConfig
from normlab.options import option


@register_norm
@dataclass(kw_only=True, slots=True)
class ScaleNormConfig(L2NormConfig):
    """g * x / max(|x|, eps), with one learned scalar g that starts at sqrt(D).

    The paper pairs it with embeddings of unit length (FixNorm) and a small init.
    """

    formula: ClassVar[str] = "g * x / max(|x|, eps)"
    source: ClassVar[str] = "Nguyen & Salazar 2019, arXiv:1910.05895"
    oracle: ClassVar[str] = "torch.nn.functional.normalize, times g"
    parameters: ClassVar[str] = "1"
    blind_to: ClassVar[tuple[str, ...]] = ("scale",)
    equals: ClassVar[str] = "l2norm with learn_radius=true, radius=null, eps=1e-5"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "It has one gain for all channels: no channel can be turned down alone, as rmsnorm's gain can.",
    )

    name: str = "scalenorm"
    eps: float = option(1e-5, at_least=0)
    """Least length that is divided by, unit of x."""
    radius: float | None = option(None, above=0)
    """What g starts from; null for the root of the width."""
    learn_radius: bool = True
    """Learn g."""
