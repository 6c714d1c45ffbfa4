"""The small things that checks are made on: numbers that are the same everywhere, and models to fit them.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from normlab.config import AdamW, ModelConfig, RunConfig
from normlab.corpora import StdlibData
from normlab.errors import ConfigError
from normlab.model.gpt import GPT, Block
from normlab.norms.base import NormConfig
from normlab.placements.base import Placement

BATCH, TIME, VOCAB = 2, 6, 11
WIDTHS = (16, 24, 32, 48, 64, 96, 128, 256)
"""Tried in turn: the first that the norm and the placement take."""


def numbers(name: str, *shape: int) -> Tensor:
    """Numbers between -sqrt(3) and sqrt(3), of variance 1, made from a name: the same bits on every machine.

    Each is a 53-bit fraction of SHA-256's output: no generator and no function of a library has a part in it.
    """
    return _numbers(name, shape).clone()


@lru_cache(maxsize=4096)
def _numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    blocks = [hashlib.sha256(f"{name}/{block}".encode()).digest() for block in range(-(-count // 4))]
    whole = np.frombuffer(b"".join(blocks), dtype="<u8")[:count]
    fractions = (whole >> 11).astype(np.float64) * 2.0**-53
    return torch.from_numpy((fractions - 0.5) * math.sqrt(12)).reshape(shape)


@torch.no_grad()
def fill(module: nn.Module, name: str) -> None:
    """Give every parameter its own numbers: matrices such as keep their input's size, the rest near its start."""
    for leaf, parameter in module.named_parameters():
        noise = numbers(f"{name}/{leaf}", *parameter.shape)
        if parameter.dim() == 2:
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
        else:
            parameter.add_(0.3 * noise.to(parameter.dtype))


def small(config: RunConfig, *, depth: int | None = None) -> RunConfig:
    """A run's config at a size that takes milliseconds; its norm, its placement and its options as they are.

    Raises:
        ConfigError: No small width fits.
    """
    reason: ConfigError | None = None
    for width in (*WIDTHS, config.model.width):
        model = dataclasses.replace(
            config.model, width=width, heads=2, mlp_width=2 * width, context=TIME, depth=depth or config.model.depth
        )
        fitting = dataclasses.replace(config, model=model, init="auto")
        try:
            fitting.validate()
        except ConfigError as error:
            reason = error
            continue
        return fitting
    raise reason if reason is not None else ConfigError("verify: no width was tried")


def config_of(norm: NormConfig, placement: Placement, *, depth: int = 4, **model: object) -> RunConfig:
    """The small config of a norm and a placement, everything else as it is by default.

    Raises:
        ConfigError: The two cannot be had together.
    """
    options = ModelConfig(depth=depth, **model)  # pyright: ignore[reportArgumentType]
    return small(RunConfig(norm=norm, placement=placement, model=options, data=StdlibData(), optim=AdamW()))


def built(config: RunConfig, *, alike: bool = False, filled: bool = True) -> tuple[GPT, list[nn.Module]]:
    """A small model in float64, its parameters filled, and the norms in it.

    Args:
        config: A small one.
        alike: Whether all blocks get the same numbers.
        filled: Whether they get any, or are left where they start; linear layers are then torch's.
    """
    norms: list[nn.Module] = []

    def make_norm(width: int) -> nn.Module:
        norms.append(config.norm.build(width))
        return norms[-1]

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = GPT(config.model, config.placement, make_norm, VOCAB).double()
    for name, segment in model.segments() if filled else ():
        fill(segment, "block" if alike and name.startswith("blocks.") else name)
    with torch.no_grad():
        config.placement.project(dict(model.named_parameters()))
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attn.fused = False  # the same sums on every machine
    return model, norms


def tokens() -> Tensor:
    """Token numbers, shape (B, T)."""
    return ((numbers("tokens", BATCH, TIME) / math.sqrt(12) + 0.5) * VOCAB).long()
