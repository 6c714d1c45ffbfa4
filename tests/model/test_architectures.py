"""Our model against every norm scheme of transformers' decoders that the catalogue has.

Each row of ARCHITECTURES is one architecture: with the same random weights, gains and biases, its own code and ours
must give the same logits, and the same gradient of the loss with respect to each of our parameters, in float64. A row
names the entries of the catalogue that the architecture is (`overrides`) and where its weights are (`ends`, `inside`).

- pre: Mistral, Ministral (and 3), Mixtral, Qwen2, Phi-3, Granite, SmolLM3, Seed-OSS, Helium, ERNIE 4.5, GLM, CWM,
  Arcee with RMS norm, Gemma and VaultGemma with 1 + gain; OLMo, Nemotron, StarCoder 1 and 2, Jais 2, StableLM, DBRX,
  GPT-Neo, GPT-NeoX Japanese, OPT, BioGPT, XGLM, CTRL, MPT, Blenderbot, Pegasus with layer norm. With a norm on the
  embeddings: BLOOM, mBART, nanochat. With one on queries and keys: nanochat, Apertus, Qwen3 with experts, Qwen3-Next,
  Qwen3.5, GLM-4.5, dots.llm1, EXAONE with experts, HY3, Mellum, LFM2, Llama 4, Persimmon (each head); OLMoE, MiniMax
  M2 (full).
- post: GPT, OPT 350M, Marian; with a norm on the embeddings BART, PLBART, MVP, TrOCR, XLM, BERT.
- res_post: OLMo 3, FlexOlmo (queries and keys full), EXAONE 4 (each head).
- peri, which is sandwich: Gemma 2, GLM-4, HyperCLOVA X; with a norm on queries and keys Gemma 3, AFMoE, Kolibri 1.
- sub_ln: BitNet b1.58, Kosmos-2.
- parallel: GPT-J, CodeGen, Falcon 7B, Phi, Command R and R7B; with a norm on queries and keys Command R+,
  StableLM 2 12B, and Phi with its option.
- parallel_two_norms: GPT-NeoX, Falcon 40B.

GPT-2, Llama, Qwen3 and OLMo 2 are in test_transformers.py.

What has nothing to do with norms and is not in our model is set aside, in a row's `config` or `patch`: other
activations, grouped keys and values, attention windows, ALiBi, fixed sinusoids, rotation of a part of a head, caps and
factors on the logits, all but one of many experts. What can be folded into the weights is: a factor on the embeddings,
a factor missing under the softmax, the order of the channels that rotate together. Their biases that we lack are zero
(`zero`), and so are ours that they lack (`lacks`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.func import functional_call
from transformers.models.bloom import modeling_bloom
from transformers.models.kosmos2.modeling_kosmos2 import Kosmos2TextForCausalLM

from normlab.config.schema import ModelConfig
from normlab.model.gpt import GPT
from normlab.placements.base import load_all
from support.tolerance import assert_equal, float32_as_float64
from support.transformers_models import CONTEXT, VOCAB, assert_equal_gradients, config_of, randomised

WIDTH, HEADS, DEPTH, STEPS = 32, 4, 2, 17
HEAD_WIDTH = WIDTH // HEADS

TERMS = 128
"""The longest sum, over the hidden channels of the widest MLP."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Made:
    """One of their tensors, made of some of ours: weights of weights and biases of biases."""

    make: Callable[..., Tensor]
    modules: tuple[str, ...]


Weights = Mapping[str, "str | Made"]
"""Their modules (or parameters), each with the module of ours that it is, or how it is made of ours."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    name: str
    theirs: str | type[nn.Module]
    overrides: str
    inside: Weights
    """In each block."""
    ends: Weights
    """In the whole model."""
    block: str = "model.layers.{}."
    config: Mapping[str, Any] = field(default_factory=dict)
    """Their options, over those of `shape_of`."""
    zero: tuple[str, ...] = ()
    """What the names of their parameters have in them that ours have no place for; they are zero."""
    lacks: tuple[str, ...] = ()
    """How the names of our parameters end that theirs have no place for."""
    patch: Callable[[Any, pytest.MonkeyPatch], None] | None = None


# How theirs are made of ours


def joined(*modules: str) -> Made:
    """One on top of the other."""
    return Made(lambda *parts: torch.cat(parts), modules)


def by_head(*modules: str) -> Made:
    """The first head's part of each, then the second's."""
    return Made(lambda *parts: torch.cat([part.unflatten(0, (HEADS, -1)) for part in parts], 1).flatten(0, 1), modules)


def transposed(module: str | Made) -> Made:
    """Conv1D holds a matrix transposed."""
    made = module if isinstance(module, Made) else Made(lambda x: x, (module,))
    return Made(lambda *parts: made.make(*parts).t() if parts[0].dim() == 2 else made.make(*parts), made.modules)


def neighbours(x_K: Tensor) -> Tensor:
    """Channels i and i + K/2 of each head, which rotate together, side by side."""
    heads = x_K.shape[0] // HEAD_WIDTH
    return x_K.unflatten(0, (heads, 2, HEAD_WIDTH // 2)).transpose(1, 2).flatten(0, 2)


def halves_exchanged(module: str) -> Made:
    """The two halves of each head exchanged: what rotates forwards then rotates backwards."""
    return Made(lambda x_K: x_K.unflatten(0, (HEADS, 2, HEAD_WIDTH // 2)).flip(1).flatten(0, 2), (module,))


def rotated_neighbours(module: str) -> Made:
    return Made(neighbours, (module,))


def for_each_head(module: str) -> Made:
    """The same gain for every head, where theirs have one each; channels that rotate together side by side."""
    return Made(lambda gain_K: neighbours(gain_K).expand(HEADS, -1), (module,))


def times(factor: float, module: str) -> Made:
    return Made(lambda x: x * factor, (module,))


def plus_one(norm: str) -> Made:
    """A gain, where ours is 1 + gain."""
    return Made(lambda gain_D: 1 + gain_D, (norm,))


def one_expert(*modules: str) -> Made:
    """A mixture of one expert, which is chosen always."""
    return Made(lambda *parts: torch.cat(parts)[None], modules)


def after_two_rows(module: str) -> Made:
    """OPT's first position is in row 2 of its table."""
    return Made(lambda x_TD: F.pad(x_TD, (0, 0, 2, 0)), (module,))


# Where norms are in our model

IN_ATTN, IN_MLP = "wiring.attn.norms.in", "wiring.mlp.norms.in"
OUT_ATTN, OUT_MLP = "wiring.attn.norms.out", "wiring.mlp.norms.out"
RES_ATTN, RES_MLP = "wiring.attn.norms.res", "wiring.mlp.norms.res"
Q_NORM, K_NORM = "attn.qk_norms.q", "attn.qk_norms.k"

# Names that many share

QKV = ("attn.q", "attn.k", "attn.v")
LLAMA_ENDS = {"model.embed_tokens": "embed.tokens", "model.norm": "head.close", "lm_head": "head"}
TIED_ENDS = {"model.embed_tokens": "embed.tokens", "model.norm": "head.close"}
QKV_PROJ = {f"self_attn.{site}_proj": f"attn.{site}" for site in "qkv"}
LLAMA_ATTN = QKV_PROJ | {"self_attn.o_proj": "attn.out"}
NEIGHBOURS_ATTN = LLAMA_ATTN | {
    "self_attn.q_proj": rotated_neighbours("attn.q"),
    "self_attn.k_proj": rotated_neighbours("attn.k"),
}
# Each head's query, and a gate on its output, which is a half where its weights are zero.
QWEN_GATED_ATTN = {
    "self_attn.q_proj": Made(lambda q: by_head().make(q, torch.zeros_like(q)), ("attn.q",)),
    "self_attn.o_proj": times(2, "attn.out"),
}
UNGATED = {"mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}
GATED = UNGATED | {"mlp.gate_proj": "mlp.gate"}
GATE_AND_UP = {"mlp.gate_up_proj": joined("mlp.gate", "mlp.up"), "mlp.down_proj": "mlp.down"}
LLAMA_PRE = {"input_layernorm": IN_ATTN, "post_attention_layernorm": IN_MLP}
LLAMA_QK = {"self_attn.q_norm": Q_NORM, "self_attn.k_norm": K_NORM}
OUTPUTS = {"post_attention_layernorm": OUT_ATTN, "post_feedforward_layernorm": OUT_MLP}
GEMMA_PERI = OUTPUTS | {"input_layernorm": IN_ATTN, "pre_feedforward_layernorm": IN_MLP}
XLM_BLOCK = {
    "attentions.{}.q_lin": "attn.q",
    "attentions.{}.k_lin": "attn.k",
    "attentions.{}.v_lin": "attn.v",
    "attentions.{}.out_lin": "attn.out",
    "layer_norm1.{}": RES_ATTN,
    "ffns.{}.lin1": "mlp.up",
    "ffns.{}.lin2": "mlp.down",
    "layer_norm2.{}": RES_MLP,
}
ONE_EXPERT_MLP = {
    "mlp.experts.gate_up_proj": one_expert("mlp.gate", "mlp.up"),
    "mlp.experts.down_proj": one_expert("mlp.down"),
}
NEOX_MLP = {"mlp.dense_h_to_4h": "mlp.up", "mlp.dense_4h_to_h": "mlp.down"}
GPT2_ENDS = {"transformer.wte": "embed.tokens", "transformer.ln_f": "head.close"}
FAIRSEQ_MLP = {"fc1": "mlp.up", "fc2": "mlp.down"}
FAIRSEQ_ATTN = QKV_PROJ | {"self_attn.out_proj": "attn.out"}
BART_ENDS = {
    "model.decoder.embed_tokens": "embed.tokens",
    "model.decoder.embed_positions": after_two_rows("embed.positions"),
    "model.decoder.layernorm_embedding": "embed.open",
}
FAIRSEQ_PRE = {"self_attn_layer_norm": IN_ATTN, "final_layer_norm": IN_MLP}
FAIRSEQ_POST = {"self_attn_layer_norm": RES_ATTN, "final_layer_norm": RES_MLP}

LLAMA = "model=llama_nano"
ROTARY_GELU = "model=llama_nano model.mlp=gelu"
GPT2 = "model=gpt2_nano"
NO_POSITIONS = ("embed.positions.weight",)
FULL_ATTENTION = {"layer_types": ["full_attention"] * DEPTH}
SLIDING_ATTENTION = {"layer_types": ["sliding_attention"] * DEPTH, "sliding_window": CONTEXT}
TANH = {"hidden_act": "gelu_pytorch_tanh"}
TANH_FUNCTION = {"activation_function": "gelu_pytorch_tanh"}
ONE_EXPERT = {
    "num_experts": 1,
    "num_local_experts": 1,
    "num_experts_per_tok": 1,
    "experts_implementation": "eager",
}
DENSE = {"head_dim": HEAD_WIDTH, "first_k_dense_replace": DEPTH, "mlp_layer_types": ["dense"] * DEPTH}
# A decoder by itself; what would attend to an encoder is zero.
FAIRSEQ_DECODER = TANH_FUNCTION | {
    "decoder_layers": DEPTH,
    "decoder_attention_heads": HEADS,
    "decoder_ffn_dim": 4 * WIDTH,
    "scale_embedding": False,
}
GEMMA_ENDS = LLAMA_ENDS | {"model.embed_tokens": times(WIDTH**-0.5, "embed.tokens")}
GEMMA = {
    "hidden_activation": "silu",
    "head_dim": HEAD_WIDTH,
    "query_pre_attn_scalar": HEAD_WIDTH,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sliding_window": CONTEXT,
}
ROTATION = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
ROTATION_BY_LAYER = {"rope_parameters": {"full_attention": ROTATION, "sliding_attention": ROTATION}}


# What is excluded explicitly


def without_alibi_of_bloom(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its GELU has sqrt(2 / pi) to eight digits only.
    monkeypatch.setattr(modeling_bloom.BloomGelu, "forward", lambda module, x: F.gelu(x, approximate="tanh"))
    monkeypatch.setattr(modeling_bloom, "_get_alibi_slopes", lambda heads, device: torch.zeros(heads, device=device))


def mpt_without_alibi_and_exact_gelu(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.transformer.build_mpt_alibi_tensor = lambda heads, steps, **_: torch.zeros(heads, 1, steps)
    for block in model.transformer.blocks:
        block.ffn.act = nn.GELU(approximate="tanh")


def ctrl_without_sinusoids_and_relu(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.transformer.pos_encoding.zero_()
    for block in model.transformer.h:
        block.ffn[1] = nn.GELU(approximate="tanh")


def without_sinusoids(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.embed_positions.weights.zero_()


def kosmos_without_sinusoids_and_padding(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its padding must be some token, whose embedding would have no gradient."""
    without_sinusoids(model, monkeypatch)
    model.model.embed_tokens.padding_idx = None


def without_padding(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.decoder.embed_tokens.padding_idx = None


def xlm_without_padding_and_exact_gelu(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.transformer.embeddings.padding_idx = None
    for mlp in model.transformer.ffns:
        mlp.act = nn.GELU(approximate="tanh")


def bert_without_its_head(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT's head has a layer of its own before the logits."""
    model.cls.predictions.transform = nn.Identity()


ARCHITECTURES = [
    # pre
    Architecture(
        name="Mistral",
        theirs="MistralForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        config={"sliding_window": None},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="Qwen2",
        theirs="Qwen2ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE,
        zero=("_proj.bias",),
    ),
    Architecture(
        name="Phi-3",
        theirs="Phi3ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        ends=LLAMA_ENDS,
        inside=GATE_AND_UP | LLAMA_PRE | {"self_attn.qkv_proj": joined(*QKV), "self_attn.o_proj": "attn.out"},
    ),
    Architecture(
        name="Granite",
        theirs="GraniteForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        config={
            "attention_multiplier": HEAD_WIDTH**-0.5,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="SmolLM3",
        theirs="SmolLM3ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        # A one is a layer that rotates.
        config={"no_rope_layers": [1] * DEPTH},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="Seed-OSS",
        theirs="SeedOssForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        config={"attention_bias": False, "head_dim": HEAD_WIDTH},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="Helium",
        theirs="HeliumForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre norm.eps=1e-8",
        config={"head_dim": HEAD_WIDTH, "rms_norm_eps": 1e-8},
        ends=LLAMA_ENDS,
        inside=NEIGHBOURS_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="ERNIE 4.5",
        theirs="Ernie4_5ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        config={"head_dim": HEAD_WIDTH},
        ends=LLAMA_ENDS,
        inside=NEIGHBOURS_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="GLM",
        theirs="GlmForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        config={"head_dim": HEAD_WIDTH, "attention_bias": False},
        ends=LLAMA_ENDS,
        inside=NEIGHBOURS_ATTN | GATE_AND_UP | LLAMA_PRE,
    ),
    Architecture(
        name="Ministral",
        theirs="MinistralForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        config=FULL_ATTENTION | {"head_dim": HEAD_WIDTH, "sliding_window": CONTEXT},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="Ministral 3",
        theirs="Ministral3ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        config={
            "head_dim": HEAD_WIDTH,
            "sliding_window": None,
            "rope_parameters": ROTATION | {"llama_4_scaling_beta": 0.0, "original_max_position_embeddings": CONTEXT},
        },
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="CWM",
        theirs="CwmForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        config=FULL_ATTENTION
        | {"head_dim": HEAD_WIDTH, "bos_token_id": 0, "eos_token_id": 0, "sliding_window": CONTEXT},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="Qwen2 with experts, its dense layers",
        theirs="Qwen2MoeForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        config={"mlp_only_layers": list(range(DEPTH)), "qkv_bias": False},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="ERNIE 4.5 with experts, its dense layers",
        theirs="Ernie4_5_MoeForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        config={"head_dim": HEAD_WIDTH, "moe_layer_start_index": DEPTH},
        ends=LLAMA_ENDS,
        inside=NEIGHBOURS_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="Arcee",
        theirs="ArceeForCausalLM",
        overrides=f"{ROTARY_GELU} norm=rmsnorm_llama placement=pre",
        config=TANH,
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | UNGATED | LLAMA_PRE,
    ),
    Architecture(
        name="Mixtral",
        theirs="MixtralForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre",
        config=ONE_EXPERT,
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | LLAMA_PRE | ONE_EXPERT_MLP,
        zero=("mlp.gate.weight",),
    ),
    Architecture(
        name="DBRX",
        theirs="DbrxForCausalLM",
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
        block="transformer.blocks.{}.",
        ends={"transformer.wte": "embed.tokens", "transformer.norm_f": "head.close", "lm_head": "head"},
        inside={
            "norm_attn_norm.norm_1": IN_ATTN,
            "norm_attn_norm.norm_2": IN_MLP,
            "norm_attn_norm.attn.Wqkv": joined(*QKV),
            "norm_attn_norm.attn.out_proj": "attn.out",
            "ffn.experts.mlp.w1": "mlp.gate",
            "ffn.experts.mlp.v1": "mlp.up",
            "ffn.experts.mlp.w2": transposed("mlp.down"),
        },
        zero=("router.layer",),
    ),
    Architecture(
        name="Gemma",
        theirs="GemmaForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_gemma placement=pre",
        config={"head_dim": HEAD_WIDTH, "hidden_act": "silu"},
        ends=GEMMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="VaultGemma",
        theirs="VaultGemmaForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_gemma placement=pre",
        config=GEMMA,
        ends=GEMMA_ENDS,
        inside=LLAMA_ATTN | GATED | {"input_layernorm": IN_ATTN, "pre_feedforward_layernorm": IN_MLP},
    ),
    Architecture(
        name="OLMo",
        theirs="OlmoForCausalLM",
        overrides=f"{LLAMA} norm=layernorm_olmo1 placement=pre",
        ends={"model.embed_tokens": "embed.tokens", "lm_head": "head"},
        inside=LLAMA_ATTN | GATED,
    ),
    Architecture(
        name="Nemotron",
        theirs="NemotronForCausalLM",
        overrides=f"{ROTARY_GELU} norm=layernorm norm.unit_offset=true placement=pre",
        config=TANH | {"head_dim": HEAD_WIDTH, "norm_eps": 1e-5},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | UNGATED | LLAMA_PRE,
    ),
    Architecture(
        name="StarCoder2",
        theirs="Starcoder2ForCausalLM",
        overrides=f"{ROTARY_GELU} model.bias=true norm=layernorm placement=pre",
        config=TANH | {"norm_epsilon": 1e-5},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | LLAMA_PRE | {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"},
    ),
    Architecture(
        name="Jais 2",
        theirs="Jais2ForCausalLM",
        overrides=f"{ROTARY_GELU} model.bias=true norm=layernorm placement=pre",
        config=TANH | {"layer_norm_eps": 1e-5},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | UNGATED | LLAMA_PRE,
    ),
    Architecture(
        name="StableLM",
        theirs="StableLmForCausalLM",
        overrides=f"{LLAMA} norm=layernorm placement=pre",
        config={"layer_norm_eps": 1e-5},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE,
    ),
    Architecture(
        name="StarCoder (GPT-BigCode)",
        theirs="GPTBigCodeForCausalLM",
        overrides=f"{GPT2} norm=layernorm_gpt2 placement=pre",
        config={"multi_query": False},
        block="transformer.h.{}.",
        ends=GPT2_ENDS | {"transformer.wpe": "embed.positions"},
        inside={
            "ln_1": IN_ATTN,
            "ln_2": IN_MLP,
            "attn.c_attn": by_head(*QKV),
            "attn.c_proj": "attn.out",
            "mlp.c_fc": "mlp.up",
            "mlp.c_proj": "mlp.down",
        },
    ),
    Architecture(
        name="GPT-Neo",
        theirs="GPTNeoForCausalLM",
        overrides=f"{GPT2} norm=layernorm_gpt2 placement=pre",
        config={"attention_types": [[["global"], DEPTH]], "num_layers": DEPTH, "intermediate_size": None},
        block="transformer.h.{}.",
        ends=GPT2_ENDS | {"transformer.wpe": "embed.positions"},
        inside={
            "ln_1": IN_ATTN,
            "ln_2": IN_MLP,
            # It does not divide the products by sqrt(K).
            "attn.attention.q_proj": times(HEAD_WIDTH**-0.5, "attn.q"),
            "attn.attention.k_proj": "attn.k",
            "attn.attention.v_proj": "attn.v",
            "attn.attention.out_proj": "attn.out",
            "mlp.c_fc": "mlp.up",
            "mlp.c_proj": "mlp.down",
        },
        lacks=("attn.q.bias", "attn.k.bias", "attn.v.bias"),
    ),
    Architecture(
        name="OPT",
        theirs="OPTForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=pre",
        config=TANH_FUNCTION | {"ffn_dim": 4 * WIDTH, "word_embed_proj_dim": WIDTH},
        block="model.decoder.layers.{}.",
        ends={
            "model.decoder.embed_tokens": "embed.tokens",
            "model.decoder.embed_positions": after_two_rows("embed.positions"),
            "model.decoder.final_layer_norm": "head.close",
        },
        inside=FAIRSEQ_ATTN | FAIRSEQ_MLP | FAIRSEQ_PRE,
    ),
    Architecture(
        name="BioGPT",
        theirs="BioGptForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=pre",
        # Its final norm has torch's eps, 1e-5, which may differ from that of the others.
        config=TANH | {"scale_embedding": False, "layer_norm_eps": 1e-5},
        block="biogpt.layers.{}.",
        ends={
            "biogpt.embed_tokens": "embed.tokens",
            "biogpt.embed_positions": after_two_rows("embed.positions"),
            "biogpt.layer_norm": "head.close",
        },
        inside=FAIRSEQ_ATTN | FAIRSEQ_MLP | FAIRSEQ_PRE,
    ),
    Architecture(
        name="XGLM",
        theirs="XGLMForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=pre",
        config=TANH_FUNCTION | {"ffn_dim": 4 * WIDTH, "scale_embedding": False},
        ends={"model.embed_tokens": "embed.tokens", "model.layer_norm": "head.close"},
        inside=FAIRSEQ_ATTN | FAIRSEQ_MLP | FAIRSEQ_PRE,
        lacks=NO_POSITIONS,
        patch=without_sinusoids,
    ),
    Architecture(
        name="CTRL",
        theirs="CTRLLMHeadModel",
        overrides=f"{GPT2} norm=layernorm norm.eps=1e-6 placement=pre model.tie_embeddings=false",
        config={"dff": 4 * WIDTH},
        block="transformer.h.{}.",
        ends={
            "transformer.w": times(WIDTH**-0.5, "embed.tokens"),
            "transformer.layernorm": "head.close",
            "lm_head": "head",
        },
        inside={
            "layernorm1": IN_ATTN,
            "layernorm2": IN_MLP,
            "multi_head_attention.Wq": "attn.q",
            "multi_head_attention.Wk": "attn.k",
            "multi_head_attention.Wv": "attn.v",
            "multi_head_attention.dense": "attn.out",
            "ffn.0": "mlp.up",
            "ffn.2": "mlp.down",
        },
        zero=("lm_head.bias",),
        lacks=NO_POSITIONS,
        patch=ctrl_without_sinusoids_and_relu,
    ),
    Architecture(
        name="Blenderbot's decoder",
        theirs="BlenderbotForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=pre",
        config=FAIRSEQ_DECODER,
        block="model.decoder.layers.{}.",
        ends={
            "model.decoder.embed_tokens": "embed.tokens",
            "model.decoder.embed_positions": "embed.positions",
            "model.decoder.layer_norm": "head.close",
        },
        inside=FAIRSEQ_ATTN | FAIRSEQ_MLP | FAIRSEQ_PRE,
        zero=("encoder_attn",),
    ),
    Architecture(
        name="Pegasus's decoder",
        theirs="PegasusForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=pre",
        config=FAIRSEQ_DECODER | {"pad_token_id": 0},
        block="model.decoder.layers.{}.",
        ends={"model.decoder.embed_tokens": "embed.tokens", "model.decoder.layer_norm": "head.close"},
        inside=FAIRSEQ_ATTN | FAIRSEQ_MLP | FAIRSEQ_PRE,
        zero=("encoder_attn", "embed_positions"),
        lacks=NO_POSITIONS,
        patch=without_padding,
    ),
    Architecture(
        name="MPT",
        theirs="MptForCausalLM",
        overrides=f"{GPT2} norm=layernorm_nobias placement=pre model.bias=false",
        config={"max_seq_len": CONTEXT},
        block="transformer.blocks.{}.",
        ends={"transformer.wte": "embed.tokens", "transformer.norm_f": "head.close"},
        inside={
            "norm_1": IN_ATTN,
            "norm_2": IN_MLP,
            "attn.Wqkv": joined(*QKV),
            "attn.out_proj": "attn.out",
            "ffn.up_proj": "mlp.up",
            "ffn.down_proj": "mlp.down",
        },
        lacks=NO_POSITIONS,
        patch=mpt_without_alibi_and_exact_gelu,
    ),
    Architecture(
        name="GPT-NeoX Japanese",
        theirs="GPTNeoXJapaneseForCausalLM",
        overrides=f"{ROTARY_GELU} norm=layernorm placement=pre model.tie_embeddings=true",
        config=TANH,
        block="gpt_neox_japanese.layers.{}.",
        ends={
            "gpt_neox_japanese.embed_in": "embed.tokens",
            "gpt_neox_japanese.final_layer_norm": "head.close",
        },
        inside=NEOX_MLP | LLAMA_PRE | {"attention.query_key_value": by_head(*QKV), "attention.dense": "attn.out"},
        zero=("dense_bias",),
    ),
    # pre, and a norm on the embeddings
    Architecture(
        name="BLOOM",
        theirs="BloomForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=pre placement.embedding_norm=true",
        block="transformer.h.{}.",
        ends={
            "transformer.word_embeddings": "embed.tokens",
            "transformer.word_embeddings_layernorm": "embed.open",
            "transformer.ln_f": "head.close",
        },
        inside=NEOX_MLP
        | LLAMA_PRE
        | {"self_attention.query_key_value": by_head(*QKV), "self_attention.dense": "attn.out"},
        lacks=NO_POSITIONS,
        patch=without_alibi_of_bloom,
    ),
    Architecture(
        name="mBART's decoder",
        theirs="MBartForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=pre placement.embedding_norm=true",
        config=FAIRSEQ_DECODER,
        block="model.decoder.layers.{}.",
        ends=BART_ENDS | {"model.decoder.layer_norm": "head.close"},
        inside=FAIRSEQ_ATTN | FAIRSEQ_MLP | FAIRSEQ_PRE,
        zero=("encoder_attn",),
    ),
    Architecture(
        # Its norm on queries and keys is after the rotation: without a gain it is the same before.
        name="nanochat",
        theirs="NanoChatForCausalLM",
        overrides=f"{ROTARY_GELU} norm=rmsnorm_simple placement=pre placement.embedding_norm=true model.qk_norm=head",
        config=TANH | {"final_logit_softcapping": None},
        ends={"model.embed_tokens": "embed.tokens", "lm_head": "head"},
        inside=LLAMA_ATTN
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
        theirs="ApertusForCausalLM",
        overrides=f"{ROTARY_GELU} norm=rmsnorm_llama placement=pre model.qk_norm=head",
        config=TANH,
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | UNGATED | LLAMA_QK | {"attention_layernorm": IN_ATTN, "feedforward_layernorm": IN_MLP},
    ),
    Architecture(
        name="OLMoE",
        theirs="OlmoeForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.qk_norm=full",
        config=ONE_EXPERT,
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | LLAMA_PRE | LLAMA_QK | ONE_EXPERT_MLP,
        zero=("mlp.gate.weight",),
    ),
    Architecture(
        name="MiniMax M2",
        theirs="MiniMaxM2ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.qk_norm=full",
        config=ONE_EXPERT | {"head_dim": HEAD_WIDTH},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | ONE_EXPERT_MLP | LLAMA_PRE | LLAMA_QK,
        zero=("mlp.gate.weight",),
    ),
    Architecture(
        name="Qwen3 with experts",
        theirs="Qwen3MoeForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_qwen3 placement=pre model.qk_norm=head",
        config=ONE_EXPERT | {"head_dim": HEAD_WIDTH, "moe_intermediate_size": 96},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | ONE_EXPERT_MLP | LLAMA_PRE | LLAMA_QK,
        zero=("mlp.gate.weight",),
    ),
    Architecture(
        name="GLM-4.5, its dense layers",
        theirs="Glm4MoeForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.qk_norm=head",
        config=DENSE | {"use_qk_norm": True},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE | LLAMA_QK,
    ),
    Architecture(
        name="dots.llm1, its dense layers",
        theirs="Dots1ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.qk_norm=head",
        config=DENSE | FULL_ATTENTION,
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE | LLAMA_QK,
    ),
    Architecture(
        name="EXAONE with experts, its dense layers",
        theirs="ExaoneMoeForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.qk_norm=head",
        config=DENSE | SLIDING_ATTENTION,
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE | LLAMA_QK,
    ),
    Architecture(
        name="HY3, its dense layers",
        theirs="HYV3ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.qk_norm=head",
        config=DENSE,
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE | LLAMA_QK,
    ),
    Architecture(
        name="Mellum",
        theirs="MellumForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.qk_norm=head",
        config=ONE_EXPERT | FULL_ATTENTION | ROTATION_BY_LAYER | {"head_dim": HEAD_WIDTH, "moe_intermediate_size": 96},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | ONE_EXPERT_MLP | LLAMA_PRE | LLAMA_QK,
        zero=("mlp.gate.weight",),
    ),
    Architecture(
        # Its full attention alone.
        name="Qwen3.5",
        theirs="Qwen3_5ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_qwen3_next placement=pre model.qk_norm=head",
        config=FULL_ATTENTION
        | {
            "head_dim": HEAD_WIDTH,
            "rope_parameters": ROTATION | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
        },
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE | LLAMA_QK | QWEN_GATED_ATTN,
    ),
    Architecture(
        # Its full attention alone.
        name="Qwen3-Next",
        theirs="Qwen3NextForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_qwen3_next placement=pre model.qk_norm=head",
        config=FULL_ATTENTION | {"head_dim": HEAD_WIDTH, "mlp_only_layers": list(range(DEPTH))},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE | LLAMA_QK | QWEN_GATED_ATTN,
    ),
    Architecture(
        # Its full attention alone. What it calls the norm of the embeddings is before the head.
        name="LFM2",
        theirs="Lfm2ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=pre model.qk_norm=head model.tie_embeddings=true",
        config=FULL_ATTENTION | {"norm_eps": 1e-6, "block_auto_adjust_ff_dim": False},
        ends={"model.embed_tokens": "embed.tokens", "model.embedding_norm": "head.close"},
        inside=FAIRSEQ_ATTN
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
        theirs="Llama4ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_gemma placement=pre model.qk_norm=head",
        config={
            "head_dim": HEAD_WIDTH,
            "intermediate_size_mlp": 96,
            "moe_layers": [],
            "no_rope_layers": [1] * DEPTH,
            "attention_chunk_size": CONTEXT,
        },
        ends=LLAMA_ENDS | {"model.norm": plus_one("head.close")},
        inside=NEIGHBOURS_ATTN
        | {
            "feed_forward.gate_proj": "mlp.gate",
            "feed_forward.up_proj": "mlp.up",
            "feed_forward.down_proj": "mlp.down",
            "input_layernorm": plus_one(IN_ATTN),
            "post_attention_layernorm": plus_one(IN_MLP),
        },
        lacks=("qk_norms.q.affine.gain", "qk_norms.k.affine.gain"),
    ),
    Architecture(
        name="Persimmon",
        theirs="PersimmonForCausalLM",
        overrides=f"{ROTARY_GELU} model.bias=true norm=layernorm placement=pre model.qk_norm=head",
        config=TANH | {"layer_norm_eps": 1e-5},
        ends={"model.embed_tokens": "embed.tokens", "model.final_layernorm": "head.close", "lm_head": "head"},
        inside=NEOX_MLP
        | LLAMA_PRE
        | {
            "self_attn.query_key_value": by_head(*QKV),
            "self_attn.dense": "attn.out",
            "self_attn.q_layernorm": Q_NORM,
            "self_attn.k_layernorm": K_NORM,
        },
    ),
    # post
    Architecture(
        name="GPT",
        theirs="OpenAIGPTLMHeadModel",
        overrides=f"{GPT2} norm=layernorm placement=post",
        block="transformer.h.{}.",
        ends={"transformer.tokens_embed": "embed.tokens", "transformer.positions_embed": "embed.positions"},
        inside={
            "ln_1": RES_ATTN,
            "ln_2": RES_MLP,
            "attn.c_attn": transposed(joined(*QKV)),
            "attn.c_proj": transposed("attn.out"),
            "mlp.c_fc": transposed("mlp.up"),
            "mlp.c_proj": transposed("mlp.down"),
        },
    ),
    Architecture(
        name="OPT 350M",
        theirs="OPTForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=post",
        config=TANH_FUNCTION | {"ffn_dim": 4 * WIDTH, "word_embed_proj_dim": WIDTH, "do_layer_norm_before": False},
        block="model.decoder.layers.{}.",
        ends={
            "model.decoder.embed_tokens": "embed.tokens",
            "model.decoder.embed_positions": after_two_rows("embed.positions"),
        },
        inside=FAIRSEQ_ATTN | FAIRSEQ_MLP | FAIRSEQ_POST,
    ),
    Architecture(
        name="Marian's decoder",
        theirs="MarianForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=post",
        config=FAIRSEQ_DECODER | {"pad_token_id": 0, "decoder_vocab_size": VOCAB, "decoder_start_token_id": 0},
        block="model.decoder.layers.{}.",
        ends={"model.decoder.embed_tokens": "embed.tokens"},
        inside=FAIRSEQ_ATTN | FAIRSEQ_MLP | FAIRSEQ_POST,
        # Its sinusoids are a parameter, if one that does not learn.
        zero=("encoder_attn", "embed_positions"),
        lacks=NO_POSITIONS,
        patch=without_padding,
    ),
    # post, and a norm on the embeddings
    Architecture(
        name="BART's decoder",
        theirs="BartForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=post placement.embedding_norm=true",
        config=FAIRSEQ_DECODER,
        block="model.decoder.layers.{}.",
        ends=BART_ENDS,
        inside=FAIRSEQ_ATTN | FAIRSEQ_MLP | FAIRSEQ_POST,
        zero=("encoder_attn",),
    ),
    Architecture(
        name="PLBART's decoder",
        theirs="PLBartForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=post placement.embedding_norm=true",
        config=FAIRSEQ_DECODER,
        block="model.decoder.layers.{}.",
        ends=BART_ENDS,
        inside=FAIRSEQ_ATTN | FAIRSEQ_MLP | FAIRSEQ_POST,
        zero=("encoder_attn",),
    ),
    Architecture(
        name="MVP's decoder",
        theirs="MvpForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=post placement.embedding_norm=true",
        config=FAIRSEQ_DECODER,
        block="model.decoder.layers.{}.",
        ends=BART_ENDS,
        inside=FAIRSEQ_ATTN | FAIRSEQ_MLP | FAIRSEQ_POST,
        zero=("encoder_attn",),
    ),
    Architecture(
        name="TrOCR's decoder",
        theirs="TrOCRForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=post placement.embedding_norm=true",
        config=FAIRSEQ_DECODER,
        block="model.decoder.layers.{}.",
        ends=BART_ENDS,
        inside=FAIRSEQ_ATTN | FAIRSEQ_MLP | FAIRSEQ_POST,
        zero=("encoder_attn",),
    ),
    Architecture(
        name="XLM as a decoder",
        theirs="XLMWithLMHeadModel",
        overrides=f"{GPT2} norm=layernorm norm.eps=1e-12 placement=post placement.embedding_norm=true",
        config={"causal": True, "pad_index": 0, "use_lang_emb": False, "n_langs": 1},
        # It has a list of each kind of part, and no blocks.
        ends={
            "transformer.embeddings": "embed.tokens",
            "transformer.position_embeddings": "embed.positions",
            "transformer.layer_norm_emb": "embed.open",
        }
        | {
            f"transformer.{name}".format(layer): f"blocks.{layer}.{part}"
            for layer in range(DEPTH)
            for name, part in XLM_BLOCK.items()
        },
        inside={},
        zero=("proj.bias",),
        patch=xlm_without_padding_and_exact_gelu,
    ),
    Architecture(
        name="BERT as a decoder",
        theirs="BertLMHeadModel",
        overrides=f"{GPT2} norm=layernorm_bert placement=post placement.embedding_norm=true",
        config=TANH | {"is_decoder": True},
        block="bert.encoder.layer.{}.",
        ends={
            "bert.embeddings.word_embeddings": "embed.tokens",
            "bert.embeddings.position_embeddings": "embed.positions",
            "bert.embeddings.LayerNorm": "embed.open",
        },
        inside={
            "attention.self.query": "attn.q",
            "attention.self.key": "attn.k",
            "attention.self.value": "attn.v",
            "attention.output.dense": "attn.out",
            "attention.output.LayerNorm": RES_ATTN,
            "intermediate.dense": "mlp.up",
            "output.dense": "mlp.down",
            "output.LayerNorm": RES_MLP,
        },
        zero=("token_type_embeddings.weight", "predictions.bias"),
        patch=bert_without_its_head,
    ),
    # res_post
    Architecture(
        name="OLMo 3",
        theirs="Olmo3ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_olmo2 norm.eps=1e-6 placement=res_post model.qk_norm=full",
        config=FULL_ATTENTION | ROTATION_BY_LAYER,
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_QK | OUTPUTS,
    ),
    Architecture(
        name="EXAONE 4",
        theirs="Exaone4ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=res_post model.qk_norm=head",
        # Without windows, all its layers rotate.
        config=FULL_ATTENTION | {"sliding_window": None},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_QK | OUTPUTS,
    ),
    Architecture(
        name="FlexOlmo",
        theirs="FlexOlmoForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=res_post model.qk_norm=full",
        config=ONE_EXPERT,
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | ONE_EXPERT_MLP | LLAMA_QK | OUTPUTS,
        zero=("mlp.gate.weight",),
    ),
    # peri
    Architecture(
        name="Gemma 2",
        theirs="Gemma2ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_gemma placement=peri",
        config=GEMMA,
        ends=GEMMA_ENDS,
        inside=LLAMA_ATTN | GATED | GEMMA_PERI,
    ),
    Architecture(
        name="Gemma 3",
        theirs="Gemma3ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_gemma placement=peri model.qk_norm=head",
        config=GEMMA | FULL_ATTENTION | ROTATION_BY_LAYER,
        ends=GEMMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_QK | GEMMA_PERI,
    ),
    Architecture(
        name="GLM-4",
        theirs="Glm4ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=sandwich",
        config={"head_dim": HEAD_WIDTH, "attention_bias": False},
        ends=LLAMA_ENDS,
        inside=NEIGHBOURS_ATTN
        | GATE_AND_UP
        | LLAMA_PRE
        | {"post_self_attn_layernorm": OUT_ATTN, "post_mlp_layernorm": OUT_MLP},
    ),
    Architecture(
        name="HyperCLOVA X",
        theirs="HyperCLOVAXForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=peri",
        config={
            "attention_multiplier": HEAD_WIDTH**-0.5,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "head_dim": HEAD_WIDTH,
        },
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN | GATED | LLAMA_PRE | {"post_norm1": OUT_ATTN, "post_norm2": OUT_MLP},
    ),
    Architecture(
        # All its heads' outputs have a gate, which is a half where its weights are zero.
        name="AFMoE, its dense layers",
        theirs="AfmoeForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=peri model.qk_norm=head",
        # Only its layers with a window rotate; the window is as long as the context.
        config=SLIDING_ATTENTION | {"head_dim": HEAD_WIDTH, "num_dense_layers": DEPTH},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN
        | GATED
        | LLAMA_QK
        | {
            "self_attn.o_proj": times(2, "attn.out"),
            "input_layernorm": IN_ATTN,
            "post_attention_layernorm": OUT_ATTN,
            "pre_mlp_layernorm": IN_MLP,
            "post_mlp_layernorm": OUT_MLP,
        },
        zero=("self_attn.gate_proj",),
    ),
    Architecture(
        name="Kolibri 1",
        theirs="Kolibri1ForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=peri model.qk_norm=head",
        config=SLIDING_ATTENTION
        | ONE_EXPERT
        | {"head_dim": HEAD_WIDTH, "moe_intermediate_size": 96, "norm_topk_prob": True},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN
        | ONE_EXPERT_MLP
        | LLAMA_QK
        | LLAMA_PRE
        | {"post_self_attn_layernorm": OUT_ATTN, "post_mlp_layernorm": OUT_MLP},
        zero=("mlp.gate.weight", "mlp.shared_experts"),
    ),
    # sub_ln
    Architecture(
        name="BitNet b1.58",
        theirs="BitNetForCausalLM",
        overrides=f"{LLAMA} norm=rmsnorm_llama placement=sub_ln",
        config={"hidden_act": "silu"},
        ends=LLAMA_ENDS,
        inside=LLAMA_ATTN
        | GATED
        | LLAMA_PRE
        | {"self_attn.attn_sub_norm": "attn.norms.attn_inner", "mlp.ffn_sub_norm": "mlp.norm"},
    ),
    Architecture(
        name="Kosmos-2's decoder (Magneto)",
        theirs=Kosmos2TextForCausalLM,
        overrides=f"{GPT2} norm=layernorm placement=sub_ln",
        config=TANH_FUNCTION | {"ffn_dim": 4 * WIDTH, "scale_embedding": False, "pad_token_id": 0},
        ends={"model.embed_tokens": "embed.tokens", "model.layer_norm": "head.close"},
        inside=FAIRSEQ_ATTN
        | FAIRSEQ_PRE
        | {
            "self_attn.inner_attn_ln": "attn.norms.attn_inner",
            "ffn.fc1": "mlp.up",
            "ffn.ffn_layernorm": "mlp.norm",
            "ffn.fc2": "mlp.down",
        },
        lacks=NO_POSITIONS,
        patch=kosmos_without_sinusoids_and_padding,
    ),
    # parallel
    Architecture(
        name="GPT-J",
        theirs="GPTJForCausalLM",
        overrides=f"{ROTARY_GELU} model.bias=true norm=layernorm placement=parallel",
        config={"rotary_dim": HEAD_WIDTH},
        block="transformer.h.{}.",
        ends=GPT2_ENDS | {"lm_head": "head"},
        inside={
            "ln_1": "wiring.norm",
            "attn.q_proj": rotated_neighbours("attn.q"),
            "attn.k_proj": rotated_neighbours("attn.k"),
            "attn.v_proj": "attn.v",
            "attn.out_proj": "attn.out",
            "mlp.fc_in": "mlp.up",
            "mlp.fc_out": "mlp.down",
        },
        zero=("lm_head.bias",),
        lacks=("attn.q.bias", "attn.k.bias", "attn.v.bias", "attn.out.bias"),
    ),
    Architecture(
        name="CodeGen",
        theirs="CodeGenForCausalLM",
        overrides=f"{ROTARY_GELU} model.bias=true norm=layernorm placement=parallel",
        config={"rotary_dim": HEAD_WIDTH},
        block="transformer.h.{}.",
        ends=GPT2_ENDS | {"lm_head": "head"},
        inside={
            "ln_1": "wiring.norm",
            # In four parts, here of one head each: queries, values, keys.
            "attn.qkv_proj": Made(
                lambda q, v, k: by_head().make(neighbours(q), v, neighbours(k)), ("attn.q", "attn.v", "attn.k")
            ),
            "attn.out_proj": "attn.out",
            "mlp.fc_in": "mlp.up",
            "mlp.fc_out": "mlp.down",
        },
        zero=("lm_head.bias",),
        lacks=("attn.q.bias", "attn.k.bias", "attn.v.bias", "attn.out.bias"),
    ),
    Architecture(
        name="Falcon 7B",
        theirs="FalconForCausalLM",
        overrides=f"{ROTARY_GELU} norm=layernorm placement=parallel model.tie_embeddings=true",
        config={"multi_query": False, "activation": "gelu_pytorch_tanh"},
        block="transformer.h.{}.",
        ends={"transformer.word_embeddings": "embed.tokens", "transformer.ln_f": "head.close"},
        inside=NEOX_MLP
        | {
            "input_layernorm": "wiring.norm",
            "self_attention.query_key_value": by_head(*QKV),
            "self_attention.dense": "attn.out",
        },
    ),
    Architecture(
        name="Phi",
        theirs="PhiForCausalLM",
        overrides=f"{ROTARY_GELU} model.bias=true norm=layernorm placement=parallel",
        config=TANH,
        ends={"model.embed_tokens": "embed.tokens", "model.final_layernorm": "head.close", "lm_head": "head"},
        inside=QKV_PROJ
        | {
            "input_layernorm": "wiring.norm",
            "self_attn.dense": "attn.out",
            "mlp.fc1": "mlp.up",
            "mlp.fc2": "mlp.down",
        },
        zero=("lm_head.bias",),
    ),
    Architecture(
        name="Command R (Cohere)",
        theirs="CohereForCausalLM",
        overrides=f"{LLAMA} norm=layernorm_nobias placement=parallel model.tie_embeddings=true",
        config={"logit_scale": 1.0},
        ends=TIED_ENDS,
        inside=NEIGHBOURS_ATTN | GATED | {"input_layernorm": "wiring.norm"},
    ),
    Architecture(
        name="Command R7B (Cohere 2)",
        theirs="Cohere2ForCausalLM",
        overrides=f"{LLAMA} norm=layernorm_nobias placement=parallel model.tie_embeddings=true",
        # Only its layers with a window rotate; the window is as long as the context.
        config=SLIDING_ATTENTION | {"logit_scale": 1.0},
        ends=TIED_ENDS,
        inside=NEIGHBOURS_ATTN | GATED | {"input_layernorm": "wiring.norm"},
    ),
    # parallel, and a norm on queries and keys
    Architecture(
        name="Command R+ (Cohere)",
        theirs="CohereForCausalLM",
        overrides=f"{LLAMA} norm=layernorm_nobias placement=parallel model.tie_embeddings=true model.qk_norm=head",
        config={"logit_scale": 1.0, "use_qk_norm": True},
        ends=TIED_ENDS,
        inside=NEIGHBOURS_ATTN
        | GATED
        | {
            "input_layernorm": "wiring.norm",
            "self_attn.q_norm": for_each_head(Q_NORM),
            "self_attn.k_norm": for_each_head(K_NORM),
        },
    ),
    Architecture(
        name="StableLM 2 12B",
        theirs="StableLmForCausalLM",
        overrides=f"{LLAMA} norm=layernorm placement=parallel model.qk_norm=head",
        config={"layer_norm_eps": 1e-5, "qk_layernorm": True, "use_parallel_residual": True},
        ends=LLAMA_ENDS,
        # A gain for each head, which is the same one here.
        inside=LLAMA_ATTN
        | GATED
        | {"input_layernorm": "wiring.norm"}
        | {f"self_attn.{s}_layernorm.norms.{head}": f"attn.qk_norms.{s}" for s in "qk" for head in range(HEADS)},
        lacks=("qk_norms.q.affine.bias", "qk_norms.k.affine.bias"),
    ),
    Architecture(
        name="Phi, its option qk_layernorm",
        theirs="PhiForCausalLM",
        overrides=f"{ROTARY_GELU} model.bias=true norm=layernorm placement=parallel model.qk_norm=head",
        config=TANH | {"qk_layernorm": True},
        ends={"model.embed_tokens": "embed.tokens", "model.final_layernorm": "head.close", "lm_head": "head"},
        inside=QKV_PROJ
        | {
            "input_layernorm": "wiring.norm",
            "self_attn.q_layernorm": Q_NORM,
            "self_attn.k_layernorm": K_NORM,
            "self_attn.dense": "attn.out",
            "mlp.fc1": "mlp.up",
            "mlp.fc2": "mlp.down",
        },
        zero=("lm_head.bias",),
    ),
    # parallel_two_norms
    Architecture(
        name="GPT-NeoX",
        theirs="GPTNeoXForCausalLM",
        overrides=f"{ROTARY_GELU} model.bias=true norm=layernorm placement=parallel_two_norms",
        config=TANH,
        block="gpt_neox.layers.{}.",
        ends={"gpt_neox.embed_in": "embed.tokens", "gpt_neox.final_layer_norm": "head.close", "lm_head": "head"},
        inside=NEOX_MLP
        | {
            "input_layernorm": "wiring.attn_norm",
            "post_attention_layernorm": "wiring.mlp_norm",
            "attention.query_key_value": by_head(*QKV),
            "attention.dense": "attn.out",
        },
    ),
    Architecture(
        name="Falcon 40B",
        theirs="FalconForCausalLM",
        overrides=f"{ROTARY_GELU} norm=layernorm placement=parallel_two_norms model.tie_embeddings=true",
        config={"new_decoder_architecture": True, "num_kv_heads": HEADS, "activation": "gelu_pytorch_tanh"},
        block="transformer.h.{}.",
        ends={"transformer.word_embeddings": "embed.tokens", "transformer.ln_f": "head.close"},
        inside=NEOX_MLP
        | {
            "ln_attn": "wiring.attn_norm",
            "ln_mlp": "wiring.mlp_norm",
            "self_attention.query_key_value": by_head(*QKV),
            "self_attention.dense": "attn.out",
        },
    ),
]


NO_DECODER_HAS = (
    "b2t",
    "deepnorm",
    "depth_scaled_sandwich",
    "gpas",
    "hybridnorm",
    "hybridnorm_star",
    "keel",
    "layerscale",
    "lns",
    "mix_ln",
    "ngpt",
    "normformer",
    "pre_post",
    "resi_dual",
    "rezero",
    "siamese",
    "skipinit",
    "x0_lambdas",
)
"""Placements that no decoder of transformers has; LayerScale is there in models of images and of sound."""


def shape_of(config: ModelConfig) -> dict[str, Any]:
    """The options that most of them have."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "max_position_embeddings": config.context,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROTATION,
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def translated(row: Architecture, ours: Tensors, names: set[str]) -> Tensors:
    """Our tensors as theirs, by their names; what ours have no place for is not among them."""

    def of(module: str, leaf: str) -> Tensor | None:
        affine = {"weight": "gain", "bias": "bias"}[leaf]
        return ours.get(f"{module}.{leaf}", ours.get(f"{module}.affine.{affine}"))

    places = [("", "", row.ends)]
    places += [(f"blocks.{layer}.", row.block.format(layer), row.inside) for layer in range(DEPTH)]
    theirs = {}
    for prefix, their_prefix, weights in places:
        for name, part in weights.items():
            made = part if isinstance(part, Made) else joined(part)
            for leaf in ("weight", "bias"):
                parts = [tensor for module in made.modules if (tensor := of(prefix + module, leaf)) is not None]
                if parts:
                    whole = their_prefix + name
                    theirs[whole if whole in names else f"{whole}.{leaf}"] = made.make(*parts)
    return theirs


def test_every_placement_of_a_decoder_is_compared_with_one() -> None:
    overrides = {override for row in ARCHITECTURES for override in row.overrides.split()}
    held = {override.removeprefix("placement=") for override in overrides if override.startswith("placement=")}
    shipped = {name for name, known in load_all().items() if type(known).__module__.startswith("normlab.")}
    assert not held & set(NO_DECODER_HAS)
    assert held | set(NO_DECODER_HAS) == shipped


def test_architectures_are_distinct() -> None:
    assert len({row.name for row in ARCHITECTURES}) == len(ARCHITECTURES)


def made_of(row: Architecture, monkeypatch: pytest.MonkeyPatch) -> tuple[GPT, nn.Module, Tensors, Tensors]:
    """Our model, theirs, our parameters that theirs have a place for, and these as theirs, zeros for the rest."""
    if isinstance(row.theirs, str) and not hasattr(transformers, row.theirs):
        pytest.skip(f"transformers {transformers.__version__} has no {row.theirs}")
    config = config_of(f"model.depth={DEPTH}", *row.overrides.split())
    model = randomised(config, torch.float64)
    kind = getattr(transformers, row.theirs) if isinstance(row.theirs, str) else row.theirs
    # A copy, since some of them write into what they are given.
    other = kind(kind.config_class(**copy.deepcopy(shape_of(config.model) | row.config))).eval()
    if row.patch is not None:
        row.patch(other, monkeypatch)

    ours = dict(model.named_parameters())
    for ending in row.lacks:
        lacking = [name for name in ours if name.endswith(ending)]
        assert lacking
        for name in lacking:
            ours.pop(name).detach().zero_()
    theirs = dict(other.named_parameters())
    weights = translated(row, ours, set(theirs))
    assert weights.keys() <= theirs.keys()
    assert {name: value.shape for name, value in weights.items()} == {n: theirs[n].shape for n in weights}
    rest = theirs.keys() - weights.keys()
    assert [part for part in row.zero if not any(part in name for name in rest)] == []
    assert [name for name in rest if not any(part in name for part in row.zero)] == []
    return model, other, ours, weights | {name: torch.zeros_like(theirs[name]) for name in rest}


def both_logits(model: GPT, other: nn.Module, weights: Tensors, tokens: Tensor) -> tuple[Tensor, Tensor]:
    # Through the translation, so that their logits too are a function of our parameters.
    return model(tokens), functional_call(other, weights, (), {"input_ids": tokens, "use_cache": False}).logits


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with float32_as_float64():
        yield


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
def test_architecture_equals_our_model(row: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other, ours, weights = made_of(row, monkeypatch)
    tokens, targets = torch.randint(VOCAB, (2, 3, STEPS), generator=torch.Generator().manual_seed(2))
    logits, expected = both_logits(model, other, weights, tokens)
    # Worth comparing: of order one, and nothing like uniform.
    assert logits.std() > 0.8
    assert_equal(logits, expected, terms=TERMS, layers=DEPTH + 1)

    def gradients(logits: Tensor) -> Tensors:
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        # A parameter that one of the two does not use at all is an error here.
        return dict(zip(ours, torch.autograd.grad(loss, list(ours.values())), strict=True))

    assert_equal_gradients(gradients(logits), gradients(expected), terms=TERMS, layers=DEPTH + 1)


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("Gemma 2", "norm.eps=1.001e-6"),
        ("OLMo", "norm.eps=1.001e-5"),
        ("Helium", "model.rope_theta=9000"),
        ("Nemotron", "norm.unit_offset=false"),
    ],
)
def test_comparison_rejects_another_model(name: str, override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Unlike the row's by a little.
    (row,) = [row for row in ARCHITECTURES if row.name == name]
    overrides = [known for known in row.overrides.split() if known.split("=")[0] != override.split("=")[0]]
    row = dataclasses.replace(row, overrides=" ".join([*overrides, override]))
    model, other, _, weights = made_of(row, monkeypatch)
    logits, expected = both_logits(model, other, weights, torch.arange(STEPS)[None])
    with pytest.raises(AssertionError, match="not close"):
        assert_equal(logits, expected, terms=TERMS, layers=DEPTH + 1)
