"""Checks of initial values: laws of signal propagation in papers, and the standard deviations of init rules.

A law has a closed form, and holds with its source's init rule, which may differ from the placement's own.

The models are small: layer norm without gain and bias, no biases, untied embeddings. Profiles are means over a few
seeds, because a gradient differs between seeds by up to a factor of three.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch

from normlab.base.errors import unknown
from normlab.catalogue.corpora import StdlibData
from normlab.catalogue.norms.base import NORMS
from normlab.catalogue.optimizers.options import AdamW
from normlab.catalogue.placements.base import PLACEMENTS, Placement
from normlab.catalogue.placements.init_rules import standard_deviations
from normlab.config.model import ModelConfig
from normlab.config.schema import RunConfig
from normlab.config.train import TrainConfig
from normlab.model.gpt import GPT
from normlab.model.init import build_model, derive_seed, initialise
from normlab.model.instrument import StatisticsSelection
from normlab.model.runner import SingleRun
from normlab.model.small import VOCAB
from normlab.verify.check import Check, check_no_problems, fails_on_error

SEEDS = 6
WIDTH, CONTEXT, BATCH = 64, 32, 4
VOCAB_SIZE = 512
RULE_SIZES = ((2, 16), (7, 24))
"""Depths and widths of the models whose standard deviations are checked."""


class Profile(NamedTuple):
    """Means over seeds at one depth."""

    depth: int
    stream: float
    """RMS after the last block."""
    first: float
    """Gradient norm of the first block's down projection."""
    last: float
    """Gradient norm of the last block's down projection."""


def slope(depths: Sequence[float], values: Sequence[float]) -> float:
    """Return the power of the depth by which a value grows: the least-squares slope of its logarithm."""
    return float(np.polyfit(np.log(depths), np.log(values), 1)[0])


def measure(config: RunConfig, model: GPT) -> Profile:
    """Return the profile of one forward and backward pass over random tokens, drawn by the config's seed.

    Token r has a probability proportional to 1 / r (Zipf's law). Squares are in float64: the stream may leave the range
    of those of float32.
    """
    weights = 1 / np.arange(1, VOCAB_SIZE + 1)
    generator = np.random.Generator(np.random.Philox(key=derive_seed(config.seed, "probe")))
    drawn_BT = generator.random((config.train.batch_size, config.model.context + 1))
    edges = np.cumsum(weights / weights.sum())
    tokens_BT = torch.from_numpy(np.searchsorted(edges, drawn_BT).clip(max=VOCAB_SIZE - 1))
    mean_square: StatisticsSelection = {"resid": (("resid", lambda view: view.x.double().square().mean((-2, -1))),)}
    output = SingleRun(model, compiled=False).loss(tokens_BT[:, :-1], tokens_BT[:, 1:], mean_square)
    by_layer = {column.layer: value.item() for column, value in output.statistics.items()}
    stream = by_layer[len(model.blocks) + 1] ** 0.5
    ends = [model.get_parameter(f"blocks.{layer}.mlp.down.weight") for layer in (0, len(model.blocks) - 1)]
    first, last = torch.autograd.grad(output.loss, ends, materialize_grads=True)
    return Profile(len(model.blocks), stream, first.double().norm().item(), last.double().norm().item())


class Law(NamedTuple):
    """A law of some placements, which declare its name: a statistic of the profiles lies in an interval."""

    init: str
    claim: str
    source: str
    depths: tuple[int, ...]
    statistic: Callable[[list[Profile]], float]
    """Maps the profiles, in the order of the depths, to one number."""
    at_least: float
    at_most: float


def power_of_depth(gradient: str) -> Callable[[list[Profile]], float]:
    """Return a statistic: the power of L by which the `first` or the `last` gradient grows."""

    def statistic(profiles: list[Profile]) -> float:
        return slope([profile.depth for profile in profiles], [getattr(profile, gradient) for profile in profiles])

    return statistic


def over_root_of_2l(profiles: list[Profile]) -> float:
    """Return the stream's RMS over sqrt(2L), at the depth where it is furthest from 1."""
    ratios = [profile.stream / math.sqrt(2 * profile.depth) for profile in profiles]
    return max(ratios, key=lambda ratio: abs(ratio - 1))


DEPTHS = (4, 8, 16)
LAST_POWER, FIRST_POWER = power_of_depth("last"), power_of_depth("first")
XIONG = "Xiong et al. 2020, arXiv:2002.04745, theorem 1"
LAWS = {
    "last_gradient_constant": Law(
        "xavier", "the last gradient does not depend on L", XIONG, DEPTHS, LAST_POWER, -0.2, 0.2
    ),
    "last_gradient_falls_with_depth": Law(
        "xavier", "the last gradient falls as a power of L", XIONG, DEPTHS, LAST_POWER, -0.75, -0.3
    ),
    "stream_is_root_of_2l": Law(
        "xavier", "the stream's RMS is the root of 2L", "2L branches of RMS 1, independent of each other",
        DEPTHS, over_root_of_2l, 0.93, 1.07,
    ),
    "first_and_last_gradient_equal": Law(
        "deepnorm", "the first and the last gradient are equal", "Wang et al. 2022, arXiv:2203.00555",
        (16,), lambda profiles: profiles[0].last / profiles[0].first, 0.85, 1.15,
    ),
    "last_gradient_over_depth": Law(
        "gpt2", "the last gradient falls as 1 / L", "N(2L x + F) divides the branch by 2L",
        DEPTHS, LAST_POWER, -1.1, -0.9,
    ),
    "first_gradient_constant": Law(
        "gpt2", "the first gradient does not depend on L", "the first block has no factor 2L",
        DEPTHS, FIRST_POWER, -0.1, 0.1,
    ),
    "last_gradient_above_post": Law(
        "gpt2", "the last gradient is larger than post's: Xiong's comparison is reversed",
        "measured here", (8,), lambda profiles: profiles[0].last / profile("post", "gpt2", 8).last, 2.0, 50.0,
    ),
}  # fmt: skip
"""The laws by the names that placements declare (`Placement.laws`)."""


@fails_on_error("follows the laws that it declares")
def law_checks(placement: Placement) -> Iterator[Check]:
    """Yield the check of each law that a placement declares; one with an unknown name fails."""
    subject = f"placement {placement.name}"
    for name in placement.laws:
        if name not in LAWS:
            yield Check(subject, "declares laws that are known", passed=False, result=unknown("law", name, LAWS))
            continue
        law = LAWS[name]
        value = law.statistic([profile(placement.name, law.init, depth) for depth in law.depths])
        depths = ", ".join(map(str, law.depths))
        yield Check(
            subject,
            f"with layernorm at init={law.init}, {law.claim}",
            passed=law.at_least <= value <= law.at_most,
            result=f"expected {law.at_least:g} to {law.at_most:g}, found {value:.3f} at L = {depths}",
        )


@cache
def profile(placement: str, init: str, depth: int) -> Profile:
    """Return the mean profile of a placement's models at one depth, over the seeds."""
    options = ModelConfig(
        depth=depth, width=WIDTH, heads=2, context=CONTEXT, bias=False, tie_embeddings=False, mlp_width=4 * WIDTH
    )
    config = RunConfig(
        norm=NORMS["layernorm"](gain=False, bias=False),  # pyright: ignore[reportCallIssue]
        placement=PLACEMENTS[placement], model=options, data=StdlibData(), optim=AdamW(),
        train=TrainConfig(batch_size=BATCH), init=init,
    )  # fmt: skip
    model, profiles = build_model(config, VOCAB_SIZE).train(), []
    for seed in range(SEEDS):
        initialise(model, config.init_rule, seed)  # the norm and these placements draw nothing themselves
        profiles.append(measure(dataclasses.replace(config, seed=seed), model))
    _, *measured = zip(*profiles, strict=True)
    return Profile(depth, *map(fmean, measured))


def rule_checks(rule: str) -> Iterator[Check]:
    """Check that a rule gives a finite number, 0 or more, for each matrix of models of two sizes."""
    stds: list[float] = []
    for depth, width in RULE_SIZES:
        stds += standard_deviations(rule, depth=depth, width=width, mlp_width=3 * width, vocab_size=VOCAB)
    wrong = [std for std in stds if not (isinstance(std, (int, float)) and math.isfinite(std) and std >= 0)]
    problems = [f"expected a finite number, 0 or more, found {std!r}" for std in wrong[:1]]
    yield check_no_problems(f"init {rule}", "gives each matrix a standard deviation", problems, f"{len(stds)} numbers")
