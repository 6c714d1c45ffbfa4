"""Estimate a lower bound on the memory of a run from its config.

The bound counts weights, gradients, optimiser moments, and the activations that one micro-batch keeps for the backward
pass. The bound catches a mistyped size; it does not predict the peak.

Shapes: T context, D model width, M width of the MLP, V vocabulary.
"""

from __future__ import annotations

import os

from normlab import cgroup
from normlab.config.devices import micro_batches
from normlab.config.schema import RunConfig
from normlab.errors import ConfigError
from normlab.stats.registry import NEEDS_PARAMETER_COPY
from normlab.stats.statistic import CORE

VOCAB_SIZE = 257
"""Assumed vocabulary: bytes. The vocabulary of another tokenizer is unknown before its text is read."""


def estimate(config: RunConfig, activation_bytes: int = 4) -> tuple[int, int]:
    """Return lower bounds on the bytes of a run's state and of its activations, on each of its devices.

    The state is weights, gradients, optimiser moments, and the copy of the weights that measured steps make. The
    activations are the values of one micro-batch, `activation_bytes` bytes each, and the tokens of the whole step.
    """
    model, train = config.model, config.train
    assert model.mlp_width is not None  # resolved
    tokens = train.batch_size // config.devices // micro_batches(config) * model.context
    # Per layer: both residual sums and their norms, q, k, v, the attention output, the MLP before and after its
    # nonlinearity.
    per_token = model.depth * (8 * model.width + 2 * model.mlp_width) * activation_bytes + 2 * VOCAB_SIZE * 4
    copies = int(bool(config.stats.names(CORE) & set(NEEDS_PARAMETER_COPY)))
    activations = tokens * per_token + 16 * train.batch_size * (model.context + 1)
    return 4 * num_weights(config) * (2 + len(config.optim.moments) + copies), activations


def num_weights(config: RunConfig) -> int:
    """Return the number of weights of a validated config, without biases and norms."""
    model = config.model
    assert model.mlp_width is not None  # resolved
    rows = (1 if model.tie_embeddings else 2) * VOCAB_SIZE + (model.context if model.positions == "learned" else 0)
    block = 4 * model.width + (3 if model.mlp == "swiglu" else 2) * model.mlp_width
    return model.width * (rows + model.depth * block)


def check_fits(config: RunConfig, available: int, device: str, activation_bytes: int = 4) -> None:
    """Check that a run fits into the `available` bytes of `device`.

    Raises:
        ConfigError: The message names the memory needed, the memory available and what to lower.
    """
    state, activations = estimate(config, activation_bytes)
    if state + activations <= available:
        return
    model, train = config.model, config.train
    if state > available:
        options = f"model.depth={model.depth} model.width={model.width} model.mlp_width={model.mlp_width}"
        part, remedy = "weights, gradients and moments", "lower model.depth or model.width"
    else:
        options = f"train.batch_size={train.batch_size} model.context={model.context} model.depth={model.depth}"
        part, remedy = "a micro-batch", "raise train.accumulation, or lower train.batch_size or model.context"
    raise ConfigError(
        f"{options}: needs about {format_size(state + activations)} of memory, most of it for {part}, and {device} "
        f"has {format_size(available)}; {remedy}"
    )


def check_weights_fit(config: RunConfig, available: int, device: str) -> None:
    """Check that two copies of the weights (checkpoint and model) fit into `available` bytes.

    Raises:
        ConfigError: The message names the memory needed and the memory available.
    """
    needed = 2 * 4 * num_weights(config)
    if needed > available:
        raise ConfigError(
            f"the weights of the model need about {format_size(needed)} of memory, and {device} has "
            f"{format_size(available)}; use a machine with more memory"
        )


def available_bytes() -> int:
    """Return the bytes of memory for this process: physical memory, or less in a cgroup."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [*cgroup.limits("memory", "memory.max"), *cgroup.limits("memory", "memory.limit_in_bytes")]
    return min([available, *(int(limit) for limit in limits if limit != "max")])


def format_size(num_bytes: int) -> str:
    """Return a number of bytes as text with a binary unit."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}"
