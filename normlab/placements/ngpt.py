"""nGPT: the stream, and every matrix along the axis that meets it, lie on the unit sphere.

Shapes: B batch, T time, D width, H heads, K head width, M width of the MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.options import option
from normlab.placements.base import NORMED, MakeNorm, Placement, register_placement
from normlab.placements.wiring import Branch, Sequential

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
"""Matrices whose rows are kept at length 1: they are met by the stream, or are points of it."""
COLUMNS = ("attn.out.weight", "mlp.down.weight")
"""Matrices whose columns are: they write to it."""


def unit(x: Tensor, axis: int = -1) -> Tensor:
    """X over its L2 norm along an axis, in float32 or better; 0 stays 0."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=axis)


@dataclass(kw_only=True, slots=True)
class NGPT(Placement):
    """x <- unit(u + alpha (unit(F(x)) - u)), u = unit(x) = x / |x|, with a learned rate alpha for each channel.

    Also part of it, all learned scales starting where they multiply by the number that is given:

    - the rows of the matrices that read the stream, and the columns of those that write to it, are brought back to
      length 1 after each step, embeddings and head too;
    - queries and keys are unit vectors of each head after RoPE, times s_qk (1), and q.k is multiplied by sqrt(K);
    - W_up x and W_gate x are multiplied by s_u sqrt(D) and s_v sqrt(D) (s = 1; for GELU there is W_up x alone);
    - the logits are multiplied by s_z (1);
    - alpha = |learned| (0.05). It, s_qk and s_z are stored as 1 / sqrt(D) and multiplied by what makes up for it,
      so that the optimiser's step is large beside them.

    The embeddings are brought to length 1 by the weights alone, as in NVIDIA/ngpt and in the paper: the first
    sub-layer reads them as they are, and only the x that it is added to is unit(x), there as in every sub-layer.
    With learned positions, which neither has, that x is the sum with the token's embedding.

    It holds no norm of the run's, and its init rule decides nothing: rows of length 1 have lost their deviation.
    The paper trains it with optim.weight_decay=0 and optim.warmup_steps=0, with RoPE, SwiGLU, no bias and
    an untied head.
    """

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
        "Embeddings that the forward pass normalises too have another gradient: placement.normalize_embeddings=true.",
    )
    init: ClassVar[str] = "gpt2"
    starts: ClassVar[Mapping[str, str]] = {
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
        "other": "rows are brought to length 1: only the rule's zeros count"
    }

    name: str = "ngpt"
    normalize_embeddings: bool = option(False, absent=True)
    """Bring what enters the first block to length 1 in the forward pass too, as every run recorded without this option
    does."""

    @property
    def opens(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The normalisation of the embeddings, if it is set."""
        return "x = x / norm2(x)" if self.normalize_embeddings else ""

    def holds_norm(self, depth: int) -> bool:
        """Whether an end of the stream has a norm of the run's; a block has none."""
        return NORMED in self.ends

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """The two sub-layers, one after the other."""
        return Sequential(Displaced(width), Displaced(width))

    def open(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """The normalisation of the embeddings, if it is set."""
        return Unit() if self.normalize_embeddings else None

    def attention_scale(self, head_width: int) -> float:
        """sqrt(K): the product of unit vectors has variance 1 / K."""
        return head_width**0.5

    def rotated(self, heads: int, head_width: int) -> nn.Module:
        """Unit vectors times s_qk."""
        return UnitHeads(heads, head_width)

    def hidden(self, site: str, width: int, mlp_width: int) -> nn.Module:
        """Times s_u sqrt(D), or s_v sqrt(D)."""
        return Scale(mlp_width, start=1.0, factor=width**0.5)

    def logits(self, vocab_size: int, width: int) -> nn.Module:
        """Times s_z."""
        return Scale(vocab_size, start=width**-0.5, factor=width**0.5)

    def project(self, weights: Mapping[str, Tensor]) -> None:
        """Rows, or columns, back to length 1."""
        for name, weight in weights.items():
            if name.endswith((*ROWS, *COLUMNS)):
                weight.copy_(unit(weight, -2 if name.endswith(COLUMNS) else -1))


class Scale(nn.Module):
    """x times `factor` times a learned vector, one number for each of the last axis, that begins at `start`."""

    def __init__(self, width: int, *, start: float, factor: float):
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), start))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape and dtype."""
        return x * (self.scale * self.factor).to(x.dtype)


class UnitHeads(nn.Module):
    """Each head's vector over its length, times s_qk: one number for each channel of each head, (H K,) in all."""

    def __init__(self, heads: int, head_width: int):
        super().__init__()
        self.heads = heads
        width = heads * head_width
        self.scale = nn.Parameter(torch.full((width,), width**-0.5))
        self.factor = width**0.5

    def forward(self, x_BHTK: Tensor) -> Tensor:
        """Of the same shape and dtype."""
        scale_HK = (self.scale * self.factor).unflatten(0, (self.heads, -1))
        return (unit(x_BHTK) * scale_HK.unsqueeze(1)).to(x_BHTK.dtype)


class Displaced(nn.Module):
    """unit(u + alpha (unit(F(x)) - u)), u = unit(x), for one sub-layer F."""

    def __init__(self, width: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((width,), width**-0.5))
        self.factor = 0.05 * width**0.5

    def forward(self, x_BTD: Tensor, sublayer: Branch) -> Tensor:
        """The stream after the sub-layer."""
        rate_D, unit_BTD = self.alpha.abs() * self.factor, unit(x_BTD)
        return unit(unit_BTD + sublayer.added(rate_D * (unit(sublayer(x_BTD)) - unit_BTD)))


class Unit(nn.Module):
    """x / |x|."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The stream that enters the first block."""
        return unit(x_BTD)


register_placement(NGPT())
