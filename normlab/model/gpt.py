"""The GPT: embeddings, blocks, head. Its norm and its placement are arguments.

The model has three kinds of segments: `embed`, each of `blocks`, and `head`. A segment is a pure function of its input
and its tensors. The training step runs and compiles the segments one by one: one compiled block serves every depth,
and a pack of runs is the same segments under vmap.

Shapes: B batch, T time, D model width, V vocabulary.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from normlab.catalogue.parameters import HEAD, parameter, roles_of
from normlab.catalogue.placements.base import MakeNorm, Placement
from normlab.catalogue.placements.wiring import Branch
from normlab.config.model import ModelConfig
from normlab.model.attention import Attention, capped
from normlab.model.instrument import assign_sites, main_stream, observe, observe_streams
from normlab.model.mlp import MLP
from normlab.model.modules import build_wiring

SMALL_VOCAB = 1024
"""Largest vocabulary whose output matrix is not padded. Estimated: its product takes less time than the launches of the
padding."""


def padding_of(weight: Tensor) -> int:
    """Return the number of zero rows that pad an output matrix, so that its product is fast.

    Tensor cores need rows of logits that start at a multiple of 16 bytes. Parameters, loss and gradients keep V rows.
    """
    if not weight.is_cuda or len(weight) <= SMALL_VOCAB:
        return 0
    return -len(weight) % 64


class MakeNormOfModel(Protocol):
    """Builds the norm of a site, which may differ between blocks."""

    def __call__(self, width: int, site: str, layer: int | None = None) -> nn.Module:
        """Return the module for vectors of a width at a site, in the block `layer` (from 0) or outside the blocks."""
        ...


class Embed(nn.Module):
    """Token embedding, optional learned positions, then the placement's `input_module`."""

    init_roles: ClassVar[dict[str, str]] = {"tokens.weight": "embed.tokens", "positions.weight": "embed.positions"}
    """The role of each weight in the init rules (`init_rules.Weight`)."""

    def __init__(self, config: ModelConfig, placement: Placement, make_norm: MakeNorm, vocab_size: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, config.width)
        self.positions: nn.Embedding | None = None
        if config.positions == "learned":
            self.positions = nn.Embedding(config.context, config.width)
        self.scale = config.embed_scale
        self.open = placement.input_module(config.width, make_norm)
        self.shares_values = config.shares_values

    def forward(self, tokens_BT: Tensor) -> Any:
        x_BTD = self.tokens(tokens_BT)
        if self.scale != 1:
            x_BTD = x_BTD * self.scale
        if self.positions is not None:
            x_BTD = x_BTD + self.positions.weight[: tokens_BT.shape[-1]]
        stream = x_BTD if self.open is None else self.open(x_BTD)
        if self.shares_values:
            # The blocks look up their embeddings of values by the tokens, which the stream no longer has.
            return stream, {"tokens": tokens_BT}
        return stream


class Block(nn.Module):
    """Attention and MLP, wired by the placement. Only the tensors depend on the layer.

    With `shares_values`, tensors that several blocks use accompany the stream: (stream, tensors by name).
    """

    def __init__(
        self, config: ModelConfig, placement: Placement, make_norm: MakeNormOfModel, layer: int, vocab_size: int
    ):
        super().__init__()
        make_norm_here: MakeNorm = partial(make_norm, layer=layer)
        sites = placement.inner_sites(layer, config.depth)
        head_width = config.width // config.heads
        scale = placement.attention_scale(head_width)
        if config.scaling != "none":
            # Queries and keys correlate in a trained model: products of width K grow as K, not as sqrt(K) (muP).
            scale = 1 / head_width
        self.branch_factor = 1 / config.depth_ratio
        self.shares_values = config.shares_values
        self.attn = Attention(
            config, sites, scale, make_norm_here, layer=layer, vocab_size=vocab_size, head_scale=placement.head_scale(),
            rotated=placement.qk_transform(config.heads, head_width),
        )  # fmt: skip
        self.mlp = MLP(config, sites, make_norm_here, placement.hidden_transform)
        self.wiring = build_wiring(placement, layer, config.depth, config.width, make_norm_here)

    def forward(self, stream: Any) -> Any:
        shared: dict[str, Tensor] = {}
        if self.shares_values:
            # A copy, because attention adds to it: a block is a function, and may run twice on one input.
            stream, shared = stream[0], dict(stream[1])
        observe("resid", "", main_stream(stream))
        observe_streams(stream)
        attn = Branch(partial(self.attn, shared=shared), self.branch_factor)
        mlp = Branch(self.mlp, self.branch_factor)
        after = self.wiring(stream, attn, mlp)
        for name, branch in (("attn", attn), ("mlp", mlp)):
            if branch.last_update is not None:
                observe(name, "", branch.last_update)
        observe("block", "", main_stream(stream), main_stream(after))
        if self.shares_values:
            return after, shared
        return after


class Head(nn.Module):
    """The placement's `output_module`, then logits by the (possibly tied) output matrix."""

    init_roles: ClassVar[dict[str, str]] = {"weight": "head"}
    """The role of the output matrix in the init rules, unless it is tied."""

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement,
        make_norm: MakeNorm,
        vocab_size: int,
        tokens: nn.Embedding,
    ):
        super().__init__()
        self.close = placement.output_module(config.width, make_norm)
        self.logits = placement.logits_transform(vocab_size, config.width)
        self.divisor = config.width_ratio
        self.softcap, self.shares_values = config.logit_softcap, config.shares_values
        self.z_loss = config.z_loss
        if config.tie_embeddings:
            self.weight = tokens.weight
        else:
            self.weight = parameter(torch.empty(vocab_size, config.width), role=HEAD)

    def forward(self, stream: Any, part: Literal["all", "read", "unembed"] = "all") -> Tensor:
        """Return the logits, shape (B, T, V).

        Two parts, because large logits are computed in chunks: `read` returns the input of the output matrix, shape
        (B, T, D), and `unembed` maps that input, for any number of tokens, to logits.
        """
        if part == "unembed":
            return self._unembed(stream)
        if self.shares_values:
            stream = stream[0]
        observe("resid", "", main_stream(stream))
        observe_streams(stream)
        x_BTD = stream if self.close is None else self.close(stream)
        if part == "read":
            return x_BTD
        return self._unembed(x_BTD)

    def _unembed(self, x_BTD: Tensor) -> Tensor:
        weight_VD = self.weight
        if self.divisor != 1:
            x_BTD = x_BTD / self.divisor
        padding = padding_of(weight_VD)
        if padding:
            padded = torch.cat([weight_VD, weight_VD.new_zeros(padding, weight_VD.shape[1])])
            logits_BTV = nn.functional.linear(x_BTD, padded)[..., : len(weight_VD)]
        else:
            logits_BTV = nn.functional.linear(x_BTD, weight_VD)
        if self.logits is not None:
            logits_BTV = self.logits(logits_BTV)
        if self.softcap is not None:
            logits_BTV = capped(logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32)), self.softcap)
        observe("head", "", logits_BTV)
        return logits_BTV


class GPT(nn.Module):
    """A decoder-only transformer. Maps tokens (B, T), T at most the context, to logits (B, T, V).

    Weights are uninitialised until `model.init.initialise` has drawn them.
    """

    def __init__(self, config: ModelConfig, placement: Placement, make_norm: MakeNormOfModel, vocab_size: int):
        super().__init__()
        self.context = config.context
        self.embed = Embed(config, placement, make_norm, vocab_size)
        layers = range(config.depth)
        self.blocks = nn.ModuleList(Block(config, placement, make_norm, layer, vocab_size) for layer in layers)
        self.head = Head(config, placement, make_norm, vocab_size, self.embed.tokens)
        for _, segment in self.segments():
            assign_sites(segment)
        self.roles = roles_of(self)
        """The role of each parameter (`catalogue.parameters`), by its name."""

    def segments(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the segments in order, each with the prefix of its tensors' names in the model."""
        yield "embed.", self.embed
        for layer, block in enumerate(self.blocks):
            yield f"blocks.{layer}.", block
        yield "head.", self.head

    def forward(self, tokens_BT: Tensor) -> Tensor:
        stream = self.embed(tokens_BT)
        for block in self.blocks:
            stream = block(stream)
        return self.head(stream)
