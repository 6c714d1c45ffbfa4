"""Attention: the rotation against transformers, and the unfused kernel against torch's.

Whole models are compared with those of transformers in test_architectures.py.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from normlab.model.attention import attend, rotate, sdpa
from normlab.model.runner import attention_by
from support.tolerance import assert_equal, float32_as_float64
from support.transformers_models import VOCAB, config_of, randomised


@pytest.mark.parametrize("theta", [10000.0, 17.5])
def test_rope_equals_transformers(theta: float) -> None:
    steps, width = 64, 16
    config = LlamaConfig(
        hidden_size=width,
        num_attention_heads=1,
        max_position_embeddings=steps,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    generator = torch.Generator().manual_seed(0)
    with float32_as_float64():
        q, k = torch.randn(2, 3, 4, steps, width, generator=generator)
        cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(steps)[None])
        expected = apply_rotary_pos_emb(q, k, cos, sin)
    for ours, theirs in zip((rotate(q, theta), rotate(k, theta)), expected, strict=True):
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
