"""nGPT: the stream, and every matrix along the axis of the stream, have length 1.

Shapes: B batch, T time, D width, H heads, K head width, M width of the MLP, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.catalogue.parameters import parameter
from normlab.catalogue.placements.base import MakeNorm, Placement, register_placement
from normlab.catalogue.placements.wiring import Branch, Sequential

ROWS = (
    "embed.tokens.weight",
    "embed.positions.weight",
    "head.weight",
    "attn.q.weight",
    "attn.k.weight",
    "attn.v.weight",
    "mlp.up.weight",
    "mlp.gate.weight",
)
"""Matrices whose rows have length 1: they read the stream, or are vectors of it."""
COLUMNS = ("attn.out.weight", "mlp.down.weight")
"""Matrices whose columns have length 1: they write to the stream."""


def unit(x: Tensor, axis: int = -1) -> Tensor:
    """Return x divided by its L2 norm along an axis, in float32 or wider; 0 stays 0."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=axis)


@dataclass(kw_only=True, slots=True)
class NGPT(Placement):
    """x <- unit(u + alpha (unit(F(x)) - u)), u = unit(x) = x / |x|, with a learned rate alpha for each channel.

    Also part of it (initial value of each learned scale in parentheses):

    - after each step the rows of the matrices that read the stream, and the columns of those that write to it, are
      projected to length 1, embeddings and head included;
    - queries and keys are unit vectors of each head after RoPE, times s_qk (1), and q.k is multiplied by sqrt(K);
    - W_up x and W_gate x are multiplied by s_u sqrt(D) and s_v sqrt(D) (s = 1; GELU has only W_up x);
    - the logits are multiplied by s_z (1);
    - alpha = |learned| (0.05). alpha, s_qk and s_z are stored as 1 / sqrt(D) and rescaled when used, so that the
      optimiser's step is large relative to them.

    The embeddings have length 1 because their matrix is projected; as in NVIDIA/ngpt and in the paper, the forward pass
    does not normalise them. With learned positions, which neither source has, the stream starts at the sum of both.

    The run's norm is not used, and the init rule has almost no effect, because projection removes the scale of rows.
    The paper trains with optim.weight_decay=0 and optim.warmup_steps=0, RoPE, SwiGLU, no bias and an untied head.
    """

    title: ClassVar[str] = "nGPT"
    formula: ClassVar[str] = (
        "f = F(x); x = x / norm2(x); x = x + 0.05 * sqrt(D) * abs(alpha) * (f / norm2(f) - x); x = x / norm2(x)"
    )
    inside: ClassVar[str] = (
        "q = sqrt(D) * scale * q / norm2(q); a = sqrt(K) * a; h = sqrt(D) * scale * h; z = sqrt(D) * scale * z"
    )
    source: ClassVar[str] = "Loshchilov et al. 2024, arXiv:2410.01131 (nGPT), as in NVIDIA/ngpt"
    parameters: ClassVar[str] = "L * (3 * D + 2 * M) + V"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "The baseline in NVIDIA/ngpt was x = N(x) + F(N(x)), not pre, until November 2024 (issue 1).",
        "Embeddings that the forward pass also normalises get another gradient.",
    )
    init: ClassVar[str] = "gpt2"
    init_source: ClassVar[str] = "our choice: rows are normalised to length 1, so the rule has no effect"
    initial_values: ClassVar[Mapping[str, str]] = {
        "wiring.attn.alpha": "[D ** -0.5] * D",
        "wiring.mlp.alpha": "[D ** -0.5] * D",
        "attn.rotated.scale": "[D ** -0.5] * D",
        "mlp.of_up.scale": "[1] * M",
        "mlp.of_gate.scale": "[1] * M",
        "head.logits.scale": "[D ** -0.5] * V",
    }
    unit_length: ClassVar[Mapping[str, str]] = {
        "rows": "tokens positions q k v up gate head",
        "columns": "out down",
    }
    incompatible_inits: ClassVar[Mapping[str, str]] = {
        "other": "rows are projected to length 1, so the standard deviation has no effect unless it is 0"
    }

    block_sites: ClassVar[tuple[str, ...]] = ()

    name: str = "ngpt"

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        return Sequential(NGPTSubLayer(width), NGPTSubLayer(width))

    def kept_numbers(self, depth: int, width: int) -> int:
        # Each sub-layer keeps three vectors that it divides by their length (x, F(x) and the sum), and what alpha
        # multiplies; attention also keeps q and k after their division.
        return 10 * width

    def attention_scale(self, head_width: int) -> float:
        """Return sqrt(K), because the product of unit vectors has variance 1 / K."""
        return head_width**0.5

    def qk_transform(self, heads: int, head_width: int) -> nn.Module:
        return UnitHeads(heads, head_width)

    def hidden_transform(self, site: str, width: int, mlp_width: int) -> nn.Module:
        """Return the scaling by s_u sqrt(D), or s_v sqrt(D)."""
        # The product of two unit vectors has a variance of 1 / D, at which SiLU would be almost linear (section 2.4.2).
        # Of W_up x in SwiGLU only NVIDIA/ngpt multiplies by it: the output, which gets length 1, is the same without.
        return Scale(mlp_width, start=1.0, factor=width**0.5)

    def logits_transform(self, vocab_size: int, width: int) -> nn.Module:
        """Return the scaling by s_z."""
        return Scale(vocab_size, start=width**-0.5, factor=width**0.5)

    def project(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            # Along the axis of the stream, so that the matrices that read it compute cosines.
            if name.endswith((*ROWS, *COLUMNS)):
                weight.copy_(unit(weight, -2 if name.endswith(COLUMNS) else -1))


class Scale(nn.Module):
    """x * factor * scale, scale a learned vector over the last axis that starts at `start`."""

    def __init__(self, width: int, *, start: float, factor: float):
        super().__init__()
        self.scale = parameter(torch.full((width,), start), role="scalar")
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.scale * self.factor).to(x.dtype)


class UnitHeads(Scale):
    """unit(x) of each head times s_qk, a learned vector over all channels of all heads, shape (H K,)."""

    def __init__(self, heads: int, head_width: int):
        width = heads * head_width
        super().__init__(width, start=width**-0.5, factor=width**0.5)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled input (B, H, T, K), in its shape and dtype."""
        scale_HK = (self.scale * self.factor).unflatten(0, (self.heads, -1))
        return (unit(x) * scale_HK.unsqueeze(1)).to(x.dtype)


class NGPTSubLayer(nn.Module):
    """unit(u + alpha (unit(F(x)) - u)), u = unit(x), for one sub-layer F."""

    def __init__(self, width: int):
        super().__init__()
        self.alpha = parameter(torch.full((width,), width**-0.5), role="scalar")
        self.factor = 0.05 * width**0.5

    def forward(self, x_BTD: Tensor, sublayer: Branch) -> Tensor:
        # |alpha|, because the paper's rates are not negative (section 2.2.2). unit(x) changes x in the first sub-layer
        # only, where learned positions, model.embed_scale or averaged weights (eval.ema) give x another length than 1.
        rate_D, unit_BTD = self.alpha.abs() * self.factor, unit(x_BTD)
        return unit(unit_BTD + sublayer.mark_update(rate_D * (unit(sublayer(x_BTD)) - unit_BTD)))


register_placement(NGPT())
