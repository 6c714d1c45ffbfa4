"""Init rules: the initial standard deviation of each weight matrix. Imports no torch.

A rule is one function from a `Weight` (role, fans, depth of the model) to a standard deviation; weights are drawn
from a normal distribution with mean 0. Biases start at 0; a norm sets its own gains. Roles: `embed.tokens`,
`embed.positions`, `attn.q`, `attn.k`, `attn.v`, `attn.gate`, `attn.out`, `mlp.up`, `mlp.gate`, `mlp.down`, `head`.

Shapes: a weight is (outputs, inputs), as in `nn.Linear`.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

from normlab.base.plugins import claim_name

OUTPUTS = ("attn.out", "mlp.down")
"""Roles whose output is added to the residual stream."""
EMBEDDINGS = ("embed.tokens", "embed.positions", "head")
ROLES = (*EMBEDDINGS, *OUTPUTS, "attn.q", "attn.k", "attn.v", "attn.gate", "mlp.up", "mlp.gate")
ZERO = (*OUTPUTS, "head")
"""Roles that start at 0 in recipes whose sub-layers and logits do."""
UNSCALED = (*EMBEDDINGS, "attn.q", "attn.k", "attn.gate")
"""Roles that the rules based on Xavier do not scale."""


@dataclass(frozen=True, slots=True)
class Weight:
    """The properties of a weight matrix that an init rule may use."""

    role: str
    fan_in: int
    fan_out: int
    depth: int
    """Number of blocks L; the stream receives 2L additions."""
    width: int
    """Width of the residual stream."""
    layer: int = 0
    """Number of the block, counted from 1; 0 outside the blocks."""


Std = Callable[[Weight], float]
"""The function of an init rule: the standard deviation of a weight."""


@dataclass(frozen=True, slots=True)
class InitRule:
    """An init rule: its function, whose docstring is the formula, and what `normlab list init` says of it."""

    std: Std
    title: str = ""
    """The name in papers and public code; empty for a plugin's rule without one."""
    source: str = ""
    """Author, year, and where the rule stands."""
    version: int = 1
    """Part of a run's identity. Raise it when the rule gives other numbers."""


INIT_RULES: dict[str, InitRule] = {}

SCALED_RULES = {"mup": ("gpt2", "gpt2_scaled"), "completep": ("gpt2",)}
"""The init rules that a rule of depth and width transfer (`model.scaling`) may scale, the default first: their numbers
do not depend on what it scales."""


@overload
def init_rule(std: Std, /) -> Std: ...
@overload
def init_rule(*, title: str = "", source: str = "", version: int = 1) -> Callable[[Std], Std]: ...
def init_rule(
    std: Std | None = None, /, *, title: str = "", source: str = "", version: int = 1
) -> Std | Callable[[Std], Std]:
    """Register a rule under the name of its function: `@init_rule`, or with what the rule declares in brackets.

    Raises:
        ConfigError: The name is taken.
    """

    def register(std: Std) -> Std:
        claim_name("init rule", std.__name__, known=std.__name__ in INIT_RULES)
        INIT_RULES[std.__name__] = InitRule(std, title, source, version)
        return std

    return register if std is None else register(std)


def standard_deviations(name: str, *, depth: int, width: int, mlp_width: int, vocab_size: int) -> list[float]:
    """Return the standard deviations of all roles, layers and fans in a model of these sizes.

    Embeddings and head exist outside the blocks only (layer 0), every other role in the blocks only.
    """
    std = INIT_RULES[name].std
    fans = ((width, width), (width, mlp_width), (mlp_width, width), (width, vocab_size))
    deviations: list[float] = []
    for role in ROLES:
        layers = [0] if role in EMBEDDINGS else range(1, depth + 1)
        for layer, (fan_in, fan_out) in itertools.product(layers, fans):
            weight = Weight(role=role, fan_in=fan_in, fan_out=fan_out, depth=depth, width=width, layer=layer)
            deviations.append(std(weight))
    return deviations


@init_rule(title="GPT-2", source="Radford et al. 2019 as in openai/gpt-2; the position embedding too, as in nanoGPT")
def gpt2(weight: Weight) -> float:
    """N(0, 0.02) for every matrix."""
    return 0.02


@init_rule(
    title="GPT-2 with scaled outputs",
    source="Radford et al. 2019, section 2.3: 1 / sqrt(N) at initialisation, N the number of residual layers",
)
def gpt2_scaled(weight: Weight) -> float:
    """N(0, 0.02), and 0.02 / sqrt(2L) for the two matrices of a block that write into the stream."""
    return 0.02 / math.sqrt(2 * weight.depth) if weight.role in OUTPUTS else 0.02


@init_rule(
    title="Xavier",
    source="Glorot & Bengio 2010, eq. 16, in its normal form; used with post-norm by Xiong et al. 2020, "
    "arXiv:2002.04745, section 3",
)
def xavier(weight: Weight) -> float:
    """sqrt(2 / (fan_in + fan_out)) for the blocks' matrices; N(0, 0.02) for embeddings and head."""
    # By the formula a vocabulary of 50,000 would have embeddings of 0.006, since each token counts as an input.
    if weight.role in EMBEDDINGS:
        return 0.02
    return math.sqrt(2 / (weight.fan_in + weight.fan_out))


@init_rule(
    title="Xavier scaled by depth",
    source="after the public code of B2T (Takase et al. 2022, arXiv:2206.00330), which divides the init of "
    "fairseq by sqrt(L): Xavier for attention, with queries, keys and values divided by sqrt(2), and "
    "torch's default for the MLP",
)
def xavier_scaled(weight: Weight) -> float:
    """Xavier, divided by sqrt(L) for every matrix of a block."""
    return xavier(weight) / (1 if weight.role in EMBEDDINGS else math.sqrt(weight.depth))


@init_rule(title="DeepNorm", source="Wang et al. 2022, arXiv:2203.00555, decoder-only")
def deepnorm(weight: Weight) -> float:
    """Xavier, times beta = (8L)^(-1/4) for values, attention output and MLP; queries and keys are not scaled."""
    return xavier(weight) * (1 if weight.role in UNSCALED else (8 * weight.depth) ** -0.25)


@init_rule(
    title="DeepNorm with the inverse gain",
    source="this project. pixeli99/MixLN and lmsdss/LayerNorm-Scaling have this exponent with another alpha",
)
def deepnorm_inverse(weight: Weight) -> float:
    """Xavier, times (8L)^(+1/4) for values, attention output and MLP: deepnorm's exponent with its sign reversed."""
    return xavier(weight) * (1 if weight.role in UNSCALED else (8 * weight.depth) ** 0.25)


@init_rule(title="Sub-LN", source="Wang et al. 2022, arXiv:2210.06423, decoder-only")
def sub_ln(weight: Weight) -> float:
    """Xavier, times gamma = sqrt(ln 2L) for values, attention output and MLP; queries and keys are not scaled."""
    return xavier(weight) * (1 if weight.role in UNSCALED else math.sqrt(math.log(2 * weight.depth)))


@init_rule(title="SmallInit", source="Nguyen & Salazar 2019, arXiv:1910.05895")
def smallinit(weight: Weight) -> float:
    """sqrt(2 / 5D) for every matrix, D the width of the stream: Xavier for a D x 4D matrix."""
    return math.sqrt(2 / (5 * weight.width))


@init_rule(
    title="SmallInit with scaled outputs",
    source="the public code of HybridNorm (Zhuo et al. 2025, arXiv:2503.04598)",
)
def smallinit_scaled(weight: Weight) -> float:
    """smallinit, divided by sqrt(2L) for the two matrices of a block that write into the stream."""
    return smallinit(weight) / (math.sqrt(2 * weight.depth) if weight.role in OUTPUTS else 1)


@init_rule(
    title="depth-scaled init",
    source="Zhang, Titov & Sennrich 2019, arXiv:1908.11365, the idea; this form is that of GPT-style code",
)
def depth_scaled(weight: Weight) -> float:
    """N(0, 0.02), and 0.02 / sqrt(2l) for the two matrices of block l that write into the stream."""
    return 0.02 / math.sqrt(2 * weight.layer) if weight.role in OUTPUTS else 0.02


@init_rule(title="TinyInit", source="Yin et al. 2025, arXiv:2504.07866 (Pangu Ultra), as a secondary source reports it")
def tinyinit(weight: Weight) -> float:
    """sqrt(1 / (2 D L)) for every matrix of a block, D the width of the stream; N(0, 0.5) for the token embedding.

    Positions and head start at N(0, 0.02), our choice; a tied head starts at N(0, 0.5) with the embedding.
    """
    if weight.role in EMBEDDINGS:
        return 0.5 if weight.role == "embed.tokens" else 0.02
    return math.sqrt(1 / (2 * weight.width * weight.depth))


@init_rule(title="nanochat", source="karpathy/nanochat at 3a5e0bc; the last after Yang et al. 2023, arXiv:2310.17813")
def nanochat(weight: Weight) -> float:
    """0 for outputs and head, N(0, 1) for embeddings, min(1, sqrt(fan_out / fan_in)) / sqrt(fan_in) for the others.

    A tied head starts at N(0, 1) with the embedding.
    """
    if weight.role in EMBEDDINGS or weight.role in ZERO:
        return float(weight.role not in ZERO)
    return min(1, math.sqrt(weight.fan_out / weight.fan_in)) / math.sqrt(weight.fan_in)


@init_rule(title="modded-nanogpt", source="KellerJordan/modded-nanogpt at f411b3d, track 3")
def modded(weight: Weight) -> float:
    """0 for outputs and head, N(0, 1) for embeddings, sqrt(0.33 / fan_in) for the others.

    A tied head starts at N(0, 1) with the embedding.
    """
    if weight.role in EMBEDDINGS or weight.role in ZERO:
        return float(weight.role not in ZERO)
    return math.sqrt(0.33 / weight.fan_in)
