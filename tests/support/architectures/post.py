"""`post`, also with a norm on the embeddings."""

from typing import Any

import pytest
from torch import nn

from support.architectures.architecture import (
    BART_ENDS,
    DEPTH,
    FAIRSEQ_ATTN,
    FAIRSEQ_DECODER,
    FAIRSEQ_MLP,
    FAIRSEQ_POST,
    GPT2,
    QKV,
    RES_ATTN,
    RES_MLP,
    TANH,
    XLM_BLOCK,
    Architecture,
    joined,
    transposed,
)


def xlm_without_padding_and_exact_gelu(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.transformer.embeddings.padding_idx = None
    for mlp in model.transformer.ffns:
        mlp.act = nn.GELU(approximate="tanh")


def bert_without_its_head(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT's head has a layer of its own before the logits."""
    model.cls.predictions.transform = nn.Identity()


POST = [
    # post
    Architecture(
        name="GPT",
        transformers_class="OpenAIGPTLMHeadModel",
        overrides=f"{GPT2} norm=layernorm placement=post",
        block_prefix="transformer.h.{}.",
        model_weights={"transformer.tokens_embed": "embed.tokens", "transformer.positions_embed": "embed.positions"},
        block_weights={
            "ln_1": RES_ATTN,
            "ln_2": RES_MLP,
            "attn.c_attn": transposed(joined(*QKV)),
            "attn.c_proj": transposed("attn.out"),
            "mlp.c_fc": transposed("mlp.up"),
            "mlp.c_proj": transposed("mlp.down"),
        },
    ),
    # post, and a norm on the embeddings
    Architecture(
        name="BART's decoder",
        transformers_class="BartForCausalLM",
        overrides=f"{GPT2} norm=layernorm placement=post placement.embedding_norm=true",
        config=FAIRSEQ_DECODER,
        block_prefix="model.decoder.layers.{}.",
        model_weights=BART_ENDS,
        block_weights=FAIRSEQ_ATTN | FAIRSEQ_MLP | FAIRSEQ_POST,
        zero_in_transformers=("encoder_attn",),
    ),
    Architecture(
        name="XLM as a decoder",
        transformers_class="XLMWithLMHeadModel",
        overrides=f"{GPT2} norm=layernorm norm.eps=1e-12 placement=post placement.embedding_norm=true",
        config={"causal": True, "pad_index": 0, "use_lang_emb": False, "n_langs": 1},
        # It has a list of each kind of part, and no blocks.
        model_weights={
            "transformer.embeddings": "embed.tokens",
            "transformer.position_embeddings": "embed.positions",
            "transformer.layer_norm_emb": "embed.open",
        }
        | {
            f"transformer.{name}".format(layer): f"blocks.{layer}.{part}"
            for layer in range(DEPTH)
            for name, part in XLM_BLOCK.items()
        },
        block_weights={},
        zero_in_transformers=("proj.bias",),
        patch=xlm_without_padding_and_exact_gelu,
    ),
    Architecture(
        name="BERT as a decoder",
        transformers_class="BertLMHeadModel",
        overrides=f"{GPT2} norm=layernorm_bert placement=post placement.embedding_norm=true",
        config=TANH | {"is_decoder": True},
        block_prefix="bert.encoder.layer.{}.",
        model_weights={
            "bert.embeddings.word_embeddings": "embed.tokens",
            "bert.embeddings.position_embeddings": "embed.positions",
            "bert.embeddings.LayerNorm": "embed.open",
        },
        block_weights={
            "attention.self.query": "attn.q",
            "attention.self.key": "attn.k",
            "attention.self.value": "attn.v",
            "attention.output.dense": "attn.out",
            "attention.output.LayerNorm": RES_ATTN,
            "intermediate.dense": "mlp.up",
            "output.dense": "mlp.down",
            "output.LayerNorm": RES_MLP,
        },
        zero_in_transformers=("token_type_embeddings.weight", "predictions.bias"),
        patch=bert_without_its_head,
    ),
]
