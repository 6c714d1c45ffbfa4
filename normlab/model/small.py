"""Inputs and small models for the checks, the same on every machine.

Shapes: B batch, T time, D width.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from normlab.base.errors import ConfigError
from normlab.base.plugins import COUNTER
from normlab.catalogue.corpora import StdlibData
from normlab.catalogue.norms.base import NormConfig
from normlab.catalogue.optimizers.options import AdamW
from normlab.catalogue.placements.base import Placement
from normlab.config.model import ModelConfig
from normlab.config.norms import PlacedNorm
from normlab.config.schema import RunConfig
from normlab.model.attention import attend
from normlab.model.gpt import GPT, Block
from normlab.model.modules import build_norm

BATCH, TIME, VOCAB = 2, 6, 11
WIDTHS = (16, 24, 32, 48, 64, 96, 128, 256)
"""Candidate widths; `shrink` uses the first that the norm and the placement accept."""


def hashed_numbers(name: str, *shape: int) -> Tensor:
    """Return float64 numbers of mean 0 and variance 1 that depend on the name only.

    Each number is a 53-bit fraction of a SHA-256 digest, so no random generator and no math library affects its bits.
    """
    return _hashed_numbers(name, shape).clone()


@lru_cache(maxsize=4096)
def _hashed_numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    digests = [hashlib.sha256(f"{name}/{block}".encode()).digest() for block in range(-(-count // 4))]
    integers = np.frombuffer(b"".join(digests), dtype="<u8")[:count]
    fractions = (integers >> 11).astype(np.float64) * 2.0**-53
    return torch.from_numpy((fractions - 0.5) * math.sqrt(12)).reshape(shape)


def tokens(batch: int = BATCH, time: int = TIME) -> Tensor:
    """Return token numbers, shape (B, T)."""
    return ((hashed_numbers("tokens", batch, time) / math.sqrt(12) + 0.5) * VOCAB).long()


@torch.no_grad()
def fill(module: nn.Module, name: str) -> None:
    """Set matrices to hashed numbers over sqrt(fan-in); add 0.3 times such numbers to the rest."""
    for leaf, parameter in module.named_parameters():
        noise = hashed_numbers(f"{name}/{leaf}", *parameter.shape)
        # A table of scalars, such as the factors by which streams are mixed, is no weight matrix.
        if parameter.dim() == 2 and getattr(parameter, "role", "") != "scalar":
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
        else:
            parameter.add_(0.3 * noise.to(parameter.dtype))


@contextmanager
def restored_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers at the end, because running statistics are reassigned."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    yield
    for name, buffer in before.items():
        owner, _, buffer_name = name.rpartition(".")
        setattr(module.get_submodule(owner), buffer_name, buffer)


def shrink(config: RunConfig, *, width: int = WIDTHS[0], context: int = TIME) -> RunConfig:
    """Return a run's config with a small width (at least `width`), MLP and context, two heads and init=auto.

    Raises:
        ConfigError: Neither a width in `WIDTHS` nor the run's own width is valid.
    """
    errors = []
    # The run's own width comes last: a model of that width may take long.
    widths = [wide for wide in WIDTHS if wide >= width]
    for candidate_width in (*widths, config.model.width):
        model = dataclasses.replace(
            config.model, width=candidate_width, heads=2, mlp_width=2 * candidate_width, context=context
        )
        candidate = dataclasses.replace(config, model=model, init="auto")
        try:
            candidate.validate()
            return candidate
        except ConfigError as error:
            errors.append(error)
    raise errors[-1]


def small_config(norm: NormConfig, placement: Placement, *, depth: int = 4, **model: object) -> RunConfig:
    """Return a small config with this norm and placement; other options have their defaults.

    Raises:
        ConfigError: The norm and the placement cannot be combined.
    """
    options = ModelConfig(depth=depth, **model)  # pyright: ignore[reportArgumentType]
    return shrink(RunConfig(norm=norm, placement=placement, model=options, data=StdlibData(), optim=AdamW()))


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A small model in float64."""

    config: RunConfig
    gpt: GPT
    norms: dict[nn.Module, PlacedNorm]
    """The model's norms, in the order of their construction, each with its site and options."""
    initial_values: dict[str, list[float]]
    """Initial values of the parameters outside linear layers and embeddings, by layer and name."""


def build_small(
    config: RunConfig, *, alike: bool = False, filled: bool = True, with_eps: Callable[[float], float] | None = None
) -> SmallModel:
    """Build the model of a small config.

    Args:
        config: From `shrink` or `small_config`.
        alike: Whether all blocks get the same numbers.
        filled: Whether parameters get hashed numbers. Otherwise they keep their initial values, and those of linear
            layers and embeddings are torch's.
        with_eps: Gives the eps of each norm that has one, from the eps of the config.
    """
    norms: dict[nn.Module, PlacedNorm] = {}

    def make_norm(width: int, site: str, layer: int | None = None) -> nn.Module:
        options = config.norm_at(site, layer)
        eps = getattr(options, "eps", 0)
        if eps and with_eps is not None:
            options = dataclasses.replace(options, eps=with_eps(eps))  # pyright: ignore[reportCallIssue]
        norm = build_norm(options, width)
        norms[norm] = PlacedNorm(site, layer, (width,), options)
        return norm

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = GPT(config.model, config.placement, make_norm, VOCAB).double()
    initial_values = {f"{layer} {name}": value.flatten().tolist() for layer, name, value in extra_parameters(model)}
    if filled:
        for prefix, segment in model.segments():
            # One name for all blocks gives all the same numbers.
            is_block = prefix.startswith("blocks.")
            fill(segment, "block" if alike and is_block else prefix)
    for name, buffer in model.named_buffers():
        if name.endswith(COUNTER):
            # Some branches have grown, others not; a norm that changes by itself is halfway.
            buffer.fill_(max([1.5, *(sum(placed.norm.changing) / 2 for placed in norms.values())]))
    with torch.no_grad():
        config.placement.project(dict(model.named_parameters()))
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attn.kernel = attend  # torch's fused kernels sum in another order on other machines
    return SmallModel(config, model, norms, initial_values)


def extra_parameters(model: nn.Module) -> Iterator[tuple[int, str, Tensor]]:
    """Yield (layer, name, value) of each parameter outside linear layers and embeddings.

    Layer 0 stands for parameters outside the blocks.

    A shared parameter comes once, under its first name.
    """
    visited: set[Tensor] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            visited.update(module.parameters())
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter in visited:
                continue
            visited.add(parameter)
            name = f"{prefix}.{leaf}"
            if name.startswith("blocks."):
                _, block, name_in_block = name.split(".", 2)
                yield int(block) + 1, name_in_block, parameter
            else:
                yield 0, name, parameter
