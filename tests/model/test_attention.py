"""Attention: the rotation against transformers, and the unfused kernel against torch's.

Whole models are compared with those of transformers in test_architectures.py.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from normlab.config.model import ModelConfig
from normlab.model.attention import Kernel, attend, attention_backend, rotate, sdpa, stacked_sdpa
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


class Operations(TorchDispatchMode):
    """Notes the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def fused_kernels(model: ModelConfig, kernel: Kernel, device: str, dtype: torch.dtype) -> list[str]:
    """Return the fused kernels that attention starts for a batch of 2."""
    shape = (2, model.heads, model.context, model.width // model.heads)
    q = torch.empty(shape, device=device, dtype=dtype, requires_grad=True)
    with Operations() as operations:
        kernel(q, q, q, 1.0)
    return [name for name in operations.names if "_attention" in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("head_width", [8, 12, 320])
@pytest.mark.parametrize("device", ["cpu", "meta"])  # meta: as a GPU, without one
def test_the_recorded_backend_of_a_pack_is_that_which_runs(device: str, head_width: int, dtype: torch.dtype) -> None:
    model = ModelConfig(heads=2, width=2 * head_width, context=16)
    backend = attention_backend(model, 2, device=torch.device(device), dtype=dtype, is_stacked=True)
    started = fused_kernels(model, stacked_sdpa, device, dtype)
    assert started == ([] if backend == "eager" else [f"aten::_scaled_dot_product_{backend}"])


@pytest.mark.parametrize("allowed", [None, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_the_recorded_backend_of_a_single_run_is_that_which_torch_chooses(allowed: SDPBackend | None) -> None:
    model = ModelConfig(heads=2, width=32, context=16)
    with contextlib.nullcontext() if allowed is None else sdpa_kernel(allowed):
        backend = attention_backend(model, 2, device=torch.device("cpu"), dtype=torch.float32, is_stacked=False)
        started = fused_kernels(model, sdpa, "cpu", torch.float32)
    assert [backend in name for name in started] == ([] if backend == "math" else [True])
    assert allowed is None or backend == allowed.name.lower()


def test_the_recorded_backend_with_a_softcap_is_eager() -> None:
    model = ModelConfig(attn_softcap=30.0)
    assert attention_backend(model, 2, device=torch.device("cpu"), dtype=torch.float32, is_stacked=False) == "eager"
