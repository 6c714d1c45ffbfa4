"""Attention residuals: sub-layers read an average of earlier states of the stream, by attention over the depth.

Shapes: B batch, T time, D width, N states that a model stores, M = N + 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from normlab.base.options import option
from normlab.catalogue.parameters import parameter
from normlab.catalogue.placements.base import MakeNorm, Placement, register_placement
from normlab.catalogue.placements.streams import read, rms_normed
from normlab.catalogue.placements.wiring import Branch, TwoNorms

States = tuple[Tensor, Tensor]
"""The stream x, (B, T, D), and the stored states, (B, T, N, D): 0 where none is stored yet."""


def default_interval(depth: int) -> int:
    """Return the blocks from one stored state to the next: an eighth of the depth, at least 1."""
    return max(1, depth // 8)


@dataclass(kw_only=True, slots=True)
class AttnRes(Placement):
    """Every sub-layer reads N(recall(q, s, x)), an average of the stored states s and of the stream x.

    Each `every`th block, from the first on, stores the stream before its attention, whose output replaces the stream.
    The weights of the average are the softmax of the products of a learned query with each state over its root mean
    square. The head reads such an average too. The queries start at 0, as in fla, so that the weights are equal.
    """

    title: ClassVar[str] = "attention residuals"
    embedding_formula: ClassVar[str] = "s = states(x)"
    head_formula: ClassVar[str] = "x = N(recall(close_recall_query, s, x))"
    source: ClassVar[str] = (
        "Kimi Team 2026, arXiv:2603.15031 (Block AttnRes), as in fla 0.6 and in the draft of Kimi K3 for transformers"
    )
    note: ClassVar[str] = "fla counts sub-layers, two a block, and has a gain on the states, which a query can hold"
    parameters: ClassVar[str] = "(2 * L + 1) * D"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "Every sub-layer reads all states, which takes time: at equal time marin (issue 9290) reports a smaller gain, "
        "and nanochat (issue 646) none.",
    )
    init: ClassVar[str] = "gpt2"
    init_source: ClassVar[str] = "our choice: the source names no rule, and the stream begins again in some blocks"
    initial_values: ClassVar[Mapping[str, str]] = {
        "wiring.attn_recall.query": "[0] * D", "wiring.mlp_recall.query": "[0] * D",
        "head.close.recall.query": "[0] * D",
    }  # fmt: skip

    name: str = "attn_res"
    every: int | None = option(
        None,
        "Blocks from one stored state to the next; null for an eighth of the depth, rounded down, at least 1.",
        at_least=1,
    )

    @property
    def formula(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        stores = f"(l - 1) % {'max(1, L // 8)' if self.every is None else self.every} == 0"
        return (
            f"h = recall(attn_recall_query, s, x); s = store(s, x) if {stores} else s; "
            f"x = A(N(h)) if {stores} else x + A(N(h)); h = recall(mlp_recall_query, s, x); x = x + M(N(h))"
        )

    def without_defaults(self, depth: int, width: int) -> Self:
        """As the base class; also unset `every` if it is the default at this depth."""
        reduced = super(AttnRes, self).without_defaults(depth, width)
        if self.every == default_interval(depth):
            return replace(reduced, every=None)
        return reduced

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        return AttnResWiring(layer, depth, self.every or default_interval(depth), width, make_norm)

    def embed_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        return NoStates()

    def kept_numbers(self, depth: int, width: int) -> int:
        # Each sub-layer keeps all states and the stream, before and after their root mean square, and their weights.
        states = 1 + -(-depth // (self.every or default_interval(depth)))
        return 2 * states * (2 * width + 1)

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        return AttnResOutput(width, make_norm)


class NoStates(nn.Module):
    """The embeddings and no states, N = 0."""

    def forward(self, x_BTD: Tensor) -> States:
        # An empty slice has the dtype, the device and the other axes of x.
        return x_BTD, x_BTD[..., None, :][..., :0, :]


class Recall(nn.Module):
    """sum_i softmax_i(query . rms(v_i)) v_i, with the states and the stream as v, but those that are unknown."""

    def __init__(self, width: int):
        super().__init__()
        self.query = parameter(torch.zeros(width), role="scalar")

    def forward(self, x_BTD: Tensor, states_BTND: Tensor, is_unknown_M: Tensor | None = None) -> Tensor:
        v_BTMD = torch.cat([states_BTND, x_BTD[..., None, :]], -2)
        # A sum instead of a matrix product, because autocast computes matrix products in a narrow dtype.
        scores_BTM = (rms_normed(v_BTMD) * self.query).sum(-1)
        if is_unknown_M is not None:
            scores_BTM = scores_BTM.masked_fill(is_unknown_M, -torch.inf)
        return read(scores_BTM.softmax(-1), v_BTMD)


class AttnResWiring(TwoNorms):
    """The wiring of `AttnRes`, of block `layer`, from 0. The first block makes room for all states."""

    keep: Tensor
    is_new: Tensor
    is_unknown: Tensor
    is_unknown_after: Tensor

    def __init__(self, layer: int, depth: int, every: int, width: int, make_norm: MakeNorm):
        super().__init__(width, make_norm)
        self.attn_recall, self.mlp_recall = Recall(width), Recall(width)
        stored_in_N = torch.arange(0, depth, every)
        stored_in_M = torch.cat([stored_in_N, torch.tensor([-1])])  # the stream, the last, is known in all blocks
        # What differs between blocks is in buffers, and all states have room from the first block on, so that blocks
        # share one compiled graph. A state that is not stored yet is masked.
        self.register_buffer("keep", torch.tensor(layer % every > 0))
        self.register_buffer("is_new", stored_in_N[:, None] == layer)
        # A block stores its state before its attention, so its own state is known to its MLP only.
        self.register_buffer("is_unknown", stored_in_M >= layer)
        self.register_buffer("is_unknown_after", stored_in_M > layer)

    def forward(self, stream: States, attn: Branch, mlp: Branch) -> States:
        x_BTD, states_BTND = stream
        if not states_BTND.shape[-2]:
            states_BTND = torch.zeros_like(x_BTD)[..., None, :].repeat_interleave(len(self.is_new), -2)
        read_BTD = self.attn_recall(x_BTD, states_BTND, self.is_unknown)
        states_BTND = torch.where(self.is_new, x_BTD[..., None, :], states_BTND)
        x_BTD = self.keep * x_BTD + attn(self.attn_norm(read_BTD))
        read_BTD = self.mlp_recall(x_BTD, states_BTND, self.is_unknown_after)
        return x_BTD + mlp(self.mlp_norm(read_BTD)), states_BTND


class AttnResOutput(nn.Module):
    """N of an average of all states."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.recall = Recall(width)
        self.norm = make_norm(width, "final")

    def forward(self, stream: States) -> Tensor:
        return self.norm(self.recall(*stream))


register_placement(AttnRes())
