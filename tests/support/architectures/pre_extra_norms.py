"""`pre` with a norm on the embeddings, or on queries and keys."""

from support.architectures.architecture import (
    BART_ENDS,
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
    ONE_EXPERT,
    ONE_EXPERT_MLP,
    Q_NORM,
    QKV,
    QWEN_GATED_ATTN,
    ROTARY_GELU,
    ROTATION,
    TANH,
    UNGATED,
    Architecture,
    by_head,
    plus_one,
)
from support.transformers_models import CONTEXT

PRE_EXTRA_NORMS = [
    # pre, and a norm on the embeddings
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
        name="Qwen3",
        transformers_class="Qwen3ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_qwen3 placement=pre model.qk_norm=head",
        config={"head_dim": HEAD_WIDTH},
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_PRE | LLAMA_QK,
    ),
    Architecture(
        name="HunYuan",
        transformers_class="HunYuanDenseV1ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.qk_norm=head model.qk_norm_after_rope=true",
        config={"head_dim": HEAD_WIDTH, "rope_parameters": ROTATION},
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN
        | GATED
        | LLAMA_PRE
        | {"self_attn.query_layernorm": Q_NORM, "self_attn.key_layernorm": K_NORM},
    ),
    Architecture(
        name="GLM-4.5, its dense layers",
        transformers_class="Glm4MoeForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.qk_norm=head",
        config={
            "head_dim": HEAD_WIDTH,
            "first_k_dense_replace": DEPTH,
            "mlp_layer_types": ["dense"] * DEPTH,
            "use_qk_norm": True,
        },
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_PRE | LLAMA_QK,
    ),
    Architecture(
        name="Qwen3-Next",
        transformers_class="Qwen3NextForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_qwen3_next placement=pre model.qk_norm=head model.attn_gate=channel",
        config=FULL_ATTENTION | {"head_dim": HEAD_WIDTH, "mlp_only_layers": list(range(DEPTH))},
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
