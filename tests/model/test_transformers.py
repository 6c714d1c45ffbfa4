"""The model against transformers: the same weights must give the same logits and the same gradients.

`norm=layernorm placement=pre` in GPT-2's style is GPT2LMHeadModel, `norm=rmsnorm placement=pre` in Llama's is
LlamaForCausalLM, with a norm on each head's queries and keys Qwen3ForCausalLM, and with the norm on each
sub-layer's output instead of its input, and on all queries and keys at once, Olmo2ForCausalLM. Other architectures
are in test_architectures.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from normlab.config.schema import ModelConfig
from normlab.model.attention import attend, rotate, sdpa
from normlab.model.gpt import GPT
from normlab.model.runner import attention_by
from support.tolerance import assert_equal, float32_as_float64
from support.transformers_models import CONTEXT, VOCAB, Tensors, assert_equal_gradients, config_of, randomised

Translate = Callable[[Tensors], Tensors]


@pytest.fixture(params=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The precision of both models: float64 judges, float32 is what is used."""
    if request.param == "float32":
        yield torch.float32
    else:
        with float32_as_float64():
            yield torch.float64


each_attention = pytest.mark.parametrize("attention", ["eager", "sdpa"])
each_shape = pytest.mark.parametrize(
    ("depth", "heads", "steps", "attention"),
    [
        (1, 1, CONTEXT, "eager"),
        (2, 4, 17, "eager"),
        (2, 4, 17, "sdpa"),
        (5, 8, 9, "sdpa"),
        (3, 2, 1, "eager"),
    ],
)


# Our tensors, or their gradients, under the names and in the shapes that transformers has them


def as_gpt2(ours: Tensors) -> Tensors:
    theirs = {
        "transformer.wte.weight": ours["embed.tokens.weight"],
        "transformer.wpe.weight": ours["embed.positions.weight"],
        "transformer.ln_f.weight": ours["head.close.affine.gain"],
        "transformer.ln_f.bias": ours["head.close.affine.bias"],
    }
    for layer in range(sum(name.endswith("mlp.up.weight") for name in ours)):
        block, h = f"blocks.{layer}", f"transformer.h.{layer}"
        for number, part in ((1, "attn"), (2, "mlp")):
            norm = f"{block}.wiring.{part}.norms.in.affine"
            theirs[f"{h}.ln_{number}.weight"] = ours[f"{norm}.gain"]
            theirs[f"{h}.ln_{number}.bias"] = ours[f"{norm}.bias"]
        for override, turn in (("weight", Tensor.t), ("bias", Tensor.clone)):
            # Their Conv1D holds a matrix transposed; queries, keys and values stand side by side in one.
            qkv = torch.cat([ours[f"{block}.attn.{site}.{override}"] for site in ("q", "k", "v")])
            theirs[f"{h}.attn.c_attn.{override}"] = turn(qkv)
            theirs[f"{h}.attn.c_proj.{override}"] = turn(ours[f"{block}.attn.out.{override}"])
            theirs[f"{h}.mlp.c_fc.{override}"] = turn(ours[f"{block}.mlp.up.{override}"])
            theirs[f"{h}.mlp.c_proj.{override}"] = turn(ours[f"{block}.mlp.down.{override}"])
    return theirs


def as_llama(ours: Tensors) -> Tensors:
    """Llama's names, which are also Qwen3's and OLMo 2's: what ours lack, theirs lack too."""
    theirs = {
        "model.embed_tokens.weight": ours["embed.tokens.weight"],
        "model.norm.weight": ours["head.close.affine.gain"],
    }
    if "head.weight" in ours:
        theirs["lm_head.weight"] = ours["head.weight"]
    for layer in range(sum(name.endswith("mlp.up.weight") for name in ours)):
        for name, value in {
            "input_layernorm": ours.get(f"blocks.{layer}.wiring.attn.norms.in.affine.gain"),
            # One name for two things: what follows attention is the MLP's in-norm, or attention's out-norm.
            "post_attention_layernorm": ours.get(
                f"blocks.{layer}.wiring.mlp.norms.in.affine.gain",
                ours.get(f"blocks.{layer}.wiring.attn.norms.out.affine.gain"),
            ),
            "post_feedforward_layernorm": ours.get(f"blocks.{layer}.wiring.mlp.norms.out.affine.gain"),
            "self_attn.q_proj": ours[f"blocks.{layer}.attn.q.weight"],
            "self_attn.k_proj": ours[f"blocks.{layer}.attn.k.weight"],
            "self_attn.v_proj": ours[f"blocks.{layer}.attn.v.weight"],
            "self_attn.o_proj": ours[f"blocks.{layer}.attn.out.weight"],
            "self_attn.q_norm": ours.get(f"blocks.{layer}.attn.qk_norms.q.affine.gain"),
            "self_attn.k_norm": ours.get(f"blocks.{layer}.attn.qk_norms.k.affine.gain"),
            "mlp.up_proj": ours[f"blocks.{layer}.mlp.up.weight"],
            "mlp.gate_proj": ours[f"blocks.{layer}.mlp.gate.weight"],
            "mlp.down_proj": ours[f"blocks.{layer}.mlp.down.weight"],
        }.items():
            if value is not None:
                theirs[f"model.layers.{layer}.{name}.weight"] = value
    return theirs


def assert_equal_models(
    model: GPT,
    other: nn.Module,
    translate: Translate,
    steps: int,
) -> None:
    """Copy our weights to theirs, and compare logits and all the gradients of the loss."""
    # The longest sum is over the MLP's hidden channels, or over the vocabulary on the way back.
    size = {"terms": max(VOCAB, *(p.shape[-1] for p in model.parameters())), "layers": len(model.blocks) + 1}
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    weights = translate({name: parameter.detach() for name, parameter in ours.items()})
    assert weights.keys() == theirs.keys()
    assert sum(value.numel() for value in weights.values()) == sum(p.numel() for p in ours.values())
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(weights[name])
    other.eval()
    generator = torch.Generator().manual_seed(2)
    tokens, targets = torch.randint(VOCAB, (2, 3, steps), generator=generator)
    logits, expected = model(tokens), other(input_ids=tokens, use_cache=False).logits
    # Worth comparing: of order one, different at each position, and nothing like uniform.
    assert logits.std() > 0.8
    assert logits.shape == expected.shape == (3, steps, VOCAB)
    assert_equal(logits, expected, **size)

    def gradients(logits: Tensor, params: Tensors) -> Tensors:
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))

    assert_equal_gradients(translate(gradients(logits, ours)), gradients(expected, theirs), **size)


# GPT-2


def gpt2_like(config: ModelConfig, attention: str = "sdpa") -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=config.context,
            n_embd=config.width,
            n_layer=config.depth,
            n_head=config.heads,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation=attention,
        )
    )


@each_shape
def test_logits_equal_gpt2_of_transformers(
    depth: int, heads: int, steps: int, attention: str, dtype: torch.dtype
) -> None:
    config = config_of(
        "model=gpt2_nano", "norm=layernorm", "placement=pre", f"model.depth={depth}", f"model.heads={heads}"
    )
    assert_equal_models(randomised(config, dtype), gpt2_like(config.model, attention), as_gpt2, steps)


# Llama and those that came from it


def shape_of(config: ModelConfig) -> dict[str, object]:
    assert config.mlp_width is not None
    return {
        "vocab_size": VOCAB,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "head_dim": config.width // config.heads,
        "max_position_embeddings": config.context,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


@each_shape
def test_logits_equal_llama_of_transformers(
    depth: int, heads: int, steps: int, attention: str, dtype: torch.dtype
) -> None:
    config = config_of(
        "model=llama_nano", "norm=rmsnorm", "placement=pre", f"model.depth={depth}", f"model.heads={heads}"
    )
    assert not config.model.tie_embeddings
    other = LlamaForCausalLM(LlamaConfig(**shape_of(config.model), attn_implementation=attention))
    assert_equal_models(randomised(config, dtype), other, as_llama, steps)


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.tie_embeddings=true",),
        ("model.rope_theta=500000",),
        ("model.rope_theta=17.5", "norm=rmsnorm_llama"),
        ("model.mlp_width=56",),
    ],
    ids=lambda overrides: overrides[0],
)
def test_logits_equal_llama_with_options(overrides: tuple[str, ...], dtype: torch.dtype) -> None:
    config = config_of("model=llama_nano", "norm=rmsnorm", "placement=pre", "model.depth=2", *overrides)
    other = LlamaForCausalLM(LlamaConfig(**shape_of(config.model)))
    theta = config.model.rope_theta
    assert theta is not None
    assert other.model.rotary_emb.inv_freq[1].item() == pytest.approx(theta**-0.25, rel=1e-6)
    assert_equal_models(randomised(config, dtype), other, as_llama, 17)


@each_attention
def test_qwen3_norms_each_heads_queries_and_keys_before_rope(attention: str, dtype: torch.dtype) -> None:
    config = config_of("model=llama_nano", "norm=rmsnorm", "placement=pre", "model.depth=3", "model.qk_norm=head")
    other = Qwen3ForCausalLM(Qwen3Config(**shape_of(config.model), attn_implementation=attention))
    assert_equal_models(randomised(config, dtype), other, as_llama, 17)


@each_attention
def test_olmo2_norms_outputs_and_all_queries_and_keys_at_once(attention: str, dtype: torch.dtype) -> None:
    overrides = ("model=llama_nano", "norm=rmsnorm", "placement=res_post", "model.depth=3", "model.qk_norm=full")
    config = config_of(*overrides)
    other = Olmo2ForCausalLM(Olmo2Config(**shape_of(config.model), attn_implementation=attention))
    assert_equal_models(randomised(config, dtype), other, as_llama, 17)


@pytest.mark.parametrize("override", ["model.rope_theta=9000", "norm.eps=1e-4"])
def test_the_comparison_can_fail(override: str, dtype: torch.dtype) -> None:
    # Another model, by a little; it may not pass for Llama.
    config = config_of("model=llama_nano", "norm=rmsnorm", "placement=pre", "model.depth=2", override)
    shape = shape_of(config.model) | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    with pytest.raises(AssertionError, match="not close"):
        assert_equal_models(randomised(config, dtype), LlamaForCausalLM(LlamaConfig(**shape)), as_llama, 17)


# Attention by itself


@pytest.mark.parametrize("theta", [10000.0, 17.5])
def test_rope_equals_transformers(theta: float, dtype: torch.dtype) -> None:
    steps, width = 64, 16
    config = LlamaConfig(
        hidden_size=width,
        num_attention_heads=1,
        max_position_embeddings=steps,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 4, steps, width, generator=generator)
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(steps)[None])
    for ours, theirs in zip((rotate(q, theta), rotate(k, theta)), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        # The angle of the last position is a sum of `steps` rates.
        assert_equal(ours, theirs, terms=steps**2)


@pytest.mark.parametrize("overrides", [("model=gpt2_nano",), ("model=llama_nano", "model.qk_norm=head")], ids=str)
def test_fused_and_unfused_attention_agree(overrides: tuple[str, ...]) -> None:
    config = config_of(*overrides, "norm=rmsnorm", "placement=pre", "model.depth=2")
    model = randomised(config, torch.float64)
    generator = torch.Generator().manual_seed(2)
    tokens, targets = torch.randint(VOCAB, (2, 3, 17), generator=generator)

    def both() -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        for kernel in (sdpa, attend):
            with attention_by(model, kernel):
                logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            yield logits, torch.autograd.grad(loss, list(model.parameters()))

    (logits, grads), (other_logits, other_grads) = both()
    assert logits.std() > 0.8
    torch.testing.assert_close(logits, other_logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, other_grads, rtol=1e-12, atol=1e-12)


def test_unfused_attention_masks_the_future_for_any_score() -> None:
    # Scores of a million: a mask that was merely a large number would be outweighed.
    q, k, v = 1e3 * torch.randn(3, 2, 4, 7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = attend(q, k, v, 0.5)
    torch.testing.assert_close(y, F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5))
    torch.testing.assert_close(y[:, :, 0], v[:, :, 0], rtol=0, atol=0)
