"""Placements with a norm on the output of each sub-layer, or inside it: `res_post`, `peri`, `sub_ln`."""

from typing import Any

import pytest
from transformers.models.kosmos2.modeling_kosmos2 import Kosmos2TextForCausalLM

from support.architectures.architecture import (
    DEPTH,
    FAIRSEQ_ATTN,
    FAIRSEQ_PRE,
    FULL_ATTENTION,
    GATE_AND_UP,
    GATED,
    GEMMA,
    GEMMA_ENDS,
    GEMMA_PERI,
    GPT2,
    HEAD_WIDTH,
    IN_ATTN,
    IN_MLP,
    LLAMA,
    LLAMA_ATTN,
    LLAMA_ENDS,
    LLAMA_PRE,
    LLAMA_QK,
    NEIGHBOURS_ATTN,
    NO_POSITIONS,
    ONE_EXPERT,
    ONE_EXPERT_MLP,
    OUT_ATTN,
    OUT_MLP,
    OUTPUTS,
    ROTATION_BY_LAYER,
    SLIDING_ATTENTION,
    TANH_FUNCTION,
    WIDTH,
    Architecture,
    times,
)


def kosmos_without_sinusoids_and_padding(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its padding must be some token, whose embedding would have no gradient."""
    model.model.embed_positions.weights.zero_()
    model.model.embed_tokens.padding_idx = None


OUTPUT_NORMS = [
    # res_post
    Architecture(
        name="OLMo 2",
        transformers_class="Olmo2ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_olmo2 norm.eps=1e-6 placement=res_post model.qk_norm=full",
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_QK | OUTPUTS,
    ),
    Architecture(
        name="EXAONE 4",
        transformers_class="Exaone4ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=res_post model.qk_norm=head",
        # Without windows, all its layers rotate.
        config=FULL_ATTENTION | {"sliding_window": None},
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_QK | OUTPUTS,
    ),
    Architecture(
        name="FlexOlmo",
        transformers_class="FlexOlmoForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=res_post model.qk_norm=full",
        config=ONE_EXPERT,
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | ONE_EXPERT_MLP | LLAMA_QK | OUTPUTS,
        zero_in_transformers=("mlp.gate.weight",),
    ),
    # peri
    Architecture(
        name="Gemma 2",
        transformers_class="Gemma2ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_gemma placement=peri model.embed_scale={WIDTH**0.5} model.logit_softcap=3 "
        "model.attn_softcap=0.2",
        config=GEMMA | {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 0.2, "attn_implementation": "eager"},
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | GEMMA_PERI,
    ),
    Architecture(
        name="Gemma 3",
        transformers_class="Gemma3ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_gemma placement=peri model.qk_norm=head",
        config=GEMMA | FULL_ATTENTION | ROTATION_BY_LAYER,
        model_weights=GEMMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_QK | GEMMA_PERI,
    ),
    Architecture(
        name="AFMoE (Arcee Trinity)",
        transformers_class="AfmoeForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=peri model.qk_norm=head model.attn_gate=channel",
        config=SLIDING_ATTENTION | {"head_dim": HEAD_WIDTH, "num_dense_layers": DEPTH},
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN
        | GATED
        | LLAMA_QK
        | {
            "self_attn.gate_proj": "attn.gate",
            "input_layernorm": IN_ATTN,
            "post_attention_layernorm": OUT_ATTN,
            "pre_mlp_layernorm": IN_MLP,
            "post_mlp_layernorm": OUT_MLP,
        },
    ),
    Architecture(
        name="GLM-4",
        transformers_class="Glm4ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=sandwich",
        config={"head_dim": HEAD_WIDTH, "attention_bias": False},
        model_weights=LLAMA_ENDS,
        block_weights=NEIGHBOURS_ATTN
        | GATE_AND_UP
        | LLAMA_PRE
        | {"post_self_attn_layernorm": OUT_ATTN, "post_mlp_layernorm": OUT_MLP},
    ),
    Architecture(
        name="HyperCLOVA X",
        transformers_class="HyperCLOVAXForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=peri",
        config={
            "attention_multiplier": HEAD_WIDTH**-0.5,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "head_dim": HEAD_WIDTH,
        },
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_PRE | {"post_norm1": OUT_ATTN, "post_norm2": OUT_MLP},
    ),
    Architecture(
        # All its heads' outputs have a gate, which is a half where its weights are zero.
        name="AFMoE, its dense layers",
        transformers_class="AfmoeForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=peri model.qk_norm=head",
        # Only its layers with a window rotate; the window is as long as the context.
        config=SLIDING_ATTENTION | {"head_dim": HEAD_WIDTH, "num_dense_layers": DEPTH},
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN
        | GATED
        | LLAMA_QK
        | {
            "self_attn.o_proj": times(2, "attn.out"),
            "input_layernorm": IN_ATTN,
            "post_attention_layernorm": OUT_ATTN,
            "pre_mlp_layernorm": IN_MLP,
            "post_mlp_layernorm": OUT_MLP,
        },
        zero_in_transformers=("self_attn.gate_proj",),
    ),
    # sub_ln
    Architecture(
        name="BitNet b1.58",
        transformers_class="BitNetForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=sub_ln",
        config={"hidden_act": "silu"},
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN
        | GATED
        | LLAMA_PRE
        | {"self_attn.attn_sub_norm": "attn.norms.attn_inner", "mlp.ffn_sub_norm": "mlp.norm"},
    ),
    Architecture(
        name="Kosmos-2's decoder (Magneto)",
        transformers_class=Kosmos2TextForCausalLM,
        overrides=f"{GPT2} norm=layernorm placement=sub_ln",
        config=TANH_FUNCTION | {"ffn_dim": 4 * WIDTH, "scale_embedding": False, "pad_token_id": 0},
        model_weights={"model.embed_tokens": "embed.tokens", "model.layer_norm": "head.close"},
        block_weights=FAIRSEQ_ATTN
        | FAIRSEQ_PRE
        | {
            "self_attn.inner_attn_ln": "attn.norms.attn_inner",
            "ffn.fc1": "mlp.up",
            "ffn.ffn_layernorm": "mlp.norm",
            "ffn.fc2": "mlp.down",
        },
        zero_in_normlab=NO_POSITIONS,
        patch=kosmos_without_sinusoids_and_padding,
    ),
]
