"""Decoders whose block is a recipe of conf/recipe: each row has the recipe, and the sizes of the test.

The recipes name what they leave out. Where that is in every model of the class, the row replaces it:

- Muse-Glimmer: all layers rotate, and none has a window.
- A.X-K2: attention is that of Llama, on rotary angles of A.X-K2; its second layer has one expert, and no shared one.
- gpt-oss: the sinks are minus infinity; one expert, without its limits, with sigmoid(x), and with a bias that is less
  by the 1 that it adds.
- Qwen3.8-Flash-Next: all layers have its attention, whose indexer selects every token; one expert, without the shared
  one.
- Hy4: all layers are dense; its attention has one head, whose latents are the input itself, without norms; its indexer
  selects every token, and the sinks are minus infinity.
- ZAYA1: weights of its convolutions that undo what queries and keys add to each other, the same temperature in all
  heads, no values from the token before; one expert beside the one that does nothing, with a weight of 1/2; a scale of
  1 and no shift of the embeddings.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention

from support.architectures.architecture import (
    DEPTH,
    FULL_ATTENTION,
    GATED,
    GEMMA,
    GEMMA_PERI,
    HEAD_WIDTH,
    HEADS,
    IN_ATTN,
    IN_MLP,
    LLAMA,
    LLAMA_ATTN,
    LLAMA_ENDS,
    LLAMA_PRE,
    LLAMA_QK,
    ONE_EXPERT,
    ONE_EXPERT_MLP,
    OUTPUTS,
    ROTATION,
    ROTATION_BY_LAYER,
    TIED_ENDS,
    WIDTH,
    Architecture,
    Combined,
    by_head,
    halves_exchanged,
    joined,
    one_expert,
    times,
)


def recipe_of(row: Architecture) -> str:
    """Return the name of the recipe that a row has."""
    (name,) = [text.removeprefix("recipe=") for text in row.overrides.split() if text.startswith("recipe=")]
    return name


def muse_glimmer_of_text(kind: Any, options: dict[str, Any]) -> nn.Module:
    """Return the whole model without the parts that read images: only its class has the head."""
    images = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}
    config = kind.config_class(text_config=options, vision_config=images, out_hidden_size=8, projector_hidden_size=8)
    model = kind(config)
    for name in ("vision_tower", "vision_adapter", "vision_projection"):
        setattr(model.model, name, nn.Identity())
    return model


def attention_of_llama(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, layer in enumerate(model.model.layers):
        layer.self_attn = LlamaAttention(model.config, index)


def without_sinks(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        sinks = torch.full_like(layer.self_attn.sinks, float("-inf"))
        del layer.self_attn.sinks
        layer.self_attn.register_buffer("sinks", sinks)


def in_turn(gate: Tensor, up: Tensor) -> Tensor:
    """Return the weights or the biases of both inputs of one expert of gpt-oss, channel by channel in turn."""
    return torch.stack([gate.mT if gate.dim() == 2 else gate, up.mT if up.dim() == 2 else up], -1).flatten(-2)[None]


def without_latents_and_sinks(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let queries, keys and values be linear in the input of Hy4's attention."""
    for layer in model.model.layers:
        for name in ("q_a_proj", "q_a_layernorm", "kv_a_layernorm"):
            setattr(layer.self_attn, name, nn.Identity())
    without_sinks(model, monkeypatch)


def rotated_last(weight_KD: Tensor) -> Tensor:
    """Return the weight of one head with the channels that rotate at the end, as in latent attention."""
    return weight_KD.roll(-HY4_ROTATED, 0)


def with_latent(key_KD: Tensor) -> Tensor:
    """Return the first matrix of Hy4's keys and values, with the input as the latent, and with its rotated keys."""
    return torch.cat([torch.eye(WIDTH, dtype=key_KD.dtype), key_KD[:HY4_ROTATED]])


def from_latent(key_KD: Tensor, value_KD: Tensor) -> Tensor:
    """Return the second matrix of Hy4's keys and values: the keys that do not rotate, and the values."""
    return torch.cat([key_KD[HY4_ROTATED:], value_KD])


def all_values_of_the_token(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all heads of ZAYA1 have values of the token itself, where half of them have those of the token before."""
    for layer in model.model.layers:
        layer.self_attn.qkv_proj.v_proj_current = nn.Linear(WIDTH, WIDTH, bias=False)
        delayed: Any = nn.Identity()
        delayed.forward = lambda x_BTD: x_BTD[..., :0]
        layer.self_attn.qkv_proj.v_proj_delayed = delayed


def last_step(weight: Tensor) -> Tensor:
    """Return the kernel, of two steps, of ZAYA1's convolutions that multiplies the last step by a weight."""
    return torch.stack([torch.zeros_like(weight), weight], -1)


def before_the_sums(own_HD: Tensor, other_HD: Tensor) -> Tensor:
    """Return the weight of ZAYA1's queries or keys.

    With half of the identity in the convolution its queries are q + k / 2 and its keys k + q / 2, which this undoes.
    """
    return (own_HD - other_HD / 2) * 4 / 3


MUSE = "model.language_model."
OUTPUT_FACTOR = (256 / WIDTH) ** 0.5
AXK2_DENSE, AXK2_MOE = "model.layers.0.", "model.layers.1."
AXK2 = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": HEAD_WIDTH,
    "qk_nope_head_dim": HEAD_WIDTH,
    "v_head_dim": HEAD_WIDTH,
    "mlp_layer_types": ["dense", "sparse"],
    "moe_intermediate_size": 96,
    "n_routed_experts": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "routed_scaling_factor": 1.0,
    "experts_implementation": "eager",
}
# The class shares eps among all norms; nanochat's own code has the machine epsilon of float32.
NANOCHAT = {"final_logit_softcapping": 15.0, "rms_norm_eps": 2.0**-23}
GEMMA_4 = {
    "global_head_dim": HEAD_WIDTH, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 1,
    "num_kv_shared_layers": 0,
}  # fmt: skip
"""Without the second embedding of its smallest models."""
QWEN_HEADS = 2
"""Of which a quarter rotates: of four heads that is one pair of channels, whose angle no base changes."""
QWEN = {
    "layer_types": ["indexed_attention"] * DEPTH,
    "head_dim": WIDTH // QWEN_HEADS,
    "hc_lowrank": WIDTH // 8,
    "rope_parameters": ROTATION | {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 20,
    "indexer_compress_ratio": 4,
}


def gated_mean(theirs: str, ours: str) -> dict[str, str | Combined]:
    """Return the names of a gated mean of four streams, whose gains are one vector in Qwen3.8-Flash-Next."""
    return {
        f"{theirs}.hc_norm": joined(*(f"{ours}.stream_norms.{stream}" for stream in range(4))),
        f"{theirs}.input_mix_weight_down": f"{ours}.down",
        f"{theirs}.input_mix_weight_up": f"{ours}.up",
    }


HY4_ROTATED = WIDTH // 4
"""Of its one head."""
HY4 = {
    "rms_norm_eps": 1e-5,
    "rope_parameters": ROTATION | {"rope_theta": 1e7},
    "mlp_layer_types": ["dense"] * DEPTH,
    "q_lora_rank": WIDTH,
    "kv_lora_rank": WIDTH,
    "qk_rope_head_dim": HY4_ROTATED,
    "qk_nope_head_dim": WIDTH - HY4_ROTATED,
    "v_head_dim": WIDTH,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "attn_implementation": "eager",
}
ZAYA_ROTATION = ROTATION | {"rope_theta": 5e6, "partial_rotary_factor": 0.5}
ZAYA = {
    "rms_norm_eps": 1e-5,
    "head_dim": HEAD_WIDTH,
    "rope_parameters": {"hybrid": ZAYA_ROTATION, "hybrid_sliding": ZAYA_ROTATION},
    "moe_intermediate_size": 96,
    "num_experts": 1,
    "router_hidden_size": 8,
    "experts_implementation": "eager",
}
ZAYA_SUMS = {
    f"post_{theirs}_residual_scale.{term}": f"wiring.{ours}.{own}"
    for theirs, ours in (("attention", "attn"), ("mlp", "mlp"))
    for term, own in {
        "residual_bias": "skip_bias",
        "residual_scale": "skip_scale",
        "hidden_states_bias": "branch_bias",
        "hidden_states_scale": "branch_scale",
    }.items()
}
OLMO_3_ROTATION = ROTATION | {"rope_theta": 500000.0}

RECIPES = [
    Architecture(
        name="Muse-Glimmer",
        transformers_class="MuseGlimmerForConditionalGeneration",
        overrides=f"{LLAMA} recipe=muse_glimmer",
        config=FULL_ATTENTION
        | {
            "head_dim": HEAD_WIDTH,
            "rms_norm_eps": 1e-5,
            "layer_rope_theta": [10000.0] * DEPTH,
            "output_multiplier": OUTPUT_FACTOR,
        },
        block_prefix=f"{MUSE}layers.{{}}.",
        model_weights={
            f"{MUSE}embed_tokens": "embed.tokens",
            f"{MUSE}norm": "head.close",
            "lm_head": times(1 / OUTPUT_FACTOR, "head"),
        },
        block_weights=LLAMA_ATTN | GATED | GEMMA_PERI | {"self_attn.gate_proj": "attn.gate"},
        build=muse_glimmer_of_text,
    ),
    Architecture(
        name="A.X-K2, with attention of Llama",
        transformers_class="AXK2ForCausalLM",
        overrides=f"{LLAMA} recipe=axk2",
        config=AXK2,
        model_weights=LLAMA_ENDS
        | {
            f"{AXK2_DENSE}mlp.gate_proj": "blocks.0.mlp.gate",
            f"{AXK2_DENSE}mlp.up_proj": "blocks.0.mlp.up",
            f"{AXK2_DENSE}mlp.down_proj": "blocks.0.mlp.down",
            f"{AXK2_DENSE}post_attention_layernorm": f"blocks.0.{IN_MLP}",
            f"{AXK2_MOE}mlp.experts.gate_up_proj": one_expert("blocks.1.mlp.gate", "blocks.1.mlp.up"),
            f"{AXK2_MOE}mlp.experts.down_proj": one_expert("blocks.1.mlp.down"),
            f"{AXK2_MOE}post_attention_layernorm.norm": f"blocks.1.{IN_MLP}",
            f"{AXK2_MOE}post_attention_layernorm.mlp.fc1": f"blocks.1.{IN_MLP}.down",
            f"{AXK2_MOE}post_attention_layernorm.mlp.fc2": f"blocks.1.{IN_MLP}.up",
        },
        block_weights=LLAMA_ATTN
        | {
            "input_layernorm.norm": IN_ATTN,
            "input_layernorm.mlp.fc1": f"{IN_ATTN}.down",
            "input_layernorm.mlp.fc2": f"{IN_ATTN}.up",
        },
        # Its one expert is always chosen, with a weight of 1.
        zero_in_transformers=("mlp.gate.weight", "mlp.shared_experts"),
        patch=attention_of_llama,
    ),
    Architecture(
        name="Gemma 4",
        transformers_class="Gemma4ForCausalLM",
        # The factor of the block on the stream is a buffer of 1.
        overrides=f"{LLAMA} recipe=gemma4",
        config=GEMMA | FULL_ATTENTION | ROTATION_BY_LAYER | GEMMA_4,
        model_weights=TIED_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_QK | GEMMA_PERI,
    ),
    Architecture(
        name="OLMo 3",
        transformers_class="Olmo3ForCausalLM",
        overrides=f"{LLAMA} recipe=olmo3",
        config=FULL_ATTENTION
        | {
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"full_attention": OLMO_3_ROTATION, "sliding_attention": OLMO_3_ROTATION},
        },
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_QK | OUTPUTS,
    ),
    Architecture(
        name="gpt-oss, without sinks",
        transformers_class="GptOssForCausalLM",
        overrides=f"{LLAMA} recipe=gpt_oss",
        config=FULL_ATTENTION
        | ONE_EXPERT
        | {
            "head_dim": HEAD_WIDTH,
            "rms_norm_eps": 1e-5,
            "rope_parameters": ROTATION | {"rope_theta": 150000.0},
            "swiglu_alpha": 1.0,
            "swiglu_limit": 1e9,
            "attn_implementation": "eager",
        },
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN
        | LLAMA_PRE
        | {
            "mlp.experts.gate_up_proj": Combined(in_turn, ("mlp.gate.weight", "mlp.up.weight")),
            "mlp.experts.gate_up_proj_bias": Combined(
                lambda gate_F, up_F: in_turn(gate_F, up_F - 1), ("mlp.gate.bias", "mlp.up.bias")
            ),
            "mlp.experts.down_proj": Combined(lambda down_DF: down_DF.mT[None], ("mlp.down.weight",)),
            "mlp.experts.down_proj_bias": Combined(lambda bias_D: bias_D[None], ("mlp.down.bias",)),
        },
        zero_in_transformers=("mlp.router.",),
        patch=without_sinks,
    ),
    Architecture(
        name="nanochat",
        transformers_class="NanoChatForCausalLM",
        overrides=f"{LLAMA} recipe=nanochat",
        config=NANOCHAT,
        model_weights={"model.embed_tokens": "embed.tokens", "lm_head": "head"},
        block_weights=LLAMA_ATTN
        | {
            "self_attn.q_proj": halves_exchanged("attn.q"),
            "self_attn.k_proj": halves_exchanged("attn.k"),
            "mlp.fc1": "mlp.up",
            "mlp.fc2": "mlp.down",
        },
    ),
    Architecture(
        name="Qwen3.8-Flash-Next",
        transformers_class="Qwen4ExpForCausalLM",
        overrides=f"{LLAMA} recipe=qwen3_8_flash model.heads={QWEN_HEADS}",
        config=ONE_EXPERT | QWEN,
        model_weights={
            "model.embed_tokens": "embed.tokens",
            "lm_head": "head",
            **gated_mean("model.hyper_connection_mixer", "head.close"),
        },
        block_weights=LLAMA_ATTN
        | {"self_attn.q_proj": by_head("attn.q", "attn.gate", heads=QWEN_HEADS)}
        | LLAMA_QK
        | ONE_EXPERT_MLP
        | gated_mean("attn_hyper_connection", "wiring.attn")
        | gated_mean("mlp_hyper_connection", "wiring.mlp")
        | {
            "attn_hyper_connection.block_inject_weight": "wiring.attn.inject",
            "mlp_hyper_connection.block_inject_weight": "wiring.mlp.inject",
        },
        zero_in_transformers=("mlp.gate.weight", "mlp.shared_expert", "self_attn.indexer"),
        least_logits=0.6,
    ),
    Architecture(
        name="Hy4, with one head and without latents and sinks",
        transformers_class="HYV4ForCausalLM",
        overrides=f"{LLAMA} recipe=hy4 model.heads=1",
        config=HY4,
        model_weights={
            "model.embed_tokens": "embed.tokens",
            "lm_head": "head",
            "model.norm": "head.close.norm",
            "model.hc_head.hc_fn": "head.close.fn",
            "model.hc_head.hc_base": "head.close.base",
            "model.hc_head.hc_scale": "head.close.scale",
        },
        block_weights=GATED
        | {
            "self_attn.q_b_proj": Combined(rotated_last, ("attn.q",)),
            "self_attn.kv_a_proj_with_mqa": Combined(with_latent, ("attn.k",)),
            "self_attn.kv_b_proj": Combined(from_latent, ("attn.k", "attn.v")),
            "self_attn.gate_proj": "attn.gate",
            "self_attn.o_proj": "attn.out",
            "input_layernorm": "wiring.attn.norm",
            "post_attention_layernorm": "wiring.mlp.norm",
            "attn_hc.fn": "wiring.attn.fn",
            "attn_hc.base": "wiring.attn.base",
            "attn_hc.scale": "wiring.attn.scale",
            "ffn_hc.fn": "wiring.mlp.fn",
            "ffn_hc.base": "wiring.mlp.base",
            "ffn_hc.scale": "wiring.mlp.scale",
        },
        zero_in_transformers=("self_attn.indexer",),
        patch=without_latents_and_sinks,
    ),
    Architecture(
        name="ZAYA1",
        transformers_class="ZayaForCausalLM",
        overrides=f"{LLAMA} recipe=zaya1",
        config=ZAYA,
        model_weights=TIED_ENDS
        | {"model.input_hidden_states_scale": Combined(lambda gain_D: torch.ones_like(gain_D), ("head.close",))},
        block_weights=LLAMA_PRE
        | ZAYA_SUMS
        | {
            "self_attn.qkv_proj.q_proj": Combined(before_the_sums, ("attn.q", "attn.k")),
            "self_attn.qkv_proj.k_proj": Combined(before_the_sums, ("attn.k", "attn.q")),
            "self_attn.qkv_proj.v_proj_current": "attn.v",
            "self_attn.qkv_proj.conv_qk_depthwise": Combined(
                lambda query_HD: last_step(torch.ones(2 * WIDTH, 1, dtype=query_HD.dtype)), ("attn.q",)
            ),
            "self_attn.qkv_proj.conv_qk_grouped": Combined(
                lambda query_HD: last_step(torch.eye(HEAD_WIDTH, dtype=query_HD.dtype).repeat(2 * HEADS, 1) / 2),
                ("attn.q",),
            ),
            "self_attn.qk_norm.temp": Combined(
                lambda radius: (radius / HEAD_WIDTH**0.5).expand(HEADS), ("attn.qk_norms.k.radius",)
            ),
            "self_attn.o_proj": "attn.out",
            "mlp.experts.gate_up_proj": one_expert("mlp.gate", "mlp.up"),
            "mlp.experts.down_proj": Combined(lambda down_DF: 2 * down_DF[None], ("mlp.down",)),
        },
        zero_in_transformers=(
            "model.input_hidden_states_bias",
            "conv_qk_depthwise.bias",
            "conv_qk_grouped.bias",
            "mlp.gate.",
        ),
        patch=all_values_of_the_token,
    ),
]
