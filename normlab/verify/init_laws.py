"""Closed-form laws of signal propagation at initialisation, each at the init that it is stated for.

That init may differ from the placement's own, `init_rules.INIT_OF_PLACEMENT`.

The models are small: layer norm without gain and bias, no biases, untied embeddings. Profiles are means over a few
seeds, since single seeds differ by a factor of three in a gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from statistics import fmean

from normlab.config.corpora import StdlibData
from normlab.config.schema import AdamW, ModelConfig, RunConfig, TrainConfig
from normlab.model.init import build_model, initialise
from normlab.norms.base import NORMS
from normlab.placements.base import PLACEMENTS
from normlab.report.signal_propagation import slope
from normlab.train.signal_propagation import VOCAB, measure
from normlab.verify.check import Check

SEEDS = 6
WIDTH, CONTEXT, BATCH = 64, 32, 4


@dataclass(frozen=True, slots=True)
class Law:
    """A law of one placement: a statistic of the profiles lies in an interval."""

    placement: str
    init: str
    claim: str
    source: str
    depths: tuple[int, ...]
    statistic: Callable[[list[Profile]], float]
    """Maps the profiles, in the order of the depths, to one number."""
    at_least: float
    at_most: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Means over seeds at one depth."""

    depth: int
    stream: float
    """RMS after the last block."""
    first: float
    """Gradient norm of the first block's down projection."""
    last: float
    """Gradient norm of the last block's down projection."""


def last_slope(profiles: list[Profile]) -> float:
    """Return the power of L by which the last gradient grows."""
    return slope([p.depth for p in profiles], [p.last for p in profiles])


def first_slope(profiles: list[Profile]) -> float:
    """Return the power of L by which the first gradient grows."""
    return slope([p.depth for p in profiles], [p.first for p in profiles])


def over_root_of_2l(profiles: list[Profile]) -> float:
    """Return the stream's RMS over sqrt(2L), at the depth where it is furthest from 1."""
    return max((p.stream / math.sqrt(2 * p.depth) for p in profiles), key=lambda ratio: abs(ratio - 1))


def last_over_first(profiles: list[Profile]) -> float:
    """Return the ratio of the last gradient to the first, at the greatest depth."""
    return profiles[-1].last / profiles[-1].first


XIONG = "Xiong et al. 2020, arXiv:2002.04745, theorem 1"
LAWS = (
    Law("post", "xavier", "the last gradient does not depend on L", XIONG, (4, 8, 16), last_slope, -0.2, 0.2),
    Law("pre", "xavier", "the last gradient falls as a power of L", XIONG, (4, 8, 16), last_slope, -0.75, -0.3),
    Law(
        "peri", "xavier", "the stream's RMS is the root of 2L", "2L branches of RMS 1, independent of each other",
        (4, 8, 16), over_root_of_2l, 0.93, 1.07,
    ),
    Law(
        "res_post", "xavier", "the stream's RMS is the root of 2L", "2L branches of RMS 1, independent of each other",
        (4, 8, 16), over_root_of_2l, 0.93, 1.07,
    ),
    Law(
        "deepnorm", "deepnorm", "the first and the last gradient are equal", "Wang et al. 2022, arXiv:2203.00555",
        (16,), last_over_first, 0.85, 1.15,
    ),
    Law(
        "keel", "gpt2", "the last gradient falls as 1 / L", "N(2L x + F) divides the branch by 2L",
        (4, 8, 16), last_slope, -1.1, -0.9,
    ),
    Law(
        "keel", "gpt2", "the first gradient does not depend on L", "the first block has no factor 2L",
        (4, 8, 16), first_slope, -0.1, 0.1,
    ),
    Law(
        "pre", "gpt2", "the last gradient is larger than post's: Xiong's comparison is reversed",
        "measured here", (8,), lambda profiles: profiles[0].last / profile("post", "gpt2", 8).last, 2.0, 50.0,
    ),
)  # fmt: skip


def law_checks(placement: str) -> Iterator[Check]:
    """Check the laws of one placement."""
    for law in LAWS:
        if law.placement != placement:
            continue
        value = law.statistic([profile(placement, law.init, depth) for depth in law.depths])
        depths = ", ".join(map(str, law.depths))
        yield Check(
            subject=f"placement {placement}",
            claim=f"with layernorm at init={law.init}, {law.claim}",
            passed=law.at_least <= value <= law.at_most,
            result=f"{value:.3f} at L = {depths}, expected {law.at_least:g} to {law.at_most:g}",
        )


@cache
def profile(placement: str, init: str, depth: int) -> Profile:
    """Return the mean profile over the seeds."""
    options = ModelConfig(
        depth=depth, width=WIDTH, heads=2, context=CONTEXT, bias=False, tie_embeddings=False, mlp_width=4 * WIDTH
    )
    config = RunConfig(
        norm=NORMS["layernorm"](gain=False, bias=False),  # pyright: ignore[reportCallIssue]
        placement=PLACEMENTS[placement], model=options, data=StdlibData(), optim=AdamW(),
        train=TrainConfig(batch_size=BATCH), init=init,
    )  # fmt: skip
    model, signals = build_model(config, VOCAB).train(), []
    for seed in range(SEEDS):
        initialise(model, config.init_rule, seed)  # the norm and these placements draw nothing themselves
        signals.append(measure(dataclasses.replace(config, seed=seed), model)[0])
    return Profile(
        depth,
        stream=fmean(signal.stream[-1] for signal in signals),
        first=fmean(signal.gradient[0] for signal in signals),
        last=fmean(signal.gradient[-1] for signal in signals),
    )
