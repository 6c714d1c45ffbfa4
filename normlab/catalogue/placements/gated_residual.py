"""The gated residual: n streams, of which a sub-layer reads a mean whose gates are computed for each channel.

Shapes: B batch, T time, n streams, D width, R rank.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.base.options import option
from normlab.catalogue.placements.base import MakeNorm, register_placement
from normlab.catalogue.placements.streams import Streams, in_full_precision
from normlab.catalogue.placements.wiring import Branch, Sequential
from normlab.catalogue.sites import of_sub_layer


def default_rank(width: int) -> int:
    """Return the default rank of Qwen3.8-Flash-Next's class, 320 for width 2048, in proportion for another width."""
    return max(1, 5 * width // 32)


@dataclass(kw_only=True, slots=True)
class GatedResidual(Streams):
    """x <- x + write(b, F(mean(g h))), h = N(x): n streams, each with its own norm, gates g and weights b of a token.

    Every stream has a norm of its own before every sub-layer, and h are its outputs. Two matrices of rank R compute a
    gate for each channel of each stream, g = sigmoid(up silu(down h / n)), from all n D numbers h, and a third one the
    weights b = 2 sigmoid(inject h / n). A sub-layer reads the mean over the streams of g h, without another norm. The
    head reads such a mean too, with norms and gates of its own. The streams start as copies of the embeddings, the
    gates near a half and b near 1.
    """

    title: ClassVar[str] = "gated residual"
    formula: ClassVar[str] = "x = x + write(b, F(read(a, g * h)))"
    weights_formula: ClassVar[str] = (
        "h = N_streams(x); "
        "g = sigmoid(silu(h.flatten(-2) @ down_weight.mT / streams) @ up_weight.mT).unflatten(-1, (streams, D)); "
        "b = 2 * sigmoid(h.flatten(-2) @ inject_weight.mT / streams); a = ones(streams) / streams"
    )
    head_weights_formula: ClassVar[str] = (
        "h = N_streams(x); g = sigmoid(silu(h.flatten(-2) @ close_down_weight.mT / streams) @ close_up_weight.mT)"
        ".unflatten(-1, (streams, D)); a = ones(streams) / streams"
    )
    head_formula: ClassVar[str] = "x = read(a, g * h)"
    source: ClassVar[str] = (
        "Qwen3.8-Flash-Next: Qwen4ExpTextGatedResidual in huggingface/transformers 5.23.0, and GatedResidual in "
        "vllm-project/vllm at 1b1c92e with hc_per_branch_norm"
    )
    note: ClassVar[str] = (
        "norm=rmsnorm_gemma is its norm, with a gain of 1 + w; vllm can share one gain among the streams"
    )
    pitfalls: ClassVar[tuple[str, ...]] = (
        "The gates halve what sub-layers and the head read at the start: its root mean square is near 1/2, not 1.",
        "norm=none leaves nothing that bounds what a sub-layer reads, since no norm is behind the gates.",
    )
    init: ClassVar[str] = "gpt2"
    init_source: ClassVar[str] = "Qwen3.8-Flash-Next of transformers: N(0, 0.02) for every matrix"

    name: str = "gated_residual"
    rank: int | None = option(
        None, at_least=1, at_most=2**17,
        help="Rank R of the gates; null for 5/32 of the width, rounded down: 320 at 2048, the default of the class of "
        "transformers. The released model has 320 at 2560.",
    )  # fmt: skip

    def without_defaults(self, depth: int, width: int) -> Self:
        """As the base class; also unset `rank` if it is the default at this width."""
        reduced = super(GatedResidual, self).without_defaults(depth, width)
        if self.rank == default_rank(width):
            return replace(reduced, rank=None)
        return reduced

    def rank_at(self, width: int) -> int:
        return self.rank or default_rank(width)

    def matmul_weights(self, depth: int, width: int) -> int:
        gates = 2 * self.rank_at(width)
        return self.streams * width * (2 * depth * (gates + self.streams) + gates)

    def kept_numbers(self, depth: int, width: int) -> int:
        # Each sub-layer keeps h of all streams and their gates, R numbers before and after silu, and b before and after
        # its factor 2. The norms of the streams keep what they normalise.
        return 4 * (self.streams * (width + 1) + self.rank_at(width))

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        attn, mlp = [GatedSubLayer(self, sub_layer, width, make_norm) for sub_layer in ("attn", "mlp")]
        return Sequential(attn, mlp)

    def wiring_sites(self, layer: int, depth: int) -> tuple[str, ...]:
        return ("input_attn",) * self.streams + ("input_mlp",) * self.streams

    def end_sites(self) -> tuple[str, ...]:
        return ("final",) * self.streams

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        return GatedMean(self, width, make_norm, "final")


class GatedMean(nn.Module):
    """The mean over the streams of g h, h the streams after their norms at a site."""

    init_roles: ClassVar[dict[str, str]] = {"down.weight": "streams", "up.weight": "streams"}

    def __init__(self, placement: GatedResidual, width: int, make_norm: MakeNorm, site: str):
        super().__init__()
        n, rank = placement.streams, placement.rank_at(width)
        self.stream_norms = nn.ModuleList(make_norm(width, site) for _ in range(n))
        self.down = nn.Linear(n * width, rank, bias=False)
        self.up = nn.Linear(rank, n * width, bias=False)

    def normed(self, x_BTnD: Tensor) -> Tensor:
        """Return h, each stream after its norm."""
        streams = [norm(x_BTD) for norm, x_BTD in zip(self.stream_norms, x_BTnD.unbind(-2), strict=True)]
        return torch.stack(streams, -2)

    def gated_mean(self, h_BTnD: Tensor) -> Tensor:
        """Return the mean over the streams of g h."""
        numbers_BTR = self.down(h_BTnD.flatten(-2)) / len(self.stream_norms)
        gate_BTnD = torch.sigmoid(self.up(F.silu(numbers_BTR))).unflatten(-1, h_BTnD.shape[-2:])
        return (gate_BTnD * h_BTnD).mean(-2)

    def forward(self, x_BTnD: Tensor) -> Tensor:
        with in_full_precision(x_BTnD):
            return self.gated_mean(self.normed(x_BTnD))


class GatedSubLayer(GatedMean):
    """x <- x + write(b, F(mean(g h))) for one sub-layer F."""

    init_roles: ClassVar[dict[str, str]] = {**GatedMean.init_roles, "inject.weight": "streams"}

    def __init__(self, placement: GatedResidual, sub_layer: str, width: int, make_norm: MakeNorm):
        super().__init__(placement, width, make_norm, of_sub_layer("input", sub_layer))
        n = placement.streams
        self.inject = nn.Linear(n * width, n, bias=False)

    def forward(self, x_BTnD: Tensor, sublayer: Branch) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with in_full_precision(x_BTnD):
            h_BTnD = self.normed(x_BTnD)
            read_BTD = self.gated_mean(h_BTnD)
            b_BTn = 2 * torch.sigmoid(self.inject(h_BTnD.flatten(-2)) / len(self.stream_norms))
        branch_BTD = sublayer(read_BTD)
        with in_full_precision(x_BTnD):
            return x_BTnD + sublayer.mark_update(b_BTn[..., None] * branch_BTD[..., None, :])


register_placement(GatedResidual())
