"""Build a model from a config and draw its initial weights.

Each weight is drawn from (seed, parameter name), on the CPU, by a counter-based generator: two models with the same
seed have equal weights wherever name and shape agree, on every machine. A norm that draws its own parameters draws
them from (seed, number of the norm in the model).
"""

import hashlib
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import nn

from normlab.base.errors import notify
from normlab.catalogue.placements.init_rules import INIT_RULES, Weight
from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT
from normlab.model.instrument import instrument

STREAMS_STD = 0.02
"""Standard deviation of the matrices that compute the weights of several streams, by every rule."""


DEEP = 1000
"""Largest depth that a command builds without a message. Building and fingerprinting take time in proportion to it."""


@cache  # a command builds several models of the same depth
def notify_of_depth(depth: int) -> None:
    """Print that building a deep model takes long; for commands, because a model's constructor prints nothing."""
    if depth > DEEP:
        notify(f"model.depth={depth}: building the blocks, which takes seconds for each hundred of them")


def derive_seed(seed: int, name: str) -> int:
    """Return a 64-bit seed for the tensor or module `name`: the first bytes of a SHA-256."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


def role_of(name: str) -> str | None:
    """Return the role of a weight, from its name; None for norms and biases.

    Init rules have all roles but `streams`.
    """
    parts = name.split(".")
    if parts[-1] != "weight":
        return None
    if parts[0] == "embed" and parts[1] in ("tokens", "positions"):
        return f"embed.{parts[1]}"
    if name == "head.weight":
        return "head"
    if parts[-2] == "fn" and {"wiring", "close"} & set(parts):
        return "streams"
    if parts[0] == "blocks" and len(parts) == 5 and parts[2] in ("attn", "mlp"):
        leaf = {"value_embed": "v", "norm": None, "value_gate": None}.get(parts[3], parts[3])
        return leaf and f"{parts[2]}.{leaf}"
    return None


def standard_deviation(
    rule_name: str, name: str, shape: Sequence[int], depth: int, width: int, ratio: float = 1.0
) -> float | None:
    """Return the initial standard deviation of a parameter by an init rule; None for norms, wirings and biases.

    Args:
        ratio: `ModelConfig.width_ratio`: matrices of blocks have 1 / sqrt(ratio) of the rule's.
    """
    if (role := role_of(name)) is None:
        return None
    if role == "streams":
        return STREAMS_STD
    fan_out, fan_in = shape if "value_embed" not in name else (shape[1], shape[1])  # as W_v
    layer = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0
    weight = Weight(role=role, fan_in=fan_in, fan_out=fan_out, depth=depth, width=width, layer=layer)
    return INIT_RULES[rule_name](weight) / (math.sqrt(ratio) if layer else 1.0)


@torch.no_grad()
def initialise(model: GPT, rule_name: str, seed: int, ratio: float = 1.0) -> None:
    """Draw every weight by an init rule and set the biases of linear layers to 0, in place.

    Parameters of norms and wirings keep their values. `ratio` is that of `standard_deviation`.
    """
    depth, width = len(model.blocks), model.embed.tokens.embedding_dim
    for name, parameter in model.named_parameters():
        std = standard_deviation(rule_name, name, parameter.shape, depth, width, ratio)
        if std is None:
            if name.endswith(".bias") and role_of(name.removesuffix("bias") + "weight") is not None:
                parameter.zero_()
            continue
        generator = np.random.Generator(np.random.Philox(key=derive_seed(seed, name)))
        values = generator.standard_normal(math.prod(parameter.shape), dtype=np.float32)
        parameter.copy_(torch.from_numpy(values).reshape(parameter.shape) * std)


def build_model(config: RunConfig, vocab_size: int) -> GPT:
    """Return the model of a validated config, initialised and projected, on the CPU in float32.

    Each norm is built with torch's global generator seeded from (seed, number of the norm), so that it always draws
    the same parameters. The state of the generator is restored afterwards.
    """
    count = 0

    def make_norm(width: int, **site: bool) -> nn.Module:
        nonlocal count
        torch.default_generator.manual_seed(derive_seed(config.seed, f"norm/{count}") % 2**63)
        count += 1
        return instrument(config.norm.at(**site).build(width))

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(config.seed, "wiring") % 2**63)
        model = GPT(config.model, config.placement, make_norm, vocab_size)
    initialise(model, config.init_rule, config.seed, config.model.width_ratio)
    with torch.no_grad():
        config.placement.project(dict(model.named_parameters()))
    return model
