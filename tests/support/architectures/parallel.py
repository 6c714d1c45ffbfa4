"""`parallel`, also with a norm on queries and keys, and `parallel_two_norms`."""

from support.architectures.architecture import (
    GATED,
    HEADS,
    K_NORM,
    LLAMA,
    LLAMA_ATTN,
    LLAMA_ENDS,
    NEIGHBOURS_ATTN,
    NEOX_MLP,
    Q_NORM,
    QKV,
    QKV_PROJ,
    ROTARY_GELU,
    TANH,
    TIED_ENDS,
    Architecture,
    by_head,
    for_each_head,
)

PARALLEL = [
    # parallel
    Architecture(
        name="Falcon 7B",
        transformers_class="FalconForCausalLM",
        overrides=f"{ROTARY_GELU} norm=layernorm placement=parallel model.tie_embeddings=true",
        config={"multi_query": False, "activation": "gelu_pytorch_tanh"},
        block_prefix="transformer.h.{}.",
        model_weights={"transformer.word_embeddings": "embed.tokens", "transformer.ln_f": "head.close"},
        block_weights=NEOX_MLP
        | {
            "input_layernorm": "wiring.norm",
            "self_attention.query_key_value": by_head(*QKV),
            "self_attention.dense": "attn.out",
        },
    ),
    Architecture(
        name="Phi",
        transformers_class="PhiForCausalLM",
        overrides=f"{ROTARY_GELU} model.bias=true norm=layernorm placement=parallel",
        config=TANH,
        model_weights={"model.embed_tokens": "embed.tokens", "model.final_layernorm": "head.close", "lm_head": "head"},
        block_weights=QKV_PROJ
        | {
            "input_layernorm": "wiring.norm",
            "self_attn.dense": "attn.out",
            "mlp.fc1": "mlp.up",
            "mlp.fc2": "mlp.down",
        },
        zero_in_transformers=("lm_head.bias",),
    ),
    Architecture(
        name="Command R (Cohere)",
        transformers_class="CohereForCausalLM",
        overrides=f"{LLAMA} norm=layernorm_nobias placement=parallel model.tie_embeddings=true",
        config={"logit_scale": 1.0},
        model_weights=TIED_ENDS,
        block_weights=NEIGHBOURS_ATTN | GATED | {"input_layernorm": "wiring.norm"},
    ),
    # parallel, and a norm on queries and keys
    Architecture(
        name="Command R+ (Cohere)",
        transformers_class="CohereForCausalLM",
        overrides=f"{LLAMA} norm=layernorm_nobias placement=parallel model.tie_embeddings=true model.qk_norm=head",
        config={"logit_scale": 1.0, "use_qk_norm": True},
        model_weights=TIED_ENDS,
        block_weights=NEIGHBOURS_ATTN
        | GATED
        | {
            "input_layernorm": "wiring.norm",
            "self_attn.q_norm": for_each_head(Q_NORM),
            "self_attn.k_norm": for_each_head(K_NORM),
        },
    ),
    Architecture(
        name="StableLM 2 12B",
        transformers_class="StableLmForCausalLM",
        overrides=f"{LLAMA} norm=layernorm placement=parallel model.qk_norm=head",
        config={"layer_norm_eps": 1e-5, "qk_layernorm": True, "use_parallel_residual": True},
        model_weights=LLAMA_ENDS,
        # A gain for each head, which is the same one here.
        block_weights=LLAMA_ATTN
        | GATED
        | {"input_layernorm": "wiring.norm"}
        | {f"self_attn.{s}_layernorm.norms.{head}": f"attn.qk_norms.{s}" for s in "qk" for head in range(HEADS)},
        zero_in_normlab=("qk_norms.q.affine.bias", "qk_norms.k.affine.bias"),
    ),
    Architecture(
        name="Phi, its option qk_layernorm",
        transformers_class="PhiForCausalLM",
        overrides=f"{ROTARY_GELU} model.bias=true norm=layernorm placement=parallel model.qk_norm=head",
        config=TANH | {"qk_layernorm": True},
        model_weights={"model.embed_tokens": "embed.tokens", "model.final_layernorm": "head.close", "lm_head": "head"},
        block_weights=QKV_PROJ
        | {
            "input_layernorm": "wiring.norm",
            "self_attn.q_layernorm": Q_NORM,
            "self_attn.k_layernorm": K_NORM,
            "self_attn.dense": "attn.out",
            "mlp.fc1": "mlp.up",
            "mlp.fc2": "mlp.down",
        },
        zero_in_transformers=("lm_head.bias",),
    ),
    # parallel_two_norms
    Architecture(
        name="GPT-NeoX",
        transformers_class="GPTNeoXForCausalLM",
        overrides=f"{ROTARY_GELU} model.bias=true norm=layernorm placement=parallel_two_norms",
        config=TANH,
        block_prefix="gpt_neox.layers.{}.",
        model_weights={
            "gpt_neox.embed_in": "embed.tokens",
            "gpt_neox.final_layer_norm": "head.close",
            "lm_head": "head",
        },
        block_weights=NEOX_MLP
        | {
            "input_layernorm": "wiring.attn_norm",
            "post_attention_layernorm": "wiring.mlp_norm",
            "attention.query_key_value": by_head(*QKV),
            "attention.dense": "attn.out",
        },
    ),
    Architecture(
        name="Falcon 40B",
        transformers_class="FalconForCausalLM",
        overrides=f"{ROTARY_GELU} norm=layernorm placement=parallel_two_norms model.tie_embeddings=true",
        config={"new_decoder_architecture": True, "num_kv_heads": HEADS, "activation": "gelu_pytorch_tanh"},
        block_prefix="transformer.h.{}.",
        model_weights={"transformer.word_embeddings": "embed.tokens", "transformer.ln_f": "head.close"},
        block_weights=NEOX_MLP
        | {
            "ln_attn": "wiring.attn_norm",
            "ln_mlp": "wiring.mlp_norm",
            "self_attention.query_key_value": by_head(*QKV),
            "self_attention.dense": "attn.out",
        },
    ),
]
