"""One architecture of transformers, and how its weights are combined from those of our model.

A row sets aside what has nothing to do with norms and is not in our model, in its `config` or `patch`: other
activations, grouped keys and values, attention windows, ALiBi, fixed sinusoids, caps and factors on the logits, all but
one of many experts. It folds into the weights a factor on the embeddings, a factor that is missing under the softmax,
and the order of the channels that rotate together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.transformers_models import CONTEXT

WIDTH, HEADS, DEPTH, STEPS = 32, 4, 2, 17
HEAD_WIDTH = WIDTH // HEADS

TERMS = 128
"""The longest sum, over the hidden channels of the widest MLP."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Combined:
    """A tensor of transformers as a function of some of ours: weights of weights and biases of biases.

    A module may be the name of a single parameter instead.
    """

    combine: Callable[..., Tensor]
    modules: tuple[str, ...]


Weights = Mapping[str, "str | Combined"]
"""For each module or parameter of transformers our module or parameter, or the combination of ours, that equals it."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    name: str
    transformers_class: str | type[nn.Module]
    overrides: str
    block_weights: Weights
    """Weights in each block, by the part of the name after `block_prefix`."""
    model_weights: Weights
    """Weights outside the blocks."""
    block_prefix: str = "model.layers.{}."
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options of transformers, in addition to the width, depth and so on that all rows share."""
    zero_in_transformers: tuple[str, ...] = ()
    """Parts of the names of parameters that only transformers has; they are zero."""
    zero_in_normlab: tuple[str, ...] = ()
    """Ends of the names of parameters that only our model has; they are zero."""
    build: Callable[[Any, dict[str, Any]], nn.Module] | None = None
    """Builds the model from its class and its options, where these are not those of the class's config."""
    patch: Callable[[Any, pytest.MonkeyPatch], None] | None = None
    least_logits: float = 0.8
    """What the standard deviation of the logits is above; gates on what the head reads make them smaller."""


# Combinations of our weights


def joined(*modules: str) -> Combined:
    """Concatenate weights."""
    return Combined(lambda *parts: torch.cat(parts), modules)


def by_head(*modules: str, heads: int = HEADS) -> Combined:
    """Concatenate the first head of each weight, then the second of each, and so on."""
    return Combined(
        lambda *parts: torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1), modules
    )


def transposed(module: str | Combined) -> Combined:
    """Transpose a matrix, as in Conv1D."""
    source = module if isinstance(module, Combined) else Combined(lambda x: x, (module,))

    def combine(*parts: Tensor) -> Tensor:
        weight = source.combine(*parts)
        return weight.t() if weight.dim() == 2 else weight

    return Combined(combine, source.modules)


def neighbours(x_K: Tensor) -> Tensor:
    """Put channels i and i + K/2 of each head, which rotate together, next to each other."""
    heads = x_K.shape[0] // HEAD_WIDTH
    return x_K.unflatten(0, (heads, 2, HEAD_WIDTH // 2)).transpose(1, 2).flatten(0, 2)


def halves_exchanged(module: str) -> Combined:
    """Exchange the halves of each head, which reverses the rotation."""
    return Combined(lambda x_K: x_K.unflatten(0, (HEADS, 2, HEAD_WIDTH // 2)).flip(1).flatten(0, 2), (module,))


def rotated_neighbours(module: str) -> Combined:
    return Combined(neighbours, (module,))


def for_each_head(module: str) -> Combined:
    """Repeat a gain for every head, with the channels that rotate together next to each other."""
    return Combined(lambda gain_K: neighbours(gain_K).expand(HEADS, -1), (module,))


def times(factor: float, module: str) -> Combined:
    return Combined(lambda x: x * factor, (module,))


def plus_one(norm: str) -> Combined:
    """Return the gain of a norm that multiplies by `gain` where ours multiplies by `1 + gain`."""
    return Combined(lambda gain_D: 1 + gain_D, (norm,))


def one_expert(*modules: str) -> Combined:
    """Return the weights of a mixture of one expert, which is always chosen."""
    return Combined(lambda *parts: torch.cat(parts)[None], modules)


def after_two_rows(module: str) -> Combined:
    """Return OPT's table of positions, which starts in row 2."""
    return Combined(lambda x_TD: F.pad(x_TD, (0, 0, 2, 0)), (module,))


# Names of norms in our model

IN_ATTN, IN_MLP = "wiring.attn.norms.in", "wiring.mlp.norms.in"
OUT_ATTN, OUT_MLP = "wiring.attn.norms.out", "wiring.mlp.norms.out"
RES_ATTN, RES_MLP = "wiring.attn.norms.res", "wiring.mlp.norms.res"
Q_NORM, K_NORM = "attn.qk_norms.q", "attn.qk_norms.k"

# Names and options that several rows share

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
    "self_attn.q_proj": by_head("attn.q", "attn.gate"),
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
ROTARY_RELU2 = "model=llama_nano model.mlp=relu2"
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
# The attention to an encoder is zero.
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
