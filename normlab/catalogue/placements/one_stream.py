"""Placements of one stream with their own wiring: B2T, GPAS, the norm-preserving one and parallel sub-layers.

Shapes: B batch, T time, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.catalogue.parameters import parameter
from normlab.catalogue.placements.base import MakeNorm, Placement, register_placement
from normlab.catalogue.placements.wiring import Branch, TwoNorms


@dataclass(kw_only=True, slots=True)
class BottomToTop(Placement):
    """h = N(x + A(x)), x <- N(x + h + M(h)): the input of the block is added again before its last norm.

    There is no norm before the LM head, because the last block ends in one.
    """

    title: ClassVar[str] = "B2T"
    formula: ClassVar[str] = "h = N(x + A(x)); x = N(x + h + M(h))"
    source: ClassVar[str] = "Takase et al. 2022, arXiv:2206.00330 (B2T connection)"
    block_sites: ClassVar[tuple[str, ...]] = ("residual_attn", "residual_mlp")
    init: ClassVar[str] = "xavier_scaled"
    init_source: ClassVar[str] = "after the public code of Takase et al. 2022, arXiv:2206.00330"

    name: str = "b2t"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        return B2TWiring(width, make_norm)


class B2TWiring(TwoNorms):
    site = "residual"

    def forward(self, x_BTD: Tensor, attn: Branch, mlp: Branch) -> Tensor:
        h_BTD = self.attn_norm(x_BTD + attn(x_BTD))
        return self.mlp_norm(x_BTD + h_BTD + mlp(h_BTD))


register_placement(BottomToTop())


@dataclass(kw_only=True, slots=True)
class GPAS(Placement):
    """Pre-norm with x <- x - silu(g) stop(x) after each of the block's two additions.

    The forward pass multiplies the stream by 1 - silu(g), the backward pass by 1: stop(x) is x without a gradient.
    Each block has one number g, shared by its two sub-layers as in the authors' code. It starts at 0, where the
    placement equals `pre`. There is a norm before the LM head.
    """

    title: ClassVar[str] = "GPAS"
    formula: ClassVar[str] = (
        "x = x + A(N(x)); x = x - silu(gate) * stop(x); x = x + M(N(x)); x = x - silu(gate) * stop(x)"
    )
    head_formula: ClassVar[str] = "x = N(x)"
    source: ClassVar[str] = "Chen et al. 2025, arXiv:2506.22049 (Pre + GPAS; one gate a block as in dandingsky/GPAS)"
    parameters: ClassVar[str] = "L"
    equals: ClassVar[str] = "pre where every gate is 0, the initial value"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "Its authors draw embeddings with standard deviation sqrt(2 / 5): for pre at 350M parameters they report "
        "perplexity 20.49 with 0.02, while the table of LayerNorm Scaling, with sqrt(2 / 5), has 19.58.",
        "At 1B and 7B parameters its authors clip the gates' gradients at 0.01; this implementation does not.",
    )
    init: ClassVar[str] = "gpt2"
    init_source: ClassVar[str] = "our choice: the source names no rule"
    initial_values: ClassVar[Mapping[str, str]] = {"wiring.gate": "0"}

    name: str = "gpas"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        return GPASWiring(width, make_norm)


class GPASWiring(TwoNorms):
    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__(width, make_norm)
        self.gate = parameter(torch.zeros(()), role="scalar")

    def scale(self, x_BTD: Tensor) -> Tensor:
        """(1 - silu(g)) x, with the gradient of x."""
        return x_BTD - F.silu(self.gate) * x_BTD.detach()

    def forward(self, x_BTD: Tensor, attn: Branch, mlp: Branch) -> Tensor:
        x_BTD = self.scale(x_BTD + attn(self.attn_norm(x_BTD)))
        return self.scale(x_BTD + mlp(self.mlp_norm(x_BTD)))


register_placement(GPAS())


@dataclass(kw_only=True, slots=True)
class NormPreserving(Placement):
    """x <- sqrt(1 - b) x + sqrt(b) F(N(x)), b = softplus(theta) / L, at most 0.999999.

    The squares of the two factors sum to 1, so that the stream keeps its size if the output of a sub-layer is as large
    as it and orthogonal to it. Each block has one number theta, shared by its two sub-layers, which starts at 0: b is
    ln(2) / L. There is a norm before the LM head.
    """

    title: ClassVar[str] = "norm-preserving residuals"
    weights_formula: ClassVar[str] = "b = min(softplus(theta) / L, 0.999999); kept = (1 - b) ** 0.5; added = b ** 0.5"
    formula: ClassVar[str] = "x = kept * x + added * A(N(x)); x = kept * x + added * M(N(x))"
    head_formula: ClassVar[str] = "x = N(x)"
    source: ClassVar[str] = (
        "marin-community/marin, issue 8860 (2026), which states only that the cap on b is just below 1"
    )
    parameters: ClassVar[str] = "L"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "A negative result: its authors report 1.018 times the speed of their baseline at width 512, and 0.950 at 768.",
    )
    init: ClassVar[str] = "gpt2"
    init_source: ClassVar[str] = "our choice: the source names no rule"
    initial_values: ClassVar[Mapping[str, str]] = {"wiring.theta": "0"}

    name: str = "norm_preserving"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        return NormPreservingWiring(depth, width, make_norm)


LARGEST_SHARE = 0.999999
"""The largest b of `NormPreserving`: the square root has no gradient at 0."""


class NormPreservingWiring(TwoNorms):
    def __init__(self, depth: int, width: int, make_norm: MakeNorm):
        super().__init__(width, make_norm)
        self.depth = depth
        self.theta = parameter(torch.zeros(()), role="scalar")

    def forward(self, x_BTD: Tensor, attn: Branch, mlp: Branch) -> Tensor:
        # Over L, so that at theta = 0 about a quarter of the embeddings' square is left after 2L sub-layers, at any L.
        share = (F.softplus(self.theta) / self.depth).clamp(max=LARGEST_SHARE)
        kept, added = (1 - share).sqrt(), share.sqrt()
        x_BTD = kept * x_BTD + attn.mark_update(added * attn(self.attn_norm(x_BTD)))
        return kept * x_BTD + mlp.mark_update(added * mlp(self.mlp_norm(x_BTD)))


register_placement(NormPreserving())


@dataclass(kw_only=True, slots=True)
class Parallel(Placement):
    """x + A(n) + M(n), n = N(x): attention and the MLP share one norm.

    Their matrix products could be computed together; here they are computed one after the other. There is a norm
    before the LM head.
    """

    title: ClassVar[str] = "parallel"
    formula: ClassVar[str] = "n = N(x); x = x + A(n) + M(n)"
    head_formula: ClassVar[str] = "x = N(x)"
    source: ClassVar[str] = "Wang & Komatsuzaki 2021, GPT-J (kingoflolz/mesh-transformer-jax); PaLM, arXiv:2204.02311"
    equals: ClassVar[str] = "parallel_two_norms where a block's two norms are the same"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "Code calls both parallel: litgpt's parallel_residual has two norms unless shared_attention_norm is set.",
    )
    init: ClassVar[str] = "gpt2_scaled"
    init_source: ClassVar[str] = "our choice: that of pre; only the sub-layers' inputs differ"
    note: ClassVar[str] = "In GPT-NeoX, parallel has one norm per sub-layer: parallel_two_norms here."
    block_sites: ClassVar[tuple[str, ...]] = ("input",)

    name: str = "parallel"

    @property
    def has_standard_matrices(self) -> bool:
        return True

    @property
    def has_free_branches(self) -> bool:
        return True

    @property
    def is_parallel(self) -> bool:
        return True

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        return ParallelWiring(width, make_norm)


@dataclass(kw_only=True, slots=True)
class ParallelTwoNorms(Parallel):
    """x + A(N(x)) + M(N(x)): attention and the MLP have one norm each.

    With norms without parameters it equals `parallel`. There is a norm before the LM head.
    """

    title: ClassVar[str] = "parallel with two norms"
    formula: ClassVar[str] = "x = x + A(N(x)) + M(N(x))"
    source: ClassVar[str] = "Black et al. 2022, arXiv:2204.06745 (GPT-NeoX-20B)"
    equals: ClassVar[str] = "parallel where a block's two norms are the same"
    note: ClassVar[str] = "In GPT-J and PaLM, parallel has one norm for both sub-layers: parallel here."
    block_sites: ClassVar[tuple[str, ...]] = ("input_attn", "input_mlp")

    name: str = "parallel_two_norms"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        return ParallelTwoNormsWiring(width, make_norm)


class ParallelWiring(nn.Module):
    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width, "input")

    def forward(self, x_BTD: Tensor, attn: Branch, mlp: Branch) -> Tensor:
        normed_BTD = self.norm(x_BTD)
        return x_BTD + attn(normed_BTD) + mlp(normed_BTD)


class ParallelTwoNormsWiring(TwoNorms):
    def forward(self, x_BTD: Tensor, attn: Branch, mlp: Branch) -> Tensor:
        return x_BTD + attn(self.attn_norm(x_BTD)) + mlp(self.mlp_norm(x_BTD))


register_placement(Parallel())
register_placement(ParallelTwoNorms())
