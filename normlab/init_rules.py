"""Init rules: the standard deviation that each weight matrix is drawn with. Imports no torch.

A rule is one function from a `Weight` (which matrix, its fans, the model's depth) to a standard deviation;
weights are drawn from a normal distribution with mean zero. Biases start at zero; a norm starts its own
gains. Roles: `embed.tokens`, `embed.positions`, `attn.q`, `attn.k`, `attn.v`, `attn.out`, `mlp.up`,
`mlp.gate`, `mlp.down`, `head`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from normlab.errors import ConfigError, unknown
from normlab.source import claim

OUTPUTS = ("attn.out", "mlp.down")
"""The matrices that write into the residual stream."""
EMBEDDINGS = ("embed.tokens", "embed.positions", "head")
ROLES = (*EMBEDDINGS, *OUTPUTS, "attn.q", "attn.k", "attn.v", "mlp.up", "mlp.gate")
UNSCALED = (*EMBEDDINGS, "attn.q", "attn.k")
"""What the rules that scale Xavier leave alone."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight matrix, as an init rule sees it."""

    role: str
    fan_in: int
    fan_out: int
    depth: int
    """Number of blocks L; the stream receives 2L additions."""
    width: int
    """Of the stream."""
    layer: int = 0
    """Of the block, counted from 1; 0 outside the blocks."""


InitRule = Callable[[Weight], float]

INIT_RULES: dict[str, InitRule] = {}


def init_rule(rule: InitRule) -> InitRule:
    """Make a rule known by its function's name. A name that is taken is an error."""
    known = INIT_RULES.get(rule.__name__)
    claim("init rule", rule.__name__, known=known is not None, same=known is rule)
    INIT_RULES[rule.__name__] = rule
    return rule


def get_init_rule(name: str) -> InitRule:
    """The rule called `name`.

    Raises:
        ConfigError: There is none; the message lists those that there are.
    """
    if name not in INIT_RULES:
        raise ConfigError("init: " + unknown("rule", name, ["auto", *INIT_RULES]))
    return INIT_RULES[name]


def numbers_of(name: str, *, depth: int, width: int, mlp_width: int, vocab_size: int) -> list[float]:
    """What a rule gives in a model of these sizes, whatever weight it is asked for: what the rule is, to a run.

    A role is asked for at those layers only that it has. Each has a place at all of 0 to L: a run's id is a hash of
    this list, and its length stays.
    """
    rule = get_init_rule(name)
    fans = ((width, width), (width, mlp_width), (mlp_width, width), (width, vocab_size))
    return [
        rule(
            Weight(
                role=role,
                fan_in=fan_in,
                fan_out=fan_out,
                depth=depth,
                width=width,
                layer=0 if role in EMBEDDINGS else max(layer, 1),
            )
        )
        for layer in range(depth + 1)
        for role in ROLES
        for fan_in, fan_out in fans
    ]


@init_rule
def gpt2(weight: Weight) -> float:
    """N(0, 0.02) for every matrix.

    Source: Radford et al. 2019 as in openai/gpt-2; the position embedding too, as in nanoGPT.
    """
    return 0.02


@init_rule
def gpt2_scaled(weight: Weight) -> float:
    """N(0, 0.02), and 0.02 / sqrt(2L) for the two matrices of a block that write into the stream.

    Source: Radford et al. 2019, section 2.3: by 1 / sqrt(N) at initialisation, N the number of residual layers.
    """
    return 0.02 / math.sqrt(2 * weight.depth) if weight.role in OUTPUTS else 0.02


@init_rule
def xavier(weight: Weight) -> float:
    """sqrt(2 / (fan_in + fan_out)) for the blocks' matrices; N(0, 0.02) for embeddings and head.

    Source: Glorot & Bengio 2010, eq. 16, in its normal form; the rule that post-norm belongs to
    (Xiong et al. 2020, arXiv:2002.04745, section 3).
    """
    if weight.role in EMBEDDINGS:
        return 0.02
    return math.sqrt(2 / (weight.fan_in + weight.fan_out))


@init_rule
def xavier_scaled(weight: Weight) -> float:
    """Xavier, over sqrt(L) for every matrix of a block.

    Source: after the public code of B2T (Takase et al. 2022, arXiv:2206.00330), which divides by sqrt(L) what fairseq
    draws: Xavier for attention, its queries, keys and values smaller by sqrt(2), and torch's default for the MLP.
    """
    return xavier(weight) / (1 if weight.role in EMBEDDINGS else math.sqrt(weight.depth))


@init_rule
def deepnorm(weight: Weight) -> float:
    """Xavier, times beta = (8L)^(-1/4) for values, attention output and MLP; queries and keys are not scaled.

    Source: Wang et al. 2022, arXiv:2203.00555, of decoders alone.
    """
    return xavier(weight) * (1 if weight.role in UNSCALED else (8 * weight.depth) ** -0.25)


@init_rule
def sub_ln(weight: Weight) -> float:
    """Xavier, times gamma = sqrt(ln 2L) for values, attention output and MLP; queries and keys are not scaled.

    Source: Wang et al. 2022, arXiv:2210.06423, of decoders alone.
    """
    return xavier(weight) * (1 if weight.role in UNSCALED else math.sqrt(math.log(2 * weight.depth)))


@init_rule
def smallinit(weight: Weight) -> float:
    """sqrt(2 / 5D) for every matrix, D the width of the stream: what Xavier is for a D x 4D matrix.

    Source: Nguyen & Salazar 2019, arXiv:1910.05895.
    """
    return math.sqrt(2 / (5 * weight.width))


@init_rule
def smallinit_scaled(weight: Weight) -> float:
    """As smallinit, over sqrt(2L) for the two matrices of a block that write into the stream.

    Source: the public code of HybridNorm (Zhuo et al. 2025, arXiv:2503.04598).
    """
    return smallinit(weight) / (math.sqrt(2 * weight.depth) if weight.role in OUTPUTS else 1)


@init_rule
def depth_scaled(weight: Weight) -> float:
    """N(0, 0.02), and 0.02 / sqrt(2l) for the two matrices of block l that write into the stream.

    Source: Zhang, Titov & Sennrich 2019, arXiv:1908.11365, whose idea it is; in this form GPT-style code has it.
    """
    return 0.02 / math.sqrt(2 * weight.layer) if weight.role in OUTPUTS else 0.02


@init_rule
def tinyinit(weight: Weight) -> float:
    """sqrt(1 / (2 D L)) for every matrix of a block, D the width of the stream; N(0, 0.5) for the token embedding.

    Positions and head start at N(0, 0.02), which is our choice; a tied head starts at N(0, 0.5) with the embedding.

    Source: Yin et al. 2025, arXiv:2504.07866 (Pangu Ultra), as a secondary source reports it.
    """
    if weight.role in EMBEDDINGS:
        return 0.5 if weight.role == "embed.tokens" else 0.02
    return math.sqrt(1 / (2 * weight.width * weight.depth))
