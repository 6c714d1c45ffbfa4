"""Two placements that the package does not have, written as a user would write them: nothing in it is changed.

`hybrid` has norms inside the sub-layers (HybridNorm: Zhuo et al. 2025, arXiv:2503.04598); it is a row of the
algebra. `hypersphere` has wiring of its own and projects the weights after each update (after nGPT: Loshchilov
et al. 2024, arXiv:2410.01131); it keeps no norm of the run's at all.

Shapes: B batch, T time, D width.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from normlab.plugin import Placement, Row, SubLayer, option, parameter, register_placement, register_row

register_row(
    Row(
        name="hybrid",
        formula="h = N(x + A_qkv(x)); x = h + M(h)",
        source="Zhuo et al. 2025, arXiv:2503.04598",
        init="gpt2_scaled",
        attn=SubLayer(norms=("q", "k", "v", "residual")),
        mlp=SubLayer(),
        final_norm=True,
    )
)


def unit(x: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """x over its length along an axis."""
    return x / torch.linalg.vector_norm(x, dim=axis, keepdim=True)


@dataclass(kw_only=True, slots=True)
class Hypersphere(Placement):
    """h <- unit(h + alpha (unit(F(h)) - h)), every matrix's rows kept at length one."""

    formula: ClassVar[str] = "h <- unit(h + alpha (unit(F(h)) - h))"
    source: ClassVar[str] = "after Loshchilov et al. 2024, arXiv:2410.01131"
    block_sites: ClassVar[tuple[str, ...]] = ()
    init: ClassVar[str] = "gpt2"

    name: str = "hypersphere"
    alpha: float = option(0.05, "Where the learned rate alpha starts.", above=0)

    def wire(self, layer, depth, width, make_norm):
        return SphereBlock(width, self.alpha)

    def embed_stream(self, width, make_norm):
        return Unit()

    def attention_scale(self, head_width):
        return head_width**0.5

    def logits_transform(self, vocab_size, width):
        return Scale(vocab_size)

    def project(self, weights):
        for name, weight in weights.items():
            if name.endswith(".weight"):
                # Along the axis that meets the stream; counted from the end, so that packs work too.
                axis = -2 if name.endswith(("attn.out.weight", "mlp.down.weight")) else -1
                weight.copy_(unit(weight, axis))


class Unit(nn.Module):
    def forward(self, x_BTD):
        return unit(x_BTD)


class Scale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.scale = parameter(torch.ones(width), role="scalar")

    def forward(self, x):
        return x * self.scale * 10


class SphereBlock(nn.Module):
    def __init__(self, width: int, alpha: float):
        super().__init__()
        self.alphas = parameter(torch.full((2, width), alpha), role="scalar")

    def forward(self, h_BTD, attn, mlp):
        for alpha_D, branch in zip(self.alphas, (attn, mlp), strict=True):
            h_BTD = unit(h_BTD + alpha_D * (unit(branch(h_BTD)) - h_BTD))
        return h_BTD


register_placement(Hypersphere())
