"""Closed forms of what a placement does to a signal at initialisation, each at the init that it is stated for.

That need not be the init that the placement belongs to, which `init_rules.BELONGS` has.

Measured on small models: layer norm without gain and bias, no biases, untied embeddings, the mean over a few seeds
(single seeds vary by a factor of three in a gradient).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from normlab.config import AdamW, ModelConfig, RunConfig, TrainConfig
from normlab.corpora import StdlibData
from normlab.norms.base import NORMS
from normlab.placements.base import PLACEMENTS
from normlab.verify.check import Check
from normlab.verify.signal import Signal, measure, slope

SEEDS = 6
WIDTH, CONTEXT, BATCH = 64, 32, 4


@dataclass(frozen=True, slots=True)
class Law:
    """A law of one placement."""

    placement: str
    init: str
    says: str
    source: str
    depths: tuple[int, ...]
    measured: Callable[[list[Profile]], float]
    """One number from the profiles at the depths, in their order."""
    at_least: float
    at_most: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Means over seeds, at one depth."""

    depth: int
    stream: float
    """RMS after the last block."""
    first: float
    """Gradient norm of the first block's down projection, and of the last's."""
    last: float


def last_slope(profiles: list[Profile]) -> float:
    """The power of L by which the last gradient grows."""
    return slope([p.depth for p in profiles], [p.last for p in profiles])


def first_slope(profiles: list[Profile]) -> float:
    """The power of L by which the first gradient grows."""
    return slope([p.depth for p in profiles], [p.first for p in profiles])


def over_root_of_2l(profiles: list[Profile]) -> float:
    """The stream's RMS over sqrt(2L), at the depth that is furthest from it."""
    return max((p.stream / math.sqrt(2 * p.depth) for p in profiles), key=lambda ratio: abs(ratio - 1))


def last_over_first(profiles: list[Profile]) -> float:
    """The last gradient over the first, at the greatest depth."""
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
        "pre", "gpt2", "the last gradient is larger than post's: Xiong's comparison turns round",
        "measured here", (8,), lambda profiles: profiles[0].last / profile("post", "gpt2", 8).last, 2.0, 50.0,
    ),
)  # fmt: skip


def law_checks(placement: str) -> Iterator[Check]:
    """Those of one placement."""
    for law in LAWS:
        if law.placement != placement:
            continue
        value = law.measured([profile(placement, law.init, depth) for depth in law.depths])
        depths = ", ".join(map(str, law.depths))
        yield Check(
            of=f"placement {placement}",
            check=f"with layernorm at init={law.init}, {law.says}",
            passed=law.at_least <= value <= law.at_most,
            seen=f"{value:.3f} at L = {depths}, from {law.at_least:g} to {law.at_most:g}",
        )


@cache
def profile(placement: str, init: str, depth: int) -> Profile:
    """The mean over seeds."""
    seen = [_measured(placement, init, depth, seed) for seed in range(SEEDS)]
    return Profile(
        depth,
        stream=sum(signal.stream[-1] for signal in seen) / SEEDS,
        first=sum(signal.gradient[0] for signal in seen) / SEEDS,
        last=sum(signal.gradient[-1] for signal in seen) / SEEDS,
    )


def _measured(placement: str, init: str, depth: int, seed: int) -> Signal:
    model = ModelConfig(
        depth=depth, width=WIDTH, heads=2, context=CONTEXT, bias=False, tie_embeddings=False, mlp_width=4 * WIDTH
    )
    norm = NORMS["layernorm"](gain=False, bias=False)  # pyright: ignore[reportCallIssue]
    train = TrainConfig(batch_size=BATCH)
    config = RunConfig(
        norm=norm, placement=PLACEMENTS[placement], model=model, data=StdlibData(), optim=AdamW(), train=train,
        init=init, seed=seed,
    )  # fmt: skip
    return measure(config)[0]
