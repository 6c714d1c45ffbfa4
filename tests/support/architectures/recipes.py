"""Decoders whose block is a recipe of conf/recipe: each row has the recipe, and the sizes of the test.

The recipes name what they leave out. Where that is in every model of the class, the row replaces it:

- Muse-Glimmer: all layers rotate, and none has a window.
- A.X-K2: attention is that of Llama, on rotary angles of A.X-K2; its second layer has one expert, and no shared one.
- gpt-oss: the sinks are minus infinity; one expert, without its limits, with sigmoid(x), and with a bias that is less
  by the 1 that it adds.
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
    IN_ATTN,
    IN_MLP,
    LLAMA,
    LLAMA_ATTN,
    LLAMA_ENDS,
    LLAMA_PRE,
    LLAMA_QK,
    ONE_EXPERT,
    OUTPUTS,
    ROTATION,
    ROTATION_BY_LAYER,
    TIED_ENDS,
    WIDTH,
    Architecture,
    Combined,
    halves_exchanged,
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
        # Its scores are not divided by sqrt(K); the factor of the block on the stream is a buffer of 1.
        overrides=f"{LLAMA} recipe=gemma4 model.qk_scale={HEAD_WIDTH**0.25} model.embed_scale={WIDTH**0.5}",
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
]
