"""Models in float64 with random parameters, and the comparison of a model with a reference formula."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT, Block
from normlab.model.init import build_model
from normlab.placements.algebra import AlgebraPlacement, Row, register_row
from normlab.placements.base import Placement

VOCAB, DEPTH, WIDTH, CONTEXT = 11, 5, 12, 5
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@cache
def composed() -> RunConfig:
    overrides = ["model=llama_nano", "norm=layernorm", "model.heads=2", f"model.depth={DEPTH}"]
    return compose_run([*overrides, f"model.width={WIDTH}", f"model.context={CONTEXT}"])


def config_of(placement: Placement) -> RunConfig:
    return dataclasses.replace(composed(), placement=placement)


def row_of(name: str = "test_row", **parts: object) -> Row:
    """Return a row of a test; the fixture `registries` forgets it after the test."""
    return Row(name=name, formula="in the test", source="the test", init="xavier", **parts)  # pyright: ignore[reportArgumentType]


def register_placement_of(row: Row) -> AlgebraPlacement:
    """Register a row, and return the placement that it defines."""
    register_row(row)
    return AlgebraPlacement(name=row.name)


def build_test_model(placement: Placement) -> GPT:
    """Return a model in float64 with norms that all differ, and branches as large as the stream."""
    model = build_model(config_of(placement), VOCAB).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 2:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(0.3 * noise)
                if name.endswith(".scale"):
                    parameter.add_(1)  # their initial value is near 0
    return model


def assert_same(model: GPT, reference: Callable[[Tensor], Tensor]) -> None:
    """Assert that the logits and all their gradients equal those of a function of the tokens."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (2, CONTEXT), generator=generator)
    weight = torch.randn(2, CONTEXT, VOCAB, generator=generator, dtype=torch.float64)
    params = dict(model.named_parameters())
    values, grads = [], []
    for logits in (model(tokens), reference(tokens)):
        values.append(logits.detach())
        # A norm that the formula leaves out would show as a parameter without a gradient.
        grads.append(
            dict(zip(params, torch.autograd.grad((logits * weight).sum(), list(params.values())), strict=True))
        )
    assert values[0].std() > 0.2
    torch.testing.assert_close(*values, **EXACT)
    for name in params:
        scale = max(1.0, grads[1][name].abs().max().item())
        torch.testing.assert_close(grads[0][name] / scale, grads[1][name] / scale, **EXACT)


def heads(block: Block, y: Tensor) -> Tensor:
    """Split (B, T, D) into heads (B, H, T, K); head h has the channels from h K."""
    return torch.stack(y.split(WIDTH // 2, dim=-1), dim=1)


def rope(q: Tensor) -> Tensor:
    width = q.shape[-1]
    rate = 10000.0 ** (-torch.arange(0, width, 2).double() / width)
    angle = torch.arange(q.shape[-2])[:, None] * rate
    half = width // 2
    turned = torch.complex(q[..., :half], q[..., half:]) * torch.complex(angle.cos(), angle.sin())
    return torch.cat([turned.real, turned.imag], dim=-1)
