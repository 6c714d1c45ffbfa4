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

from normlab.errors import ConfigError, nearest, unknown
from normlab.options import option
from normlab.placements.base import INNER_SITES, NORMED, WITHOUT_NORMS, MakeNorm, Placement, register_placement
from normlab.source import check_starts

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Early:
    """The sub-layers of the first blocks, where they join the stream otherwise than those of the rest."""

    blocks: Callable[[int], int]
    """How many blocks that is, of L."""
    condition: str
    """How the row's formula says whether block l is one of them."""
    attn: SubLayer = field(default_factory=SubLayer)
    mlp: SubLayer = field(default_factory=SubLayer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Another form of a row: its formula and its first blocks in place of the row's own."""

    formula: str
    early: Early | None = None
    """None where all blocks are alike."""


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
    version: int = 1
    """As `Placement.version`."""
    attn: SubLayer = field(default_factory=SubLayer)
    mlp: SubLayer = field(default_factory=SubLayer)
    early: Early | None = None
    """The first blocks, where they are unlike the rest."""
    variants: Mapping[str, Variant] = field(default_factory=dict)
    """Other forms of the row, by the value of the option that selects them."""
    kind: str = ""
    """Name of the placement class that has the row's options; by default `EarlyPlacement` for a row with `early`, and
    `AlgebraPlacement` for any other."""
    head_scale: bool = False
    """Whether each head's output has a learned factor (`Placement.head_scale`)."""
    shared_scale: bool = False
    """Whether g is the same number in both sub-layers of a block."""
    embedding_norm: bool = False
    """A norm on the embeddings, before the first block."""
    final_norm: bool = False
    """A norm on the stream, before the head."""
    incompatible_inits: Mapping[str, str] = field(default_factory=dict)
    """As `Placement.incompatible_inits`."""
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
        """All sub-layers, those of the first blocks and of the variants included."""
        parts = (self, self.early, *(variant.early for variant in self.variants.values()))
        return [sub for part in parts if part is not None for sub in (part.attn, part.mlp)]


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
        incompatible_inits={"gpt2": SMALL_POST, "gpt2_scaled": SMALL_POST, "depth_scaled": SMALL_POST},
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
        incompatible_inits={"gpt2_scaled": NORMED_BRANCH, "smallinit_scaled": NORMED_BRANCH},
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
        incompatible_inits={"gpt2_scaled": NORMED_BRANCH, "smallinit_scaled": NORMED_BRANCH},
        attn=SubLayer(norms=("in", "out")),
        mlp=SubLayer(norms=("in", "out")),
        final_norm=True,
    ),
    Row(
        name="depth_scaled_sandwich",
        formula="x = x + N(F(N(x)))",
        parameters="0",
        equals="peri, of the same gains",
        kind="DepthScaledPlacement",
        source="Yin et al. 2025, arXiv:2504.07866 (Pangu Ultra), whose c we know from a secondary source; c = 1 is "
        "Arcee Trinity's, arXiv:2602.17004",
        note="peri whose output norms' gains start at c / sqrt(L), c_attn = 0.283 and c_mlp = 0.432. The init of Pangu "
        "Ultra is reported to be init=tinyinit. Arcee Trinity is placement.c_attn=1 placement.c_mlp=1",
        init="gpt2",
        incompatible_inits={"gpt2_scaled": NORMED_BRANCH, "smallinit_scaled": NORMED_BRANCH},
        starts={
            "wiring.attn.norms.out.affine.gain": "[c_attn * L ** -0.5 - unit_offset] * D",
            "wiring.mlp.norms.out.affine.gain": "[c_mlp * L ** -0.5 - unit_offset] * D",
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
        incompatible_inits={"gpt2_scaled": NORMED_BRANCH, "smallinit_scaled": NORMED_BRANCH},
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
        incompatible_inits={
            "other": "beta = (8L)^(-1/4) on values, output and MLP is half of the method (arXiv:2203.00555)"
        },
        attn=SubLayer(norms=("res",), skip=fourth_root),
        mlp=SubLayer(norms=("res",), skip=fourth_root),
    ),
    Row(
        name="keel",
        formula="h = x + A(N(x)) if l == 1 else N(2 * L * x + A(N(x))); "
        "x = N(h + M(N(h))) if l == 1 else N(2 * L * h + M(N(h)))",
        parameters="0",
        kind="FirstBlockPlacement",
        pitfalls=(
            "With first_block=same the first block's branches are divided by 2L as well; in public code they are not.",
            "Public code norms the head's input once more, which adds a gain: placement.final_norm=true.",
            "x-transformers names the paper beside code without an alpha: that is pre_post here.",
            "Under its name there is code that computes g x + (1 - g) N(F(x)), with a gate g: another method.",
        ),
        source="Chen & Wei 2026, arXiv:2601.19895 (Keel), which we could not read; as in public forks of OLMo-core and "
        "torchtitan",
        note="2L is the number of sub-layers. The first block has no alpha, and no norm after its attention",
        init="gpt2",
        attn=SubLayer(norms=("in", "res"), skip=twice_depth),
        mlp=SubLayer(norms=("in", "res"), skip=twice_depth),
        early=Early(
            blocks=one_block,
            condition="l == 1",
            attn=SubLayer(norms=("in",)),
            mlp=SubLayer(norms=("in", "res")),
        ),
        variants={
            "pre": Variant(
                formula="x = x + F(N(x)) if l == 1 else N(2 * L * x + F(N(x)))",
                early=Early(
                    blocks=one_block,
                    condition="l == 1",
                    attn=SubLayer(norms=("in",)),
                    mlp=SubLayer(norms=("in",)),
                ),
            ),
            "same": Variant(formula="x = N(2 * L * x + F(N(x)))"),
        },
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
        incompatible_inits={
            "gpt2_scaled": DAMPED_TWICE,
            "smallinit_scaled": DAMPED_TWICE,
            "depth_scaled": DAMPED_TWICE,
        },
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
        incompatible_inits={
            "other": "gamma = sqrt(ln 2L) on values, output and MLP is half of the method (arXiv:2210.06423)"
        },
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
        """The row of this name, as the options make it."""
        return _ROWS_BY_NAME[self.name]

    @property
    def version(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The row's."""
        return self.row.version

    @property
    def formula(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The row's."""
        return self.row.formula

    @property
    def incompatible_inits(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The row's."""
        return self.row.incompatible_inits

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

    def sub_layers(self, layer: int, depth: int) -> tuple[SubLayer, SubLayer]:
        """Attention and MLP of block `layer`, counted from 1."""
        row = self.row
        part = row if row.early is None or layer > row.early.blocks(depth) else row.early
        return part.attn, part.mlp

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
        early = _ROWS_BY_NAME[self.name].early
        assert early is not None
        return early

    @property
    def row(self) -> Row:
        """The row, with the number of early blocks that is asked for."""
        row, blocks = _ROWS_BY_NAME[self.name], self.early_blocks
        if blocks is None:
            return row
        condition = f"l <= {blocks}"
        early = replace(self.early, blocks=lambda depth: blocks, condition=condition)
        return replace(row, formula=row.formula.replace(self.early.condition, condition), early=early)


@dataclass(kw_only=True, slots=True)
class FirstBlockPlacement(AlgebraPlacement):
    """A row whose first block has variants in public code."""

    first_block: str = option("attention_pre", choices=("attention_pre", "pre", "same"), absent="same")
    """The first block: `attention_pre` has pre-norm attention and the MLP N(x + M(N(x))); `pre` has pre-norm for both;
    `same` is like all other blocks, as in every run recorded without this option."""

    @property
    def row(self) -> Row:
        """The row, or its variant with this first block."""
        row = _ROWS_BY_NAME[self.name]
        variant = row.variants.get(self.first_block)
        return row if variant is None else replace(row, formula=variant.formula, early=variant.early)

    def refuse_idle(self, norm: NormConfig, depth: int) -> None:
        """As the base class; refuse a first block that differs from the default by its norms alone with norm=none.

        Raises:
            ConfigError: Naming the first block.
        """
        super(FirstBlockPlacement, self).refuse_idle(norm, depth)
        default = replace(self, first_block="attention_pre")
        own, other = ([replace(sub, norms=()) for sub in each.sub_layers(1, depth)] for each in (self, default))
        if norm.name == "none" and self != default and own == other:
            raise ConfigError(f"placement.first_block={self.first_block}: {WITHOUT_NORMS}")


@dataclass(kw_only=True, slots=True)
class DepthScaledPlacement(AlgebraPlacement):
    """A row whose output norms' gains start at c times the row's number."""

    c_attn: float = option(0.283, above=0, absent=1.0)
    """c of attention's output norm: 0.283 as reported of Pangu Ultra; 1 in Arcee Trinity and in every run recorded
    without this option."""
    c_mlp: float = option(0.432, above=0, absent=1.0)
    """c of the MLP's output norm: 0.432 as reported of Pangu Ultra; 1 in Arcee Trinity and in every run recorded
    without this option."""

    @property
    def row(self) -> Row:
        """The row, its gains' starts times c."""
        row = _ROWS_BY_NAME[self.name]
        return replace(row, attn=_scaled_start(row.attn, self.c_attn), mlp=_scaled_start(row.mlp, self.c_mlp))


def _scaled_start(sub: SubLayer, c: float) -> SubLayer:
    """The sub-layer, its output gain's start times c."""
    start = sub.out_gain
    assert start is not None
    return replace(sub, out_gain=lambda layer, depth: c * start(layer, depth))


KINDS = {kind.__name__: kind for kind in (AlgebraPlacement, EarlyPlacement, FirstBlockPlacement, DepthScaledPlacement)}
"""Placement classes by the names that `Row.kind` has."""

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
    kind = row.kind or ("AlgebraPlacement" if row.early is None else "EarlyPlacement")
    if kind not in KINDS:
        raise ConfigError(f"placement {row.name!r}: " + unknown("kind", kind, [*KINDS]))
    register_placement(KINDS[kind](name=row.name), same=_ROWS_BY_NAME.get(row.name) == row)
    _ROWS_BY_NAME[row.name] = row


for _row in ROWS:
    register_row(_row)
