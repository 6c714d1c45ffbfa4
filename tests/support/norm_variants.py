"""Every norm with its defaults and with each option changed, with random parameters and inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from normlab.errors import ConfigError
from normlab.norms.base import NormConfig, load_all
from normlab.norms.rmsnorm import RMSNormConfig
from normlab.options import check

WIDTH = 8


def validate(options: NormConfig) -> None:
    """As a run does it."""
    check(options, "norm.")
    options.validate()


def variants(kind: type[NormConfig]) -> Iterator[NormConfig]:
    """A norm with its defaults, and with each choice and each switch set otherwise, where that is allowed."""
    changes: list[dict[str, object]] = [{}]
    for field in dataclasses.fields(kind):
        if choices := field.metadata.get("choices"):
            changes += [{field.name: choice} for choice in choices if choice != field.default]
        elif isinstance(field.default, bool):
            changes.append({field.name: not field.default})
    for change in changes:
        options = kind(**change)  # pyright: ignore[reportArgumentType, reportCallIssue]
        try:
            validate(options)
        except ConfigError:
            continue
        yield options


def label(options: NormConfig) -> str:
    """The norm's name and what is not as by default."""
    default = type(options)()  # pyright: ignore[reportCallIssue]
    changed = [
        f"{field.name}={getattr(options, field.name)}"
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != getattr(default, field.name)
    ]
    return ",".join([options.name, *changed])


# `none` is refused with the default eps, so that the search by single changes does not find it.
NO_EPS = RMSNormConfig(eps_mode="none", eps=0.0)


ALL = [options for kind in load_all().values() for options in variants(kind)] + [NO_EPS]


both_modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def build(options: NormConfig, *, width: int = WIDTH, seed: int = 0, training: bool = True) -> nn.Module:
    """The norm with parameters that are not where they start, and running statistics that have moved."""
    norm = options.build(width)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))
        for _ in range(3):
            norm.train()(2 + 3 * torch.randn(4, 5, width, generator=generator))
    return norm.train(training)
