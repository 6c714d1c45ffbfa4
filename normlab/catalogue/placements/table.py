"""The rows of the residual algebra, and their schedules: data for `algebra.py`.

Shapes: L blocks, l the number of a block from 1.
"""

import math

from normlab.catalogue.placements.algebra import (
    DepthScaledPlacement,
    EarlyBlocks,
    FirstBlockPlacement,
    Row,
    SubLayer,
    Variant,
    register_row,
)


def fourth_root(layer: int, depth: int) -> float:
    """(2L)^(1/4): alpha of DeepNorm."""
    return (2 * depth) ** 0.25


def twice_depth(layer: int, depth: int) -> float:
    """2L, the number of sub-layers: alpha of Keel."""
    return 2.0 * depth


def root_of_layer(layer: int, depth: int) -> float:
    return math.sqrt(layer)


def zero(layer: int, depth: int) -> float:
    return 0.0


def over_root_of_depth(layer: int, depth: int) -> float:
    return depth**-0.5


def smaller_with_depth(layer: int, depth: int) -> float:
    """Initial value in LayerScale: 0.1 up to 18 blocks, 1e-5 up to 24, then 1e-6; 19 to 23 are our choice."""
    if depth <= 18:
        return 0.1
    return 1e-5 if depth <= 24 else 1e-6


def first_block_only(depth: int) -> int:
    return 1


def quarter(depth: int) -> int:
    return depth // 4


SMALL_POST = (
    "its branches are negligible next to the normed stream: gradients are small at all depths, and arXiv:2002.04745's "
    "comparison with pre is reversed (`normlab sweep placement=pre,post init=gpt2,xavier train.steps=0`)"
)
NORMED_BRANCH = (
    "the norm after the branch cancels the smaller weights and divides their gradients by them: the first gradients "
    "grow with depth (`normlab sweep placement=peri,res_post init=gpt2,gpt2_scaled train.steps=0`)"
)
CANCELLED_OUTPUTS = (
    "our choice: the norm after the branch cancels smaller outputs, which only make the first gradients larger"
)
DAMPED_TWICE = (
    "1 / sqrt(l) already scales the branch; the authors' code does not scale the init too (arXiv:2502.05795, README)"
)

ROWS: tuple[Row, ...] = (
    Row(
        name="pre",
        title="pre-norm",
        formula="x = x + F(N(x))",
        pitfalls=(
            "The GPT in NVIDIA/ngpt was x = N(x) + F(N(x)) until November 2024 (issue 1): its stream was normed too.",
            "The norm before the LM head is required: the stream grows with depth, and nothing else bounds it.",
        ),
        source="Xiong et al. 2020, arXiv:2002.04745, section 3; GPT-2",
        init="gpt2_scaled",
        init_source="GPT-2: Radford et al. 2019, section 2.3",
        laws=("last_gradient_falls_with_depth", "last_gradient_above_post"),
        attn=SubLayer(norms=("input",)),
        mlp=SubLayer(norms=("input",)),
        final_norm=True,
    ),
    # No norm before the LM head: each block ends in a norm of the stream.
    Row(
        name="post",
        title="post-norm",
        formula="x = N(x + F(x))",
        pitfalls=(
            "The post-norm of OLMo 2 does not norm the stream; it is res_post here.",
            "rmsnorm_post of MLS-Bench is a sandwich: peri here.",
            "A run can get stuck at the unigram entropy of the corpus without diverging.",
        ),
        source="Vaswani et al. 2017, arXiv:1706.03762, section 3.1",
        note="The norm is on the stream. In OLMo 2, post-norm is a norm on the branch: res_post here",
        init="xavier",
        init_source="Xiong et al. 2020, arXiv:2002.04745, section 3",
        laws=("last_gradient_constant",),
        incompatible_inits={"gpt2": SMALL_POST, "gpt2_scaled": SMALL_POST, "depth_scaled": SMALL_POST},
        attn=SubLayer(norms=("residual",)),
        mlp=SubLayer(norms=("residual",)),
    ),
    # From here to res_post a norm on the branch bounds what a sub-layer adds, and none stands on the stream.
    Row(
        name="peri",
        title="peri-LN",
        formula="x = x + N(F(N(x)))",
        equals="sandwich",
        pitfalls=(
            "In ReaLLM-Forge peri has only the norm after the branch (res_post here) unless another option is set.",
            "Levanter and marin call it hybrid norm; that name belongs to hybridnorm.",
        ),
        source="Kim et al. 2025, arXiv:2502.02732 (Peri-LN)",
        note="Called sandwich before, and hybrid norm in levanter; the norm on the embeddings is embedding_norm=true. "
        "Gemma multiplies its embeddings by model.embed_scale, the square root of the width. Gemma 3 has "
        "model.qk_norm=head too, Gemma 4 also model.v_norm=true and scores that are not divided: "
        "model.qk_scale=K^(1/4), K the width of a head",
        init="gpt2",
        init_source=CANCELLED_OUTPUTS,
        laws=("stream_is_root_of_2l",),
        incompatible_inits={"gpt2_scaled": NORMED_BRANCH, "smallinit_scaled": NORMED_BRANCH},
        attn=SubLayer(norms=("input", "output")),
        mlp=SubLayer(norms=("input", "output")),
        final_norm=True,
    ),
    Row(
        name="sandwich",
        title="Sandwich-LN",
        formula="x = x + N(F(N(x)))",
        equals="peri",
        source="Ding et al. 2021, arXiv:2105.13290 (CogView)",
        note="peri by its older name. Some call N(x + F(N(x))) sandwich: pre_post here",
        init="gpt2",
        init_source=CANCELLED_OUTPUTS,
        incompatible_inits={"gpt2_scaled": NORMED_BRANCH, "smallinit_scaled": NORMED_BRANCH},
        attn=SubLayer(norms=("input", "output")),
        mlp=SubLayer(norms=("input", "output")),
        final_norm=True,
    ),
    Row(
        name="peri_raw_attn",
        title="peri-LN with raw attention",
        formula="h = x + N(A(x)); x = h + N(M(N(h)))",
        equals="peri, but for eps and a gain, with norm=rmsnorm model.qk_norm=head model.v_norm=true model.bias=false",
        source="normlab: peri without the norm before attention, which changes nothing in Gemma 4 (FlashNorm, "
        "arXiv:2407.09577)",
        note="The norms on each head's q, k and v undo what a norm before attention does",
        init="gpt2",
        init_source=CANCELLED_OUTPUTS,
        incompatible_inits={"gpt2_scaled": NORMED_BRANCH, "smallinit_scaled": NORMED_BRANCH},
        attn=SubLayer(norms=("output",)),
        mlp=SubLayer(norms=("input", "output")),
        final_norm=True,
    ),
    Row(
        name="depth_scaled_sandwich",
        title="depth-scaled sandwich norm",
        formula="x = x + N(F(N(x)))",
        equals="peri with the same gains",
        kind=DepthScaledPlacement,
        source="Yin et al. 2025, arXiv:2504.07866 (Pangu Ultra), whose c we know from a secondary source; c = 1 is "
        "Arcee Trinity's, arXiv:2602.17004",
        note="peri whose output norms' gains start at c / sqrt(L), c_attn = 0.283 and c_mlp = 0.432. The init of Pangu "
        "Ultra is reported to be init=tinyinit. AFMoE (Arcee Trinity) is placement.c_attn=1 placement.c_mlp=1 "
        "model.qk_norm=head model.attn_gate=channel",
        init="gpt2",
        init_source=f"{CANCELLED_OUTPUTS}; the paper's own, tinyinit, is known from a secondary source",
        incompatible_inits={"gpt2_scaled": NORMED_BRANCH, "smallinit_scaled": NORMED_BRANCH},
        initial_values={
            "wiring.attn.norms.out.affine.gain": "[c_attn * L ** -0.5 - unit_offset] * D",
            "wiring.mlp.norms.out.affine.gain": "[c_mlp * L ** -0.5 - unit_offset] * D",
        },
        attn=SubLayer(norms=("input", "output"), out_gain=over_root_of_depth),
        mlp=SubLayer(norms=("input", "output"), out_gain=over_root_of_depth),
        final_norm=True,
    ),
    Row(
        name="res_post",
        title="res-post-norm",
        formula="x = x + N(F(x))",
        pitfalls=(
            "Called post-norm, it is confused with x = N(x + F(x)), which norms the stream in every block.",
            "Its first sub-layer reads the embeddings without a norm, so their initial scale matters.",
        ),
        source="Liu et al. 2021, arXiv:2111.09883 (Swin v2)",
        note="OLMo 2 (arXiv:2501.00656) is this with model.qk_norm=full, and calls it reordered norm",
        init="gpt2",
        init_source="OLMo 2, arXiv:2501.00656: N(0, 0.02) for every matrix",
        laws=("stream_is_root_of_2l",),
        incompatible_inits={"gpt2_scaled": NORMED_BRANCH, "smallinit_scaled": NORMED_BRANCH},
        attn=SubLayer(norms=("output",)),
        mlp=SubLayer(norms=("output",)),
        final_norm=True,
    ),
    Row(
        name="mix_ln",
        title="Mix-LN",
        formula="x = N(x + F(x)) if l <= L // 4 else x + F(N(x))",
        equals="pre with fewer than 4 blocks or placement.early_blocks=0; post with a final norm where all are early",
        pitfalls=(
            "The authors' code draws embeddings with standard deviation sqrt(2 / 5), undocumented; init=gpt2 has 0.02.",
            "A quarter of the blocks suits 71M to 1B parameters; at 7B the loss has spikes (pixeli99/MixLN, issue 1).",
        ),
        source="Li et al. 2024, arXiv:2412.13795 (Mix-LN)",
        note="Post in the first quarter of the blocks, then pre. With fewer than 4 blocks it is pre",
        init="gpt2",
        init_source="our choice: its first blocks are post, the others pre, and neither rule suits both",
        attn=SubLayer(norms=("input",)),
        mlp=SubLayer(norms=("input",)),
        early=EarlyBlocks(
            blocks=quarter,
            condition="l <= L // 4",
            attn=SubLayer(norms=("residual",)),
            mlp=SubLayer(norms=("residual",)),
        ),
        final_norm=True,
    ),
    Row(
        name="deepnorm",
        title="DeepNorm",
        formula="x = N((2 * L) ** 0.25 * x + F(x))",
        pitfalls=(
            "pixeli99/MixLN and lmsdss/LayerNorm-Scaling use alpha = 2.828, the value for 32 blocks, at every depth.",
            "These two also use (8L)^(+1/4), not (8L)^(-1/4), as the gain of the init. normlab has not run their code.",
            "A survey writes alpha x + beta F(N(x)), but DeepNorm norms after the sum, and beta is part of the init.",
            "0.81 (N^4 M)^(1/16) and (3M)^(1/4) are for encoder-decoders; decoder-only models have (2L)^(1/4).",
        ),
        source="Wang et al. 2022, arXiv:2203.00555 (DeepNet), decoder-only",
        init="deepnorm",
        init_source="Wang et al. 2022, arXiv:2203.00555",
        laws=("first_and_last_gradient_equal",),
        incompatible_inits={
            "other": "beta = (8L)^(-1/4) on values, output and MLP is part of the method (arXiv:2203.00555)"
        },
        attn=SubLayer(norms=("residual",), skip=fourth_root),
        mlp=SubLayer(norms=("residual",), skip=fourth_root),
    ),
    Row(
        name="keel",
        title="Keel",
        formula="h = x + A(N(x)) if l == 1 else N(2 * L * x + A(N(x))); "
        "x = N(h + M(N(h))) if l == 1 else N(2 * L * h + M(N(h)))",
        kind=FirstBlockPlacement,
        pitfalls=(
            "first_block=same also multiplies the stream by 2L in the first block; public code does not.",
            "Public code norms the input of the LM head again, which adds a gain: placement.final_norm=true.",
            "x-transformers cites the paper for code without alpha: that is pre_post here.",
            "Other code of this name computes g x + (1 - g) N(F(x)) with a gate g, which is another method.",
        ),
        source="Chen & Wei 2026, arXiv:2601.19895 (Keel), which we could not read; as in public forks of OLMo-core and "
        "torchtitan",
        note="2L is the number of sub-layers. The first block has no alpha, and no norm after its attention",
        init="gpt2",
        init_source="a public torchtitan fork of arXiv:2601.19895: N(0, 0.02) for linear layers and embeddings",
        laws=("last_gradient_over_depth", "first_gradient_constant"),
        attn=SubLayer(norms=("input", "residual"), skip=twice_depth),
        mlp=SubLayer(norms=("input", "residual"), skip=twice_depth),
        early=EarlyBlocks(
            blocks=first_block_only,
            condition="l == 1",
            attn=SubLayer(norms=("input",)),
            mlp=SubLayer(norms=("input", "residual")),
        ),
        variants={
            "pre": Variant(
                formula="x = x + F(N(x)) if l == 1 else N(2 * L * x + F(N(x)))",
                early=EarlyBlocks(
                    blocks=first_block_only,
                    condition="l == 1",
                    attn=SubLayer(norms=("input",)),
                    mlp=SubLayer(norms=("input",)),
                ),
            ),
            "same": Variant(formula="x = N(2 * L * x + F(N(x)))"),
        },
    ),
    Row(
        name="lns",
        title="LayerNorm scaling",
        formula="x = x + F(N(x) / sqrt(l))",
        equals="pre with one block",
        pitfalls=(
            "lmsdss/LayerNorm-Scaling compares a lower-case name with 'LNS': the code of its method never runs.",
            "OLMo-core keeps the factor in a buffer that to_empty() erases and nothing restores (pull request 698).",
            "In the code of GPAS, 1 / sqrt(l) is only the initial value of a learned gain.",
        ),
        source="Sun et al. 2025, arXiv:2502.05795 (LayerNorm Scaling)",
        note="The factor is fixed. A learned gain with this initial value is another method",
        init="gpt2",
        init_source="the authors' README (arXiv:2502.05795): outputs are not scaled, because 1 / sqrt(l) does that",
        incompatible_inits={
            "gpt2_scaled": DAMPED_TWICE,
            "smallinit_scaled": DAMPED_TWICE,
            "depth_scaled": DAMPED_TWICE,
        },
        attn=SubLayer(norms=("input",), shrink=root_of_layer),
        mlp=SubLayer(norms=("input",), shrink=root_of_layer),
        final_norm=True,
    ),
    # A learned factor that starts at 0, or near it in layerscale, makes each block almost the identity at first.
    Row(
        name="skipinit",
        title="SkipInit",
        formula="x = x + scale * F(x)",
        parameters="2 * L",
        equals="norm=none placement=pre where every factor is 1",
        source="De & Smith 2020, arXiv:2002.10444 (SkipInit), for convolutional networks",
        note="One factor per sub-layer; no norms",
        init="xavier",
        init_source="our choice: branches start at 0, so the rule has no effect at the start",
        initial_values={"wiring.attn.scale": "0", "wiring.mlp.scale": "0"},
        attn=SubLayer(scale=zero),
        mlp=SubLayer(scale=zero),
    ),
    Row(
        name="rezero",
        title="ReZero",
        formula="x = x + scale * F(x)",
        parameters="L",
        equals="skipinit where a block's two factors are the same",
        pitfalls=(
            "In the authors' code the two sub-layers of a block share one factor; with two factors it is skipinit.",
        ),
        source="Bachlechner et al. 2020, arXiv:2003.04887 (ReZero)",
        note="One factor per block, shared by its two sub-layers as in the authors' code; no norms",
        init="xavier",
        init_source="our choice: branches start at 0, so the rule has no effect at the start",
        initial_values={"wiring.attn.scale": "0"},
        attn=SubLayer(scale=zero),
        mlp=SubLayer(scale=zero),
        shared_scale=True,
    ),
    Row(
        name="layerscale",
        title="LayerScale",
        formula="x = x + scale * F(N(x))",
        parameters="2 * L * D",
        equals="pre where every factor is 1",
        source="Touvron et al. 2021, arXiv:2103.17239 (LayerScale), for image transformers",
        note="One factor per channel, initially 0.1, 1e-5 or 1e-6, by depth",
        init="gpt2",
        init_source="our choice: the source names no rule",
        initial_values={
            "wiring.attn.scale": "[0.1 if L <= 18 else 0.00001 if L <= 24 else 0.000001] * D",
            "wiring.mlp.scale": "[0.1 if L <= 18 else 0.00001 if L <= 24 else 0.000001] * D",
        },
        attn=SubLayer(norms=("input",), scale=smaller_with_depth, scale_per_channel=True),
        mlp=SubLayer(norms=("input",), scale=smaller_with_depth, scale_per_channel=True),
        final_norm=True,
    ),
    Row(
        name="pre_post",
        title="pre-post-norm",
        formula="x = N(x + F(N(x)))",
        pitfalls=("Called sandwich, it is confused with peri, which norms the branch and not the stream.",),
        source="x-transformers, pre_and_post_norm=True; we know no paper",
        note="Some call it sandwich, which is peri here",
        init="xavier",
        init_source="our choice: that of post, since it has the same norm on the stream",
        attn=SubLayer(norms=("input", "residual")),
        mlp=SubLayer(norms=("input", "residual")),
    ),
    # From here on there are norms inside the sub-layers, and formulas name the parts of a sub-layer.
    Row(
        name="sub_ln",
        title="Sub-LN",
        formula="x = x + W_out(N(heads(N(x)))); x = x + W_down(N(hidden(N(x))))",
        pitfalls=(
            "The gain sqrt(ln 2L) is for decoder-only models; the decoder of an encoder-decoder has sqrt(ln 3M).",
        ),
        source="Wang et al. 2022, arXiv:2210.06423 (Magneto)",
        init="sub_ln",
        init_source="Wang et al. 2022, arXiv:2210.06423",
        incompatible_inits={
            "other": "gamma = sqrt(ln 2L) on values, output and MLP is part of the method (arXiv:2210.06423)"
        },
        attn=SubLayer(norms=("input", "inner_attn")),
        mlp=SubLayer(norms=("input", "inner_mlp")),
        final_norm=True,
    ),
    Row(
        name="hybridnorm",
        title="HybridNorm",
        formula="h = N(x + A_qkv(x)); x = h + M(h)",
        pitfalls=(
            "Hybrid norm in Levanter and marin is peri.",
            "Users of the code report runs that do not converge (issue 2), and no benefit after 40B tokens (issue 5).",
        ),
        source="Zhuo et al. 2025, arXiv:2503.04598 (HybridNorm)",
        note="A_qkv has a norm on each head's q, k and v. In levanter hybrid norm is peri",
        init="smallinit_scaled",
        init_source="the public code of Zhuo et al. 2025, arXiv:2503.04598",
        attn=SubLayer(norms=("q", "k", "v", "residual")),
        mlp=SubLayer(),
        final_norm=True,
    ),
    Row(
        name="hybridnorm_star",
        title="HybridNorm*",
        formula="h = x + A_qkv(N(x)) if l == 1 else N(x + A_qkv(x)); x = h + M(N(h)) if l == 1 else h + M(h)",
        equals="hybridnorm with placement.early_blocks=0",
        pitfalls=(
            "The improvement over pre depends on the init, and the comparison includes the method's own init.",
            "With RMSNorm and without biases the norm before the first attention changes nothing but for eps: those on "
            "each head's q, k and v undo it.",
        ),
        source="Zhuo et al. 2025, arXiv:2503.04598 (HybridNorm*), the first block as in its public code",
        note="The first block is pre with a norm on each head's q, k and v",
        init="smallinit_scaled",
        init_source="the public code of Zhuo et al. 2025, arXiv:2503.04598",
        attn=SubLayer(norms=("q", "k", "v", "residual")),
        mlp=SubLayer(),
        early=EarlyBlocks(
            blocks=first_block_only,
            condition="l == 1",
            attn=SubLayer(norms=("input", "q", "k", "v")),
            mlp=SubLayer(norms=("input",)),
        ),
        final_norm=True,
    ),
    Row(
        name="normformer",
        title="NormFormer",
        formula="x = x + N(W_out(heads_scaled(N(x)))); x = x + W_down(N(hidden(N(x))))",
        parameters="L * H",
        source="Shleifer, Weston & Ott 2021, arXiv:2110.09456 (NormFormer), without its ResScale",
        note="heads_scaled has a learned factor on each head's output. fairseq's scale_heads has it after W_out",
        init="gpt2",
        init_source="our choice: one of its two branches ends in a norm, which cancels smaller outputs",
        initial_values={"attn.head_scale": "[1] * H"},
        attn=SubLayer(norms=("input", "output")),
        mlp=SubLayer(norms=("input", "inner_mlp")),
        head_scale=True,
        final_norm=True,
    ),
)

for _row in ROWS:
    register_row(_row)
