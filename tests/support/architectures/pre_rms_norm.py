"""`pre` with RMS norm."""

from typing import Any

import pytest
from torch import Tensor, nn

from support.architectures.architecture import (
    DEPTH,
    GATED,
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
    QKV,
    ROTARY_GELU,
    TANH,
    UNGATED,
    WIDTH,
    Architecture,
    joined,
    transposed,
)
from support.transformers_models import CONTEXT


def resformer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the values of each layer by their mean with those of the first, as Zcchill/Value-Residual-Learning."""
    first: list[Tensor] = []

    def record(module: nn.Module, inputs: object, values: Tensor) -> None:
        first[:] = [values]

    model.model.layers[0].self_attn.v_proj.register_forward_hook(record)
    for layer in model.model.layers[1:]:
        layer.self_attn.v_proj.register_forward_hook(lambda *args: 0.5 * first[0] + 0.5 * args[-1])


PRE_RMS_NORM = [
    Architecture(
        name="Llama",
        transformers_class="LlamaForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="ResFormer",
        transformers_class="LlamaForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.value_residual=fixed",
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_PRE,
        patch=resformer,
    ),
    Architecture(
        name="Granite",
        transformers_class="GraniteForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre placement.branch_factor=0.22",
        config={"residual_multiplier": 0.22, "attention_multiplier": HEAD_WIDTH**-0.5},
        model_weights=LLAMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="Helium",
        transformers_class="HeliumForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre norm.eps=1e-8",
        config={"head_dim": HEAD_WIDTH, "rms_norm_eps": 1e-8},
        model_weights=LLAMA_ENDS,
        block_weights=NEIGHBOURS_ATTN | GATED | LLAMA_PRE,
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
]
