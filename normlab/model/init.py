"""Build a model from a config and draw its initial weights.

Each weight is drawn from (seed, parameter name), on the CPU, by a counter-based generator: two models with the same
seed have equal weights wherever name and shape agree, on every machine. A norm that draws its own parameters draws
them from (seed, number of the norm in the model).
"""

import hashlib
import math
from functools import cache

import numpy as np
import torch
from torch import nn

from normlab.base.errors import notify
from normlab.catalogue.parameters import EMBEDDING
from normlab.catalogue.placements.init_rules import INIT_RULES, Weight
from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT
from normlab.model.instrument import instrument
from normlab.model.modules import build_norm

STREAMS = "streams"
"""The role in `init_roles` of the matrices that compute the weights of several streams. No init rule has it."""
STREAMS_STD = 0.02
"""Standard deviation of these matrices by every rule."""
VALUES = "attn.v"
"""The role of the matrices of values, and of the embeddings of values."""

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


def drawn_weights(model: GPT) -> dict[str, Weight]:
    """Return each weight that an init rule draws, with what the rule may know of it, by the weight's name.

    The module that makes a weight gives it a role in its `init_roles`. Any other parameter keeps the value with which
    it was made: gains, numbers of a placement, matrices of a norm, gates of value embeddings.
    """
    depth, width = len(model.blocks), model.embed.tokens.embedding_dim
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    weights: dict[str, Weight] = {}
    for path, module in model.named_modules():
        # The name gives the number of the block only, which a module does not know; 0 outside the blocks.
        layer = 0
        if path.startswith("blocks."):
            layer = int(path.split(".")[1]) + 1
        init_roles: dict[str, str] = getattr(module, "init_roles", {})
        for leaf, role in init_roles.items():
            name = f"{path}.{leaf}"
            # A model may lack an optional weight, and a tied head has the name of the embedding.
            if name not in shapes:
                continue
            fan_out, fan_in = shapes[name]
            # The embedding of a token's value stands for W_v x, so it has the fans of W_v, (D, D), whatever V is.
            if role == VALUES and model.roles[name] == EMBEDDING:
                fan_out = fan_in
            weights[name] = Weight(role=role, fan_in=fan_in, fan_out=fan_out, depth=depth, width=width, layer=layer)
    return weights


def standard_deviation(rule_name: str, weight: Weight, ratio: float = 1.0) -> float:
    """Return the initial standard deviation of a weight by an init rule.

    Args:
        ratio: `ModelConfig.width_ratio`: matrices of blocks have 1 / sqrt(ratio) of the rule's.
    """
    # No init rule has this role, so these matrices start alike by all of them.
    if weight.role == STREAMS:
        return STREAMS_STD
    std = INIT_RULES[rule_name].std(weight)
    return std / math.sqrt(ratio) if weight.layer else std


@torch.no_grad()
def initialise(model: GPT, rule_name: str, seed: int, ratio: float = 1.0) -> None:
    """Draw every weight by an init rule and set the biases of these linear layers to 0, in place.

    Parameters of norms and wirings keep their values. `ratio` is that of `standard_deviation`.
    """
    weights = drawn_weights(model)
    for name, parameter in model.named_parameters():
        if name in weights:
            # One generator for each name: a weight does not depend on what else the model has.
            generator = np.random.Generator(np.random.Philox(key=derive_seed(seed, name)))
            values = generator.standard_normal(math.prod(parameter.shape), dtype=np.float32)
            std = standard_deviation(rule_name, weights[name], ratio)
            parameter.copy_(torch.from_numpy(values).reshape(parameter.shape) * std)
        elif name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in weights:
            # torch.nn.Linear draws its bias; the biases of norms have other owners, and start as these say.
            parameter.zero_()


def build_model(config: RunConfig, vocab_size: int) -> GPT:
    """Return the model of a validated config, initialised and projected, on the CPU in float32.

    Each norm is built with torch's global generator seeded from (seed, number of the norm), so that it always draws
    the same parameters. The state of the generator is restored afterwards.
    """
    count = 0

    def make_norm(width: int, site: str, layer: int | None = None) -> nn.Module:
        nonlocal count
        torch.default_generator.manual_seed(derive_seed(config.seed, f"norm/{count}") % 2**63)
        count += 1
        return instrument(build_norm(config.norm_at(site, layer), width), site)

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(config.seed, "wiring") % 2**63)
        model = GPT(config.model, config.placement, make_norm, vocab_size)
    initialise(model, config.init_rule, config.seed, config.model.width_ratio)
    with torch.no_grad():
        config.placement.project(dict(model.named_parameters()))
    return model
