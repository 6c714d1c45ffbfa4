"""`pre` with layer norm."""

from typing import Any

import pytest
import torch
from torch import nn

from support.architectures.architecture import (
    FAIRSEQ_ATTN,
    FAIRSEQ_MLP,
    FAIRSEQ_PRE,
    GATED,
    GPT2,
    GPT2_ENDS,
    HEAD_WIDTH,
    IN_ATTN,
    IN_MLP,
    LLAMA,
    LLAMA_ATTN,
    LLAMA_ENDS,
    LLAMA_PRE,
    NEOX_MLP,
    NO_POSITIONS,
    QKV,
    ROTARY_GELU,
    ROTARY_RELU2,
    ROTATION,
    TANH,
    TANH_FUNCTION,
    UNGATED,
    WIDTH,
    Architecture,
    after_two_rows,
    by_head,
    joined,
    times,
    transposed,
)
from support.transformers_models import CONTEXT


def mpt_without_alibi_and_exact_gelu(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.transformer.build_mpt_alibi_tensor = lambda heads, steps, **_: torch.zeros(heads, 1, steps)
    for block in model.transformer.blocks:
        block.ffn.act = nn.GELU(approximate="tanh")


def ctrl_without_sinusoids_and_relu(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.transformer.pos_encoding.zero_()
    for block in model.transformer.h:
        block.ffn[1] = nn.GELU(approximate="tanh")


PRE_LAYER_NORM = [
    Architecture(
        name="OLMo",
        transformers_class="OlmoForCausalLM",
        overrides=f"{LLAMA} norm=layernorm_olmo1 placement=pre",
        model_weights={"model.embed_tokens": "embed.tokens", "lm_head": "head"},
        block_weights=LLAMA_ATTN | GATED,
    ),
    Architecture(
        name="Nemotron",
        transformers_class="NemotronForCausalLM",
        overrides=f"{ROTARY_RELU2} model.rope_fraction=0.5 norm=layernorm norm.unit_offset=true placement=pre",
        config={
            "hidden_act": "relu2",
            "head_dim": HEAD_WIDTH,
            "norm_eps": 1e-5,
            "rope_parameters": ROTATION | {"partial_rotary_factor": 0.5},
        },
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | UNGATED | LLAMA_PRE,
    ),
    Architecture(
        name="StarCoder2",
        transformers_class="Starcoder2ForCausalLM",
        overrides=f"{ROTARY_GELU} model.bias=true norm=layernorm placement=pre",
        config=TANH | {"norm_epsilon": 1e-5},
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | LLAMA_PRE | {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"},
    ),
    Architecture(
        name="StableLM",
        transformers_class="StableLmForCausalLM",
        overrides=f"{LLAMA} norm=layernorm placement=pre",
        config={"layer_norm_eps": 1e-5},
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="GPT-2",
        transformers_class="GPT2LMHeadModel",
        overrides=f"{GPT2} norm=layernorm_gpt2 placement=pre",
        block_prefix="transformer.h.{}.",
        model_weights=GPT2_ENDS | {"transformer.wpe": "embed.positions"},
        block_weights={
            "ln_1": IN_ATTN,
            "ln_2": IN_MLP,
            "attn.c_attn": transposed(joined(*QKV)),
            "attn.c_proj": transposed("attn.out"),
            "mlp.c_fc": transposed("mlp.up"),
            "mlp.c_proj": transposed("mlp.down"),
        },
    ),
    Architecture(
        name="OPT",
        transformers_class="OPTForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=pre",
        config=TANH_FUNCTION | {"ffn_dim": 4 * WIDTH, "word_embed_proj_dim": WIDTH},
        block_prefix="model.decoder.layers.{}.",
        model_weights={
            "model.decoder.embed_tokens": "embed.tokens",
            "model.decoder.embed_positions": after_two_rows("embed.positions"),
            "model.decoder.final_layer_norm": "head.close",
        },
        block_weights=FAIRSEQ_ATTN | FAIRSEQ_MLP | FAIRSEQ_PRE,
    ),
    Architecture(
        name="CTRL",
        transformers_class="CTRLLMHeadModel",
        overrides=f"{GPT2} norm=layernorm norm.eps=1e-6 placement=pre model.tie_embeddings=false",
        config={"dff": 4 * WIDTH},
        block_prefix="transformer.h.{}.",
        model_weights={
            "transformer.w": times(WIDTH**-0.5, "embed.tokens"),
            "transformer.layernorm": "head.close",
            "lm_head": "head",
        },
        block_weights={
            "layernorm1": IN_ATTN,
            "layernorm2": IN_MLP,
            "multi_head_attention.Wq": "attn.q",
            "multi_head_attention.Wk": "attn.k",
            "multi_head_attention.Wv": "attn.v",
            "multi_head_attention.dense": "attn.out",
            "ffn.0": "mlp.up",
            "ffn.2": "mlp.down",
        },
        zero_in_transformers=("lm_head.bias",),
        zero_in_normlab=NO_POSITIONS,
        patch=ctrl_without_sinusoids_and_relu,
    ),
    Architecture(
        name="MPT",
        transformers_class="MptForCausalLM",
        overrides=f"{GPT2} norm=layernorm_nobias placement=pre model.bias=false",
        config={"max_seq_len": CONTEXT},
        block_prefix="transformer.blocks.{}.",
        model_weights={"transformer.wte": "embed.tokens", "transformer.norm_f": "head.close"},
        block_weights={
            "norm_1": IN_ATTN,
            "norm_2": IN_MLP,
            "attn.Wqkv": joined(*QKV),
            "attn.out_proj": "attn.out",
            "ffn.up_proj": "mlp.up",
            "ffn.down_proj": "mlp.down",
        },
        zero_in_normlab=NO_POSITIONS,
        patch=mpt_without_alibi_and_exact_gelu,
    ),
    Architecture(
        name="GPT-NeoX Japanese",
        transformers_class="GPTNeoXJapaneseForCausalLM",
        overrides=f"{ROTARY_GELU} norm=layernorm placement=pre model.tie_embeddings=true",
        config=TANH,
        block_prefix="gpt_neox_japanese.layers.{}.",
        model_weights={
            "gpt_neox_japanese.embed_in": "embed.tokens",
            "gpt_neox_japanese.final_layer_norm": "head.close",
        },
        block_weights=NEOX_MLP
        | LLAMA_PRE
        | {"attention.query_key_value": by_head(*QKV), "attention.dense": "attn.out"},
        zero_in_transformers=("dense_bias",),
    ),
]
