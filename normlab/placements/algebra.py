"""The residual algebra, and the placements that are rows of it.

With sub-layer F, block l of L (1-based),

    x <- C( a_l x + g b_l B( F( A(x) / s_l ) ) )

A is the `in` norm, B the `out` norm, C the residual norm (`res`), each a norm or nothing; a_l, b_l and s_l
are numbers, g a learned number, a learned vector or nothing. A placement of this kind is one row of ROWS.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from normlab.errors import ConfigError, nearest
from normlab.options import option
from normlab.placements.base import INNER_SITES, NORMED, WITHOUT_NORMS, MakeNorm, Placement, register_placement
from normlab.source import check_starts, code_of

if TYPE_CHECKING:
    from torch import nn

    from normlab.norms.base import NormConfig

Schedule = Callable[[int, int], float]
"""A number for block l of L, both counted from 1."""


def one(layer: int, depth: int) -> float:
    """The number 1 at every layer: no factor at all."""
    return 1.0


def fourth_root(layer: int, depth: int) -> float:
    """(2L)^(1/4): DeepNorm's alpha."""
    return (2 * depth) ** 0.25


def twice_depth(layer: int, depth: int) -> float:
    """2L, the number of sub-layers: Keel's alpha."""
    return 2.0 * depth


def root_of_layer(layer: int, depth: int) -> float:
    """sqrt(l)."""
    return math.sqrt(layer)


def zero(layer: int, depth: int) -> float:
    """The number 0 at every layer."""
    return 0.0


def over_root_of_depth(layer: int, depth: int) -> float:
    """1 / sqrt(L)."""
    return depth**-0.5


def smaller_with_depth(layer: int, depth: int) -> float:
    """LayerScale's start: 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond. Of 19 to 23 its paper says nothing."""
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class SubLayer:
    """How one sub-layer joins the stream."""

    norms: tuple[str, ...] = ()
    """Sites that carry a norm: `in`, `out`, `res`, and those inside the sub-layer (`base.INNER_SITES`)."""
    skip: Schedule = one
    """a_l, the factor on the stream."""
    branch: Schedule = one
    """b_l, the factor on the sub-layer's (normed) output."""
    shrink: Schedule = one
    """s_l, the divisor of the sub-layer's (normed) input."""
    scale: Schedule | None = None
    """Where g starts, the learned factor on the sub-layer's (normed) output; nothing where there is none."""
    scale_per_channel: bool = False
    """Whether g is a vector, a factor for each channel."""
    out_gain: Schedule | None = None
    """Where the gain of the `out` norm starts; nothing for where the norm itself starts it."""

    @property
    def factors(self) -> tuple[Schedule, Schedule, Schedule]:
        """The three schedules."""
        return self.skip, self.branch, self.shrink

    def numbers(self, layer: int, depth: int) -> tuple[object, ...]:
        """What the sub-layer is in block `layer`, its schedules as numbers."""
        factors = [factor(layer, depth) for factor in self.factors]
        starts = [None if start is None else start(layer, depth) for start in (self.scale, self.out_gain)]
        return self.norms, factors, starts, self.scale_per_channel


@dataclass(frozen=True, kw_only=True, slots=True)
class Early:
    """The sub-layers of the first blocks, where they join the stream otherwise than those of the rest."""

    blocks: Callable[[int], int]
    """How many blocks that is, of L."""
    condition: str
    """How the row's formula says whether block l is one of them."""
    attn: SubLayer = field(default_factory=SubLayer)
    mlp: SubLayer = field(default_factory=SubLayer)


def one_block(depth: int) -> int:
    """The first block alone."""
    return 1


def quarter(depth: int) -> int:
    """floor(L / 4) blocks."""
    return depth // 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A placement in the algebra: data, not code."""

    name: str
    formula: str
    """One block's update, in the terms of `Placement.formula`."""
    source: str
    init: str
    attn: SubLayer = field(default_factory=SubLayer)
    mlp: SubLayer = field(default_factory=SubLayer)
    early: Early | None = None
    """The first blocks, where they are unlike the rest."""
    head_scale: bool = False
    """Whether each head's output has a learned factor (`Placement.head_scale`)."""
    shared_scale: bool = False
    """Whether g is the same number in both sub-layers of a block."""
    embedding_norm: bool = False
    """A norm on the embeddings, before the first block."""
    final_norm: bool = False
    """A norm on the stream, before the head."""
    wrong_inits: Mapping[str, str] = field(default_factory=dict)
    """As `Placement.wrong_inits`."""
    starts: Mapping[str, str] = field(default_factory=dict)
    """As `Placement.starts`."""
    note: str = ""
    """What else goes by this name, and what else this is called."""
    parameters: str = "0"
    """As `Placement.parameters`."""
    equals: str = ""
    """As `Placement.equals`."""
    pitfalls: tuple[str, ...] = ()
    """As `Placement.pitfalls`."""

    @property
    def all_sub_layers(self) -> list[SubLayer]:
        """All that there are, those of the first blocks too."""
        return [sub for part in (self, self.early) if part is not None for sub in (part.attn, part.mlp)]


SMALL_POST = (
    "branches of this size vanish beside the normed stream: gradients are small and flat, and the comparison with pre "
    "of arXiv:2002.04745 turns round (see `normlab probe placement=pre,post init=gpt2,xavier`)"
)
NORMED_BRANCH = (
    "the norm after the branch undoes the smaller weights, and divides by them on the way back: the first gradients "
    "grow with depth (see `normlab probe placement=peri,res_post init=gpt2,gpt2_scaled`)"
)
DAMPED_TWICE = "its authors' code scales no residual init: 1 / sqrt(l) does that (arXiv:2502.05795, README)"

ROWS: tuple[Row, ...] = (
    Row(
        name="pre",
        formula="x = x + F(N(x))",
        parameters="0",
        pitfalls=(
            "NVIDIA/ngpt's GPT was x = N(x) + F(N(x)) until November 2024 (issue 1): its stream was normed too.",
            "Its norm before the head is a part of it: the stream grows with depth, and nothing else stops that.",
        ),
        source="Xiong et al. 2020, arXiv:2002.04745, section 3; GPT-2",
        init="gpt2_scaled",
        attn=SubLayer(norms=("in",)),
        mlp=SubLayer(norms=("in",)),
        final_norm=True,
    ),
    Row(
        name="post",
        formula="x = N(x + F(x))",
        parameters="0",
        pitfalls=(
            "OLMo 2's post-norm leaves the stream alone, and is res_post here.",
            "What MLS-Bench runs as rmsnorm_post is a sandwich: peri here.",
            "A final loss at the corpus's unigram entropy never began to fall: it is another failure than divergence.",
        ),
        source="Vaswani et al. 2017, arXiv:1706.03762, section 3.1",
        note="The norm is on the stream. OLMo 2 calls post-norm what leaves the stream alone: res_post here",
        init="xavier",
        wrong_inits={"gpt2": SMALL_POST, "gpt2_scaled": SMALL_POST, "depth_scaled": SMALL_POST},
        attn=SubLayer(norms=("res",)),
        mlp=SubLayer(norms=("res",)),
    ),
    Row(
        name="peri",
        formula="x = x + N(F(N(x)))",
        parameters="0",
        equals="sandwich",
        pitfalls=(
            "In ReaLLM-Forge peri is the norm after the branch alone, res_post here; the one before is a switch apart.",
            "Levanter and marin call it hybrid norm, which is hybridnorm's name.",
        ),
        source="Kim et al. 2025, arXiv:2502.02732 (Peri-LN)",
        note="Called sandwich before, and hybrid norm in levanter; the norm on the embeddings is embedding_norm=true",
        init="gpt2",
        wrong_inits={"gpt2_scaled": NORMED_BRANCH, "smallinit_scaled": NORMED_BRANCH},
        attn=SubLayer(norms=("in", "out")),
        mlp=SubLayer(norms=("in", "out")),
        final_norm=True,
    ),
    Row(
        name="sandwich",
        formula="x = x + N(F(N(x)))",
        parameters="0",
        equals="peri",
        source="Ding et al. 2021, arXiv:2105.13290 (CogView)",
        note="peri by its older name. Some call N(x + F(N(x))) sandwich: pre_post here",
        init="gpt2",
        wrong_inits={"gpt2_scaled": NORMED_BRANCH, "smallinit_scaled": NORMED_BRANCH},
        attn=SubLayer(norms=("in", "out")),
        mlp=SubLayer(norms=("in", "out")),
        final_norm=True,
    ),
    Row(
        name="depth_scaled_sandwich",
        formula="x = x + N(F(N(x)))",
        parameters="0",
        equals="peri, of the same gains",
        source="after Yin et al. 2025, arXiv:2504.07866 (Pangu Ultra)",
        note="peri whose output norms' gains start at 1 / sqrt(L). We could not check the paper's number for 1, or its "
        "init rule, which is said to be init=tinyinit",
        init="gpt2",
        wrong_inits={"gpt2_scaled": NORMED_BRANCH, "smallinit_scaled": NORMED_BRANCH},
        starts={
            "wiring.attn.norms.out.affine.gain": "[L ** -0.5 - unit_offset] * D",
            "wiring.mlp.norms.out.affine.gain": "[L ** -0.5 - unit_offset] * D",
        },
        attn=SubLayer(norms=("in", "out"), out_gain=over_root_of_depth),
        mlp=SubLayer(norms=("in", "out"), out_gain=over_root_of_depth),
        final_norm=True,
    ),
    Row(
        name="res_post",
        formula="x = x + N(F(x))",
        parameters="0",
        pitfalls=(
            "Called post-norm it is taken for x = N(x + F(x)); here the stream itself is never normed before the end.",
            "Its first sub-layer reads the embeddings as they are: how large these start matters.",
        ),
        source="Liu et al. 2021, arXiv:2111.09883 (Swin v2)",
        note="OLMo 2 (arXiv:2501.00656) is this with model.qk_norm=full, and calls it reordered norm",
        init="gpt2",
        wrong_inits={"gpt2_scaled": NORMED_BRANCH, "smallinit_scaled": NORMED_BRANCH},
        attn=SubLayer(norms=("out",)),
        mlp=SubLayer(norms=("out",)),
        final_norm=True,
    ),
    Row(
        name="mix_ln",
        formula="x = N(x + F(x)) if l <= L // 4 else x + F(N(x))",
        parameters="0",
        equals="pre with fewer than 4 blocks or placement.early_blocks=0; post with a final norm where all are early",
        pitfalls=(
            "Its authors' code starts embeddings with deviation sqrt(2 / 5), and does not say so; init=gpt2 is 0.02.",
            "A quarter of the blocks is for 71M to 1B parameters; at 7B the loss has spikes (pixeli99/MixLN, issue 1).",
        ),
        source="Li et al. 2024, arXiv:2412.13795 (Mix-LN)",
        note="Post in the first quarter of the blocks, then pre. With fewer than 4 blocks it is pre",
        init="gpt2",
        attn=SubLayer(norms=("in",)),
        mlp=SubLayer(norms=("in",)),
        early=Early(
            blocks=quarter, condition="l <= L // 4", attn=SubLayer(norms=("res",)), mlp=SubLayer(norms=("res",))
        ),
        final_norm=True,
    ),
    Row(
        name="deepnorm",
        formula="x = N((2 * L) ** 0.25 * x + F(x))",
        parameters="0",
        pitfalls=(
            "pixeli99/MixLN, and lmsdss/LayerNorm-Scaling after it, have 32 blocks' alpha, 2.828, at every depth.",
            "The same two have the init's gain as (8L)^(+1/4): their tables show another method under this name.",
            "A survey has alpha x + beta F(N(x)); but no norm is before the branch, and beta is of the weights' init.",
            "0.81 (N^4 M)^(1/16) and (3M)^(1/4) are of encoders and decoders together; a decoder alone has (2L)^(1/4).",
        ),
        source="Wang et al. 2022, arXiv:2203.00555 (DeepNet), of decoders alone",
        init="deepnorm",
        wrong_inits={"other": "beta = (8L)^(-1/4) on values, output and MLP is half of the method (arXiv:2203.00555)"},
        attn=SubLayer(norms=("res",), skip=fourth_root),
        mlp=SubLayer(norms=("res",), skip=fourth_root),
    ),
    Row(
        name="keel",
        formula="x = N(2 * L * x + F(N(x)))",
        parameters="0",
        pitfalls=(
            "x-transformers names the paper beside code without an alpha: that is pre_post here.",
            "Under its name there is code that computes g x + (1 - g) N(F(x)), with a gate g: another method.",
        ),
        source="Chen & Wei 2026, arXiv:2601.19895 (Keel)",
        note="2L is the number of sub-layers, as others tell of the paper, which we could not read",
        init="xavier",
        attn=SubLayer(norms=("in", "res"), skip=twice_depth),
        mlp=SubLayer(norms=("in", "res"), skip=twice_depth),
    ),
    Row(
        name="lns",
        formula="x = x + F(N(x) / sqrt(l))",
        parameters="0",
        equals="pre with one block",
        pitfalls=(
            "lmsdss/LayerNorm-Scaling compares a name in lower case with 'LNS': its method's branch is never taken.",
            "OLMo-core has the factor in a buffer, which to_empty() wipes and nothing sets again (pull request 698).",
            "In GPAS's code 1 / sqrt(l) is where a learned gain starts, which can leave it.",
        ),
        source="Sun et al. 2025, arXiv:2502.05795 (LayerNorm Scaling)",
        note="The factor is fixed. As the start of a learned gain it is another method",
        init="gpt2",
        wrong_inits={"gpt2_scaled": DAMPED_TWICE, "smallinit_scaled": DAMPED_TWICE, "depth_scaled": DAMPED_TWICE},
        attn=SubLayer(norms=("in",), shrink=root_of_layer),
        mlp=SubLayer(norms=("in",), shrink=root_of_layer),
        final_norm=True,
    ),
    Row(
        name="skipinit",
        formula="x = x + scale * F(x)",
        parameters="2 * L",
        equals="norm=none placement=pre where every factor is 1",
        source="De & Smith 2020, arXiv:2002.10444 (SkipInit), of convolutional networks",
        note="A number for each sub-layer. It has no norm at all",
        init="xavier",
        starts={"wiring.attn.scale": "0", "wiring.mlp.scale": "0"},
        attn=SubLayer(scale=zero),
        mlp=SubLayer(scale=zero),
    ),
    Row(
        name="rezero",
        formula="x = x + scale * F(x)",
        parameters="L",
        equals="skipinit where a block's two factors are the same",
        pitfalls=(
            "In the code of its authors the two sub-layers of a block share a number; one for each is skipinit.",
        ),
        source="Bachlechner et al. 2020, arXiv:2003.04887 (ReZero)",
        note="As in the authors' code a number for each block, shared by its sub-layers. It has no norm at all",
        init="xavier",
        starts={"wiring.attn.scale": "0"},
        attn=SubLayer(scale=zero),
        mlp=SubLayer(scale=zero),
        shared_scale=True,
    ),
    Row(
        name="layerscale",
        formula="x = x + scale * F(N(x))",
        parameters="2 * L * D",
        equals="pre where every factor is 1",
        source="Touvron et al. 2021, arXiv:2103.17239 (LayerScale), of image transformers",
        note="A factor for each channel, started at 0.1, 1e-5 or 1e-6 by depth",
        init="gpt2",
        starts={
            "wiring.attn.scale": "[0.1 if L <= 18 else 0.00001 if L <= 24 else 0.000001] * D",
            "wiring.mlp.scale": "[0.1 if L <= 18 else 0.00001 if L <= 24 else 0.000001] * D",
        },
        attn=SubLayer(norms=("in",), scale=smaller_with_depth, scale_per_channel=True),
        mlp=SubLayer(norms=("in",), scale=smaller_with_depth, scale_per_channel=True),
        final_norm=True,
    ),
    Row(
        name="pre_post",
        formula="x = N(x + F(N(x)))",
        parameters="0",
        pitfalls=("Called sandwich, it is taken for peri, which norms the branch and leaves the stream alone.",),
        source="x-transformers, pre_and_post_norm=True; no paper is known to us",
        note="Some call it sandwich, which is peri here",
        init="xavier",
        attn=SubLayer(norms=("in", "res")),
        mlp=SubLayer(norms=("in", "res")),
    ),
    Row(
        name="sub_ln",
        formula="x = x + W_out(N(heads(N(x)))); x = x + W_down(N(hidden(N(x))))",
        parameters="0",
        pitfalls=("The gain sqrt(ln 2L) is a decoder's alone; one beside an encoder has sqrt(ln 3M).",),
        source="Wang et al. 2022, arXiv:2210.06423 (Magneto)",
        init="sub_ln",
        wrong_inits={"other": "gamma = sqrt(ln 2L) on values, output and MLP is half of the method (arXiv:2210.06423)"},
        attn=SubLayer(norms=("in", "attn_inner")),
        mlp=SubLayer(norms=("in", "mlp_inner")),
        final_norm=True,
    ),
    Row(
        name="hybridnorm",
        formula="h = N(x + A_qkv(x)); x = h + M(h)",
        parameters="0",
        pitfalls=(
            "Levanter and marin mean peri by hybrid norm.",
            "Users of its code tell of runs that do not converge (issue 2) and of no gain after 40B tokens (issue 5).",
        ),
        source="Zhuo et al. 2025, arXiv:2503.04598 (HybridNorm)",
        note="A_qkv has a norm on each head's q, k and v. In levanter hybrid norm is peri",
        init="smallinit_scaled",
        attn=SubLayer(norms=("q", "k", "v", "res")),
        mlp=SubLayer(),
        final_norm=True,
    ),
    Row(
        name="hybridnorm_star",
        formula="h = x + A_qkv(N(x)) if l == 1 else N(x + A_qkv(x)); x = h + M(N(h)) if l == 1 else h + M(h)",
        parameters="0",
        equals="hybridnorm with placement.early_blocks=0",
        pitfalls=("What it gains depends on the init: its own is part of what is compared.",),
        source="Zhuo et al. 2025, arXiv:2503.04598 (HybridNorm*), the first block as in its public code",
        note="The first block is pre with a norm on each head's q, k and v",
        init="smallinit_scaled",
        attn=SubLayer(norms=("q", "k", "v", "res")),
        mlp=SubLayer(),
        early=Early(
            blocks=one_block,
            condition="l == 1",
            attn=SubLayer(norms=("in", "q", "k", "v")),
            mlp=SubLayer(norms=("in",)),
        ),
        final_norm=True,
    ),
    Row(
        name="normformer",
        formula="x = x + N(W_out(heads_scaled(N(x)))); x = x + W_down(N(hidden(N(x))))",
        parameters="L * H",
        source="Shleifer, Weston & Ott 2021, arXiv:2110.09456 (NormFormer), without its ResScale",
        note="heads_scaled has a learned factor on each head's output. fairseq's scale_heads has it after W_out",
        init="gpt2",
        starts={"attn.head_scale": "[1] * H"},
        attn=SubLayer(norms=("in", "out")),
        mlp=SubLayer(norms=("in", "mlp_inner")),
        head_scale=True,
        final_norm=True,
    ),
)


@dataclass(kw_only=True, slots=True)
class AlgebraPlacement(Placement):
    """A placement that is a row of the algebra."""

    def fits(self, norm: NormConfig) -> None:
        """Refuse a norm without a gain where the row says what gains start at.

        Raises:
            ConfigError: It has none.
        """
        starts_gains = any(sub.out_gain is not None for sub in self.row.all_sub_layers)
        if starts_gains and not norm.has_gain:
            raise ConfigError(
                f"norm={norm.name}: has no gain per channel, and placement={self.name} is about what these start at; "
                f"choose a norm with norm.gain=true, or placement=peri"
            )

    @property
    def row(self) -> Row:
        """The row of this name."""
        return _ROWS_BY_NAME[self.name]

    @property
    def formula(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The row's."""
        return self.row.formula

    @property
    def wrong_inits(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The row's."""
        return self.row.wrong_inits

    @property
    def starts(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The row's."""
        return self.row.starts

    def holds_norm(self, depth: int) -> bool:
        """Whether any sub-layer has a site with a norm, or an end of the stream."""
        return any(sub.norms for subs in self.layers(depth) for sub in subs) or any(self.ends)

    @property
    def opens(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The row's embedding norm, as a formula."""
        return NORMED if self.row.embedding_norm else ""

    @property
    def closes(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The row's final norm, as a formula."""
        return NORMED if self.row.final_norm else ""

    @property
    def init_rule(self) -> str:
        """The init rule that the row belongs to."""
        return self.row.init

    @property
    def is_plain_sum(self) -> bool:
        """That of a row without factors."""
        return all(sub.scale is None and sub.skip is sub.branch is sub.shrink is one for sub in self.row.all_sub_layers)

    def definition(self, depth: int) -> str:
        """The row, its factors as numbers, and the wiring: other rows of the same table do not count."""
        from normlab.placements import wiring

        row = self.row
        blocks = [[sub.numbers(layer, depth) for sub in subs] for layer, subs in enumerate(self.layers(depth), start=1)]
        switches = row.head_scale, row.shared_scale, row.embedding_norm, row.final_norm
        return repr((blocks, switches)) + code_of(wiring)

    def sub_layers(self, layer: int, depth: int) -> tuple[SubLayer, SubLayer]:
        """Attention and MLP of block `layer`, counted from 1."""
        return self.row.attn, self.row.mlp

    def layers(self, depth: int) -> list[tuple[SubLayer, SubLayer]]:
        """Those of all blocks."""
        return [self.sub_layers(layer, depth) for layer in range(1, depth + 1)]

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """The two sub-layers, one after the other, each by the algebra."""
        from normlab.placements.wiring import Residual, Sequential

        attn, mlp = (Residual(sub, layer + 1, depth, width, make_norm) for sub in self.sub_layers(layer + 1, depth))
        if self.row.shared_scale:
            mlp.scale = attn.scale
        return Sequential(attn, mlp)

    def inner_sites(self, layer: int, depth: int) -> frozenset[str]:
        """The row's sites that lie inside the sub-layers."""
        attn, mlp = self.sub_layers(layer + 1, depth)
        return frozenset(attn.norms + mlp.norms) & set(INNER_SITES)

    def head_scale(self) -> bool:
        """The row's."""
        return self.row.head_scale

    def open(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """The embedding norm, or nothing."""
        return make_norm(width) if self.row.embedding_norm else None

    def close(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """The final norm, or nothing."""
        return make_norm(width) if self.row.final_norm else None


@dataclass(kw_only=True, slots=True)
class EarlyPlacement(AlgebraPlacement):
    """A row whose first blocks are wired otherwise than the rest."""

    early_blocks: int | None = option(None, at_least=0, absent=None)
    """How many blocks, from the first, are the early ones; null for as many as the row has."""

    def reduced(self, depth: int) -> Self:
        """As the base class; a number of early blocks not set where it is the row's own."""
        less = super(EarlyPlacement, self).reduced(depth)
        return replace(less, early_blocks=None) if less.early_blocks == self.early.blocks(depth) else less

    def refuse_idle(self, norm: NormConfig, depth: int) -> None:
        """As the base class; refuse a number of early blocks that is more than there are, or where none differs.

        Raises:
            ConfigError: Naming the number.
        """
        super(EarlyPlacement, self).refuse_idle(norm, depth)
        if self.early_blocks is None:
            return
        word = f"placement.early_blocks={self.early_blocks}"
        if self.early_blocks > depth:
            raise ConfigError(f"{word}: more than model.depth={depth}; choose at most {depth}, or raise the depth")
        first, rest = ([replace(sub, norms=()) for sub in (part.attn, part.mlp)] for part in (self.early, self.row))
        if norm.name == "none" and first == rest:
            raise ConfigError(f"{word}: {WITHOUT_NORMS}")

    @property
    def early(self) -> Early:
        """The row's."""
        assert self.row.early is not None
        return self.row.early

    @property
    def formula(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The row's, with the number of early blocks that is asked for."""
        if self.early_blocks is None:
            return self.row.formula
        return self.row.formula.replace(self.early.condition, f"l <= {self.early_blocks}")

    def sub_layers(self, layer: int, depth: int) -> tuple[SubLayer, SubLayer]:
        """Attention and MLP of block `layer`, counted from 1."""
        blocks = self.early.blocks(depth) if self.early_blocks is None else self.early_blocks
        return (self.early.attn, self.early.mlp) if layer <= blocks else (self.row.attn, self.row.mlp)


_ROWS_BY_NAME: dict[str, Row] = {}

SITES = {"attn": ("in", "out", "res", "q", "k", "v", "attn_inner"), "mlp": ("in", "out", "res", "mlp_inner")}
"""Where a norm can stand at each sub-layer."""


def register_row(row: Row) -> None:
    """Make a row known as a placement.

    Raises:
        ConfigError: A site that the sub-layer has not, or one named twice, a gain of a norm that is not there,
            `starts` is no mapping, or another row of the same name.
    """
    for kind, sub in zip(itertools.cycle(SITES), row.all_sub_layers, strict=False):
        for site in sub.norms:
            if site not in SITES[kind]:
                sites = "; ".join(f"{other} has {', '.join(there)}" for other, there in SITES.items())
                meant = nearest(site, SITES[kind])
                raise ConfigError(f"placement {row.name!r}: unknown site {site!r} of {kind}{meant}: {sites}")
            if sub.norms.count(site) > 1:
                raise ConfigError(f"placement {row.name!r}: {kind} has one norm at {site!r}; name the site once")
        if sub.out_gain is not None and "out" not in sub.norms:
            raise ConfigError(f"placement {row.name!r}: out_gain has no effect without a norm at site 'out'; add it")
    check_starts("placement", row.name, row.starts)
    kind = AlgebraPlacement if row.early is None else EarlyPlacement
    register_placement(kind(name=row.name), same=_ROWS_BY_NAME.get(row.name) == row)
    _ROWS_BY_NAME[row.name] = row


for _row in ROWS:
    register_row(_row)
