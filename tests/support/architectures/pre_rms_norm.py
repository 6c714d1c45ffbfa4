"""`pre` with RMS norm."""

from __future__ import annotations

from support.architectures.architecture import (
    DEPTH,
    FULL_ATTENTION,
    GATE_AND_UP,
    GATED,
    GEMMA,
    GEMMA_ENDS,
    HEAD_WIDTH,
    HEADS,
    IN_ATTN,
    IN_MLP,
    LLAMA,
    LLAMA_ATTN,
    LLAMA_ENDS,
    LLAMA_PRE,
    NEIGHBOURS_ATTN,
    ONE_EXPERT,
    ONE_EXPERT_MLP,
    QKV,
    ROTARY_GELU,
    ROTATION,
    TANH,
    UNGATED,
    WIDTH,
    Architecture,
    alike,
    joined,
    transposed,
)
from support.transformers_models import CONTEXT

PRE_RMS_NORM = [
    *alike(
        {
            "Llama": ("LlamaForCausalLM", {}),
            "Mistral": ("MistralForCausalLM", {"sliding_window": None}),
            "Granite": (
                "GraniteForCausalLM",
                {
                    "attention_multiplier": HEAD_WIDTH**-0.5,
                    "embedding_multiplier": 1.0,
                    "residual_multiplier": 1.0,
                    "logits_scaling": 1.0,
                },
            ),
            "SmolLM3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1] * DEPTH}),
            "Seed-OSS": ("SeedOssForCausalLM", {"attention_bias": False, "head_dim": HEAD_WIDTH}),
            "Ministral": ("MinistralForCausalLM", FULL_ATTENTION | {"head_dim": HEAD_WIDTH, "sliding_window": CONTEXT}),
            "Ministral 3": (
                "Ministral3ForCausalLM",
                {
                    "head_dim": HEAD_WIDTH,
                    "sliding_window": None,
                    "rope_parameters": ROTATION
                    | {"llama_4_scaling_beta": 0.0, "original_max_position_embeddings": CONTEXT},
                },
            ),
            "CWM": (
                "CwmForCausalLM",
                FULL_ATTENTION
                | {"head_dim": HEAD_WIDTH, "bos_token_id": 0, "eos_token_id": 0, "sliding_window": CONTEXT},
            ),
            "Qwen2 with experts, its dense layers": (
                "Qwen2MoeForCausalLM",
                {"mlp_only_layers": list(range(DEPTH)), "qkv_bias": False},
            ),
        },
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="Qwen2",
        transformers_class="Qwen2ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_PRE,
        zero_in_transformers=("_proj.bias",),
    ),
    Architecture(
        name="Phi-3",
        transformers_class="Phi3ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        model_weights=LLAMA_ENDS,
        block_weights=GATE_AND_UP | LLAMA_PRE | {"self_attn.qkv_proj": joined(*QKV), "self_attn.o_proj": "attn.out"},
    ),
    Architecture(
        name="Helium",
        transformers_class="HeliumForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre norm.eps=1e-8",
        config={"head_dim": HEAD_WIDTH, "rms_norm_eps": 1e-8},
        model_weights=LLAMA_ENDS,
        block_weights=NEIGHBOURS_ATTN | GATED | LLAMA_PRE,
    ),
    *alike(
        {
            "ERNIE 4.5": ("Ernie4_5ForCausalLM", {"head_dim": HEAD_WIDTH}),
            "ERNIE 4.5 with experts, its dense layers": (
                "Ernie4_5_MoeForCausalLM",
                {"head_dim": HEAD_WIDTH, "moe_layer_start_index": DEPTH},
            ),
        },
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        model_weights=LLAMA_ENDS,
        block_weights=NEIGHBOURS_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="GLM",
        transformers_class="GlmForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        config={"head_dim": HEAD_WIDTH, "attention_bias": False},
        model_weights=LLAMA_ENDS,
        block_weights=NEIGHBOURS_ATTN | GATE_AND_UP | LLAMA_PRE,
    ),
    Architecture(
        name="Arcee",
        transformers_class="ArceeForCausalLM",
        overrides=f"{ROTARY_GELU} norm=rmsnorm_llama placement=pre",
        config=TANH,
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | UNGATED | LLAMA_PRE,
    ),
    Architecture(
        name="Mixtral",
        transformers_class="MixtralForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        config=ONE_EXPERT,
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | LLAMA_PRE | ONE_EXPERT_MLP,
        zero_in_transformers=("mlp.gate.weight",),
    ),
    Architecture(
        name="DBRX",
        transformers_class="DbrxForCausalLM",
        overrides=f"{LLAMA} norm=layernorm_nobias placement=pre",
        # Queries, keys and values are never as large as the bound on them.
        config={
            "d_model": WIDTH,
            "n_heads": HEADS,
            "n_layers": DEPTH,
            "max_seq_len": CONTEXT,
            "attn_config": {"rope_theta": 10000.0, "kv_n_heads": HEADS, "clip_qkv": 1e6},
            "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 96, "moe_num_experts": 1, "moe_top_k": 1},
        },
        block_prefix="transformer.blocks.{}.",
        model_weights={"transformer.wte": "embed.tokens", "transformer.norm_f": "head.close", "lm_head": "head"},
        block_weights={
            "norm_attn_norm.norm_1": IN_ATTN,
            "norm_attn_norm.norm_2": IN_MLP,
            "norm_attn_norm.attn.Wqkv": joined(*QKV),
            "norm_attn_norm.attn.out_proj": "attn.out",
            "ffn.experts.mlp.w1": "mlp.gate",
            "ffn.experts.mlp.v1": "mlp.up",
            "ffn.experts.mlp.w2": transposed("mlp.down"),
        },
        zero_in_transformers=("router.layer",),
    ),
    Architecture(
        name="Gemma",
        transformers_class="GemmaForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_gemma placement=pre",
        config={"head_dim": HEAD_WIDTH, "hidden_act": "silu"},
        model_weights=GEMMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="VaultGemma",
        transformers_class="VaultGemmaForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_gemma placement=pre",
        config=GEMMA,
        model_weights=GEMMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | {"input_layernorm": IN_ATTN, "pre_feedforward_layernorm": IN_MLP},
    ),
]
