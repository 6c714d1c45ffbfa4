"""`pre` with a norm on the embeddings, or on queries and keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.bloom import modeling_bloom

from support.architectures.architecture import (
    BART_ENDS,
    DENSE,
    DEPTH,
    FAIRSEQ_ATTN,
    FAIRSEQ_DECODER,
    FAIRSEQ_MLP,
    FAIRSEQ_PRE,
    FULL_ATTENTION,
    GATED,
    GPT2,
    HEAD_WIDTH,
    IN_ATTN,
    IN_MLP,
    K_NORM,
    LLAMA,
    LLAMA_ATTN,
    LLAMA_ENDS,
    LLAMA_PRE,
    LLAMA_QK,
    NEIGHBOURS_ATTN,
    NEOX_MLP,
    NO_POSITIONS,
    ONE_EXPERT,
    ONE_EXPERT_MLP,
    Q_NORM,
    QKV,
    QWEN_GATED_ATTN,
    ROTARY_GELU,
    ROTATION,
    ROTATION_BY_LAYER,
    SLIDING_ATTENTION,
    TANH,
    UNGATED,
    Architecture,
    alike,
    by_head,
    halves_exchanged,
    plus_one,
)
from support.transformers_models import CONTEXT


def without_alibi_of_bloom(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its GELU has sqrt(2 / pi) to eight digits only.
    monkeypatch.setattr(modeling_bloom.BloomGelu, "forward", lambda module, x: F.gelu(x, approximate="tanh"))
    monkeypatch.setattr(modeling_bloom, "_get_alibi_slopes", lambda heads, device: torch.zeros(heads, device=device))


PRE_EXTRA_NORMS = [
    # pre, and a norm on the embeddings
    Architecture(
        name="BLOOM",
        transformers_class="BloomForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=pre placement.embedding_norm=true",
        block_prefix="transformer.h.{}.",
        model_weights={
            "transformer.word_embeddings": "embed.tokens",
            "transformer.word_embeddings_layernorm": "embed.open",
            "transformer.ln_f": "head.close",
        },
        block_weights=NEOX_MLP
        | LLAMA_PRE
        | {"self_attention.query_key_value": by_head(*QKV), "self_attention.dense": "attn.out"},
        zero_in_normlab=NO_POSITIONS,
        patch=without_alibi_of_bloom,
    ),
    Architecture(
        name="mBART's decoder",
        transformers_class="MBartForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=pre placement.embedding_norm=true",
        config=FAIRSEQ_DECODER,
        block_prefix="model.decoder.layers.{}.",
        model_weights=BART_ENDS | {"model.decoder.layer_norm": "head.close"},
        block_weights=FAIRSEQ_ATTN | FAIRSEQ_MLP | FAIRSEQ_PRE,
        zero_in_transformers=("encoder_attn",),
    ),
    Architecture(
        # Its norm on queries and keys is after the rotation: without a gain it is the same before.
        name="nanochat",
        transformers_class="NanoChatForCausalLM",
        overrides=f"{ROTARY_GELU} norm=rmsnorm_simple placement=pre placement.embedding_norm=true model.qk_norm=head",
        config=TANH | {"final_logit_softcapping": None},
        model_weights={"model.embed_tokens": "embed.tokens", "lm_head": "head"},
        block_weights=LLAMA_ATTN
        | {
            "self_attn.q_proj": halves_exchanged("attn.q"),
            "self_attn.k_proj": halves_exchanged("attn.k"),
            "mlp.fc1": "mlp.up",
            "mlp.fc2": "mlp.down",
        },
    ),
    # pre, and a norm on queries and keys
    Architecture(
        name="Apertus",
        transformers_class="ApertusForCausalLM",
        overrides=f"{ROTARY_GELU} norm=rmsnorm_llama placement=pre model.qk_norm=head",
        config=TANH,
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN
        | UNGATED
        | LLAMA_QK
        | {"attention_layernorm": IN_ATTN, "feedforward_layernorm": IN_MLP},
    ),
    Architecture(
        name="OLMoE",
        transformers_class="OlmoeForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.qk_norm=full",
        config=ONE_EXPERT,
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | LLAMA_PRE | LLAMA_QK | ONE_EXPERT_MLP,
        zero_in_transformers=("mlp.gate.weight",),
    ),
    Architecture(
        name="MiniMax M2",
        transformers_class="MiniMaxM2ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.qk_norm=full",
        config=ONE_EXPERT | {"head_dim": HEAD_WIDTH},
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | ONE_EXPERT_MLP | LLAMA_PRE | LLAMA_QK,
        zero_in_transformers=("mlp.gate.weight",),
    ),
    Architecture(
        name="Qwen3",
        transformers_class="Qwen3ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_qwen3 placement=pre model.qk_norm=head",
        config={"head_dim": HEAD_WIDTH},
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_PRE | LLAMA_QK,
    ),
    Architecture(
        name="Qwen3 with experts",
        transformers_class="Qwen3MoeForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_qwen3 placement=pre model.qk_norm=head",
        config=ONE_EXPERT | {"head_dim": HEAD_WIDTH, "moe_intermediate_size": 96},
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | ONE_EXPERT_MLP | LLAMA_PRE | LLAMA_QK,
        zero_in_transformers=("mlp.gate.weight",),
    ),
    *alike(
        {
            "GLM-4.5, its dense layers": ("Glm4MoeForCausalLM", DENSE | {"use_qk_norm": True}),
            "dots.llm1, its dense layers": ("Dots1ForCausalLM", DENSE | FULL_ATTENTION),
            "EXAONE with experts, its dense layers": ("ExaoneMoeForCausalLM", DENSE | SLIDING_ATTENTION),
            "HY3, its dense layers": ("HYV3ForCausalLM", DENSE),
        },
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.qk_norm=head",
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_PRE | LLAMA_QK,
    ),
    Architecture(
        name="Mellum",
        transformers_class="MellumForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.qk_norm=head",
        config=ONE_EXPERT | FULL_ATTENTION | ROTATION_BY_LAYER | {"head_dim": HEAD_WIDTH, "moe_intermediate_size": 96},
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | ONE_EXPERT_MLP | LLAMA_PRE | LLAMA_QK,
        zero_in_transformers=("mlp.gate.weight",),
    ),
    *alike(
        {
            "Qwen3.5": (
                "Qwen3_5ForCausalLM",
                FULL_ATTENTION
                | {
                    "head_dim": HEAD_WIDTH,
                    "rope_parameters": ROTATION | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
                },
            ),
            "Qwen3-Next": (
                "Qwen3NextForCausalLM",
                FULL_ATTENTION | {"head_dim": HEAD_WIDTH, "mlp_only_layers": list(range(DEPTH))},
            ),
        },
        overrides=f"{LLAMA} norm=rmsnorm_qwen3_next placement=pre model.qk_norm=head",
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_PRE | LLAMA_QK | QWEN_GATED_ATTN,
    ),
    Architecture(
        # Its full attention alone. What it calls the norm of the embeddings is before the head.
        name="LFM2",
        transformers_class="Lfm2ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.qk_norm=head model.tie_embeddings=true",
        config=FULL_ATTENTION | {"norm_eps": 1e-6, "block_auto_adjust_ff_dim": False},
        model_weights={"model.embed_tokens": "embed.tokens", "model.embedding_norm": "head.close"},
        block_weights=FAIRSEQ_ATTN
        | {
            "self_attn.q_layernorm": Q_NORM,
            "self_attn.k_layernorm": K_NORM,
            "operator_norm": IN_ATTN,
            "ffn_norm": IN_MLP,
            "feed_forward.w1": "mlp.gate",
            "feed_forward.w3": "mlp.up",
            "feed_forward.w2": "mlp.down",
        },
    ),
    Architecture(
        # Its norm on queries and keys is after the rotation and has no gain; ours has one, which is 1 + 0 here.
        name="Llama 4",
        transformers_class="Llama4ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_gemma placement=pre model.qk_norm=head",
        config={
            "head_dim": HEAD_WIDTH,
            "intermediate_size_mlp": 96,
            "moe_layers": [],
            "no_rope_layers": [1] * DEPTH,
            "attention_chunk_size": CONTEXT,
        },
        model_weights=LLAMA_ENDS | {"model.norm": plus_one("head.close")},
        block_weights=NEIGHBOURS_ATTN
        | {
            "feed_forward.gate_proj": "mlp.gate",
            "feed_forward.up_proj": "mlp.up",
            "feed_forward.down_proj": "mlp.down",
            "input_layernorm": plus_one(IN_ATTN),
            "post_attention_layernorm": plus_one(IN_MLP),
        },
        zero_in_normlab=("qk_norms.q.affine.gain", "qk_norms.k.affine.gain"),
    ),
    Architecture(
        name="Persimmon",
        transformers_class="PersimmonForCausalLM",
        overrides=f"{ROTARY_GELU} model.bias=true norm=layernorm placement=pre model.qk_norm=head",
        config=TANH | {"layer_norm_eps": 1e-5},
        model_weights={"model.embed_tokens": "embed.tokens", "model.final_layernorm": "head.close", "lm_head": "head"},
        block_weights=NEOX_MLP
        | LLAMA_PRE
        | {
            "self_attn.query_key_value": by_head(*QKV),
            "self_attn.dense": "attn.out",
            "self_attn.q_layernorm": Q_NORM,
            "self_attn.k_layernorm": K_NORM,
        },
    ),
]
