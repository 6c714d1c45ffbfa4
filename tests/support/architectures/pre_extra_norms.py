"""`pre` with a norm on the embeddings, or on queries and keys."""

from __future__ import annotations

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
    LLAMA,
    LLAMA_ATTN,
    LLAMA_ENDS,
    LLAMA_PRE,
    LLAMA_QK,
    ONE_EXPERT,
    ONE_EXPERT_MLP,
    QWEN_GATED_ATTN,
    ROTARY_GELU,
    TANH,
    Architecture,
    halves_exchanged,
)

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
        overrides=f"{LLAMA} norm=rmsnorm_qwen3_next placement=pre model.qk_norm=head",
        config=FULL_ATTENTION | {"head_dim": HEAD_WIDTH, "mlp_only_layers": list(range(DEPTH))},
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_PRE | LLAMA_QK | QWEN_GATED_ATTN,
    ),
]
