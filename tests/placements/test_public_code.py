"""Placements against public code: the forward pass as it describes it, in plain functions of the weights, in float64.

Nothing here calls a module of normlab's; the weights are read from the model by their names.
"""

import dataclasses
import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.catalogue.placements.algebra import FirstBlockPlacement
from normlab.catalogue.placements.base import Placement, load_all
from normlab.catalogue.placements.ngpt import NGPT
from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT
from normlab.model.init import build_model
from support.reference_blocks import CONTEXT, VOCAB, WIDTH, composed

Weights = dict[str, Tensor]
HEADS = 2
TOKENS = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(2))

load_all()


def config_of(placement: Placement, depth: int) -> RunConfig:
    config = composed()
    return dataclasses.replace(config, placement=placement, model=dataclasses.replace(config.model, depth=depth))


def model_of(placement: Placement, depth: int) -> GPT:
    """A model in float64 with random weights; nGPT's matrices have their rows or columns of length 1."""
    model = build_model(config_of(placement, depth), VOCAB).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 2:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(0.1 * noise)
        placement.project(dict(model.named_parameters()))
    return model


def layer_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.affine.gain"], w[f"{name}.affine.bias"], 1e-5)


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attention(w: Weights, block: str, x: Tensor) -> Tensor:
    q, k, v = (split(x @ w[f"{block}.attn.{name}.weight"].T) for name in "qkv")
    y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    return y.transpose(1, 2).flatten(2) @ w[f"{block}.attn.out.weight"].T


def mlp(w: Weights, block: str, x: Tensor) -> Tensor:
    up, gate = (x @ w[f"{block}.mlp.{name}.weight"].T for name in ("up", "gate"))
    return (F.silu(gate) * up) @ w[f"{block}.mlp.down.weight"].T


def keel(w: Weights, tokens: Tensor, depth: int, first_block: str) -> Tensor:
    """KEEL as in public forks of OLMo-core and torchtitan, without their norm before the head."""
    x = w["embed.tokens.weight"][tokens]
    for layer in range(depth):
        block = f"blocks.{layer}"
        first = layer == 0 and first_block != "same"
        alpha = 1 if first else 2 * depth
        h = alpha * x + attention(w, block, layer_norm(w, f"{block}.wiring.attn.norms.in", x))
        h = h if first else layer_norm(w, f"{block}.wiring.attn.norms.res", h)
        x = alpha * h + mlp(w, block, layer_norm(w, f"{block}.wiring.mlp.norms.in", h))
        x = x if first and first_block == "pre" else layer_norm(w, f"{block}.wiring.mlp.norms.res", x)
    return x @ w["head.weight"].T


def just_norm(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def ngpt(w: Weights, tokens: Tensor, depth: int) -> Tensor:
    """The forward pass of NVIDIA/ngpt's model.py, its rotation apart: embeddings enter the first block as they are."""
    base = WIDTH**-0.5
    h = w["embed.tokens.weight"][tokens]
    for layer in range(depth):
        block = f"blocks.{layer}"
        s_qk = (w[f"{block}.attn.rotated.scale"] / base).view(HEADS, 1, -1)
        q, k = (s_qk * just_norm(rotated(split(h @ w[f"{block}.attn.{name}.weight"].T))) for name in "qk")
        v = split(h @ w[f"{block}.attn.v.weight"].T)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=(WIDTH / HEADS) ** 0.5)
        written = y.transpose(1, 2).flatten(2) @ w[f"{block}.attn.out.weight"].T
        h = moved(h, written, w[f"{block}.wiring.attn.alpha"] * (0.05 / base))
        u = h @ w[f"{block}.mlp.up.weight"].T * w[f"{block}.mlp.of_up.scale"] / base
        g = h @ w[f"{block}.mlp.gate.weight"].T * w[f"{block}.mlp.of_gate.scale"] / base
        h = moved(h, (u * F.silu(g)) @ w[f"{block}.mlp.down.weight"].T, w[f"{block}.wiring.mlp.alpha"] * (0.05 / base))
    return h @ w["head.weight"].T * w["head.logits.scale"] / base


def moved(h: Tensor, written: Tensor, rate: Tensor) -> Tensor:
    a = just_norm(h)
    return just_norm(a + rate.abs() * (just_norm(written) - a))


def logits_and_gradients(model: GPT, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    parameters = dict(model.named_parameters())
    # A weight that one of the two does not use is an error here.
    grads = torch.autograd.grad((logits * weight).sum(), list(parameters.values()))
    return logits.detach(), dict(zip(parameters, grads, strict=True))


def assert_same(model: GPT, theirs: Tensor) -> None:
    values, grads = logits_and_gradients(model, model(TOKENS))
    their_values, their_grads = logits_and_gradients(model, theirs)
    torch.testing.assert_close(values, their_values, rtol=1e-11, atol=1e-11)
    largest = max(float(grad.abs().max()) for grad in their_grads.values())
    for name, grad in their_grads.items():
        scale = max(float(grad.abs().max()), 1e-6 * largest)
        assert float((grads[name] - grad).abs().max()) < 1e-10 * scale, name


@pytest.mark.parametrize(
    ("first_block", "depth"), [*product(["attention_pre", "pre", "same"], [1, 2, 5]), ("attention_pre", 200)]
)
def test_keel_equals_the_public_code(first_block: str, depth: int) -> None:
    model = model_of(FirstBlockPlacement(name="keel", first_block=first_block), depth)
    assert_same(model, keel(dict(model.named_parameters()), TOKENS, depth, first_block))


@pytest.mark.parametrize("depth", [1, 2])
def test_ngpt_equals_the_authors_code(depth: int) -> None:
    model = model_of(NGPT(), depth)
    assert_same(model, ngpt(dict(model.named_parameters()), TOKENS, depth))
