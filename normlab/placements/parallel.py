"""Parallel attention and MLP: both read the input of the block, and their sum is added to the stream.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from normlab.placements.base import MakeNorm, Placement, register_placement
from normlab.placements.wiring import Branch


@dataclass(kw_only=True, slots=True)
class Parallel(Placement):
    """x + A(n) + M(n), n = N(x): attention and the MLP share one norm.

    Their matrix products could be computed together; here they are computed one after the other. There is a norm
    before the head.
    """

    formula: ClassVar[str] = "n = N(x); x = x + A(n) + M(n)"
    head_formula: ClassVar[str] = "x = N(x)"
    source: ClassVar[str] = "Wang & Komatsuzaki 2021, GPT-J (kingoflolz/mesh-transformer-jax); PaLM, arXiv:2204.02311"
    equals: ClassVar[str] = "parallel_two_norms where a block's two norms are the same"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "Code calls both parallel: litgpt's parallel_residual has two norms unless shared_attention_norm is set.",
    )
    init: ClassVar[str] = "gpt2_scaled"
    note: ClassVar[str] = "GPT-NeoX means by parallel the form with a norm for each sub-layer: parallel_two_norms here."

    name: str = "parallel"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the wiring of one block."""
        return SharedNormWiring(width, make_norm)

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the norm before the head."""
        return make_norm(width)


@dataclass(kw_only=True, slots=True)
class ParallelTwoNorms(Placement):
    """x + A(N(x)) + M(N(x)): attention and the MLP have one norm each.

    With norms without parameters it equals `parallel`. There is a norm before the head.
    """

    formula: ClassVar[str] = "x = x + A(N(x)) + M(N(x))"
    head_formula: ClassVar[str] = "x = N(x)"
    source: ClassVar[str] = "Black et al. 2022, arXiv:2204.06745 (GPT-NeoX-20B)"
    equals: ClassVar[str] = "parallel where a block's two norms are the same"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "Code calls both parallel: litgpt's parallel_residual has two norms unless shared_attention_norm is set.",
    )
    init: ClassVar[str] = "gpt2_scaled"
    note: ClassVar[str] = "GPT-J and PaLM mean by parallel the form with one norm for both sub-layers: parallel here."

    name: str = "parallel_two_norms"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the wiring of one block."""
        return TwoNormsWiring(width, make_norm)

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the norm before the head."""
        return make_norm(width)


class SharedNormWiring(nn.Module):
    """The wiring of `Parallel`."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width)

    def forward(self, x_BTD: Tensor, attn: Branch, mlp: Branch) -> Tensor:
        """Return the stream after the block."""
        normed_BTD = self.norm(x_BTD)
        return x_BTD + attn(normed_BTD) + mlp(normed_BTD)


class TwoNormsWiring(nn.Module):
    """The wiring of `ParallelTwoNorms`."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.attn_norm = make_norm(width)
        self.mlp_norm = make_norm(width)

    def forward(self, x_BTD: Tensor, attn: Branch, mlp: Branch) -> Tensor:
        """Return the stream after the block."""
        return x_BTD + attn(self.attn_norm(x_BTD)) + mlp(self.mlp_norm(x_BTD))


register_placement(Parallel())
register_placement(ParallelTwoNorms())
