"""ScaleNorm: an L2 norm with one learned length.

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
    """g * x / max(|x|, eps), with one learned scalar g, initially sqrt(D).

    The paper pairs it with embeddings of unit length (FixNorm) and a small init.
    """

    formula: ClassVar[str] = "g * x / max(|x|, eps)"
    source: ClassVar[str] = "Nguyen & Salazar 2019, arXiv:1910.05895"
    verified_by: ClassVar[str] = "torch.nn.functional.normalize, times g"
    parameters: ClassVar[str] = "1"
    invariant_to: ClassVar[tuple[str, ...]] = ("scale",)
    equals: ClassVar[str] = "l2norm with learn_radius=true, radius=null, eps=1e-5"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "It has one gain for all channels and cannot scale down a single channel, unlike rmsnorm.",
    )

    name: str = "scalenorm"
    eps: float = option(1e-5, at_least=0)
    """Smallest divisor, unit of x."""
    radius: float | None = option(None, above=0)
    """Initial value of g; null for sqrt(D)."""
    learn_radius: bool = True
    """Learn g."""
