"""Whether a run fits the machine: a rough count from its config, before anything is made.

The count is of what cannot be less: weights, gradients and moments, and what the backward pass needs of one
micro-batch. It is there to refuse a slip of the keyboard, not to fill a machine to its brim.

Shapes: T context, D model width, M width of the MLP, V vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from normlab.config import SGD, RunConfig
from normlab.errors import ConfigError
from normlab.stats.parameters import NEEDS_PARAMETER_COPY
from normlab.stats.statistic import CORE

VOCABULARY = 257
"""Tokens that are counted with: those of bytes. Another tokenizer is not known before its text is read."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a run needs at least."""

    state: int
    """Weights, their gradients and moments, and the copy of the weights that measured steps make."""
    activations: int
    """One micro-batch, forwards; and the whole step's tokens."""

    @property
    def total(self) -> int:
        """Both."""
        return self.state + self.activations


def need(config: RunConfig, bytes_a_number: int = 4) -> Need:
    """What a validated config needs, its activations being of `bytes_a_number` bytes."""
    model, train = config.model, config.train
    depth, width, context = model.depth, model.width, model.context
    assert model.mlp_width is not None  # resolved
    mlp, weights = model.mlp_width, weights_of(config)
    moments = 2 if not isinstance(config.optim, SGD) else 1 if config.optim.momentum else 0
    tokens = train.batch_size // train.accumulation * context
    # Of a layer: both sums and their norms, q, k, v, what attention made of them, the MLP before and after.
    activations = tokens * (depth * (8 * width + 2 * mlp) * bytes_a_number + 2 * VOCABULARY * 4)
    copies = int(bool(config.stats.names(CORE) & set(NEEDS_PARAMETER_COPY)))
    return Need(4 * weights * (2 + moments + copies), activations + 16 * train.batch_size * (context + 1))


def weights_of(config: RunConfig) -> int:
    """How many numbers the weights of a validated config are, biases and norms left out."""
    model = config.model
    assert model.mlp_width is not None  # resolved
    tables = (1 if model.tie_embeddings else 2) * VOCABULARY + (model.context if model.positions == "learned" else 0)
    block = 4 * model.width + (3 if model.mlp == "swiglu" else 2) * model.mlp_width
    return model.width * (tables + model.depth * block)


def check(config: RunConfig, there: int, where: str, bytes_a_number: int = 4) -> None:
    """Refuse what cannot fit into `there` bytes.

    Raises:
        ConfigError: Naming what is needed, what is there, and what to lower.
    """
    found = need(config, bytes_a_number)
    if found.total <= there:
        return
    model, train = config.model, config.train
    if found.state > there:
        what = f"model.depth={model.depth} model.width={model.width} model.mlp_width={model.mlp_width}"
        part, lower = "weights, gradients and moments", "lower model.depth or model.width"
    else:
        what = f"train.batch_size={train.batch_size} model.context={model.context} model.depth={model.depth}"
        part, lower = "a micro-batch", "raise train.accumulation, or lower train.batch_size or model.context"
    raise ConfigError(
        f"{what}: needs about {_size(found.total)} of memory, most of it for {part}, and {where} has "
        f"{_size(there)}; {lower}"
    )


def check_weights(config: RunConfig, there: int, where: str) -> None:
    """Refuse a model whose weights, in a checkpoint and in the model, cannot fit into `there` bytes.

    Raises:
        ConfigError: Naming what is needed, and what is there.
    """
    model, needed = config.model, 2 * 4 * weights_of(config)
    if needed > there:
        raise ConfigError(
            f"model.depth={model.depth} model.width={model.width} model.mlp_width={model.mlp_width} "
            f"model.context={model.context}: needs about {_size(needed)} of memory for its weights, and {where} has "
            f"{_size(there)}; use a machine with more"
        )


def of_machine() -> int:
    """Bytes of memory that this process may have."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            there = min(there, int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such controller, or no limit
            continue
    return there


def _size(count: int) -> str:
    number, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while number >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return f"{number:.3g} {units[0]}"
