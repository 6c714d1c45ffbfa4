"""`pre` with RMS norm."""

from __future__ import annotations

from support.architectures.architecture import (
    GATED,
    GEMMA_ENDS,
    HEAD_WIDTH,
    LLAMA,
    LLAMA_ATTN,
    LLAMA_ENDS,
    LLAMA_PRE,
    NEIGHBOURS_ATTN,
    ROTARY_GELU,
    TANH,
    UNGATED,
    Architecture,
)

PRE_RMS_NORM = [
    Architecture(
        name="Llama",
        transformers_class="LlamaForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
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
        name="Gemma",
        transformers_class="GemmaForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_gemma placement=pre",
        config={"head_dim": HEAD_WIDTH, "hidden_act": "silu"},
        model_weights=GEMMA_ENDS,
        block_weights=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
]
