"""What was seen at initialisation: three numbers of each case at each depth, and what is made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from normlab.launch import compose_run
from normlab.probe import probe
from normlab.verify.signal import slope

WORDS = [
    "model.width=128", "model.heads=4", "model.bias=false", "model.tie_embeddings=false", "model.context=64",
    "train.batch_size=8",
]  # fmt: skip
LAYERNORM = ["norm=layernorm", "norm.gain=false", "norm.bias=false"]
KEEL_SAME = "keel placement.first_block=same"
"""Keel with a first block like all others."""
CASES = (
    ("post", "xavier"), ("pre", "xavier"), ("peri", "xavier"), ("res_post", "xavier"), ("lns", "xavier"),
    ("deepnorm", "deepnorm"), ("sub_ln", "sub_ln"), ("hybridnorm", "xavier"), ("siamese", "xavier"),
    ("resi_dual", "xavier"), (KEEL_SAME, "xavier"), ("keel", "gpt2"), ("none", "xavier"), ("pre", "gpt2"),
    ("post", "gpt2"), ("none", "gpt2"), ("peri", "gpt2_scaled"), ("res_post", "gpt2_scaled"),
)  # fmt: skip
"""Placement, with its options, and init rule; none is pre without any norm."""


@dataclass(frozen=True)
class Case:
    """Means over seeds at each depth; not a number where one is not finite."""

    depths: list[int]
    stream: list[float]
    """RMS after the last block."""
    first: list[float]
    """Gradient norm of the first block's `mlp.down.weight`, and of the last's."""
    last: list[float]


Cases = dict[tuple[str, str], Case]
Seen = Callable[[Cases], list[float]]
"""Numbers made of what was seen: one a depth, or one of all depths."""


def measured(task: tuple[str, str, int, int]) -> tuple[float, float, float]:
    """Stream, first and last gradient of one case at one depth, the mean over so many seeds."""
    placement, init, depth, seeds = task
    torch.set_num_threads(1)
    named = ["norm=none", "placement=pre"] if placement == "none" else [*LAYERNORM, *f"placement={placement}".split()]
    row = next(probe([compose_run([*WORDS, *named, f"init={init}", f"model.depth={depth}"])], seeds))
    stream, first, last = (
        math.nan if value is None else value for value in (row["stream"][-1], row["gradient"][0], row["gradient"][-1])
    )
    return stream, first, last


def of(placement: str, what: str, init: str = "xavier") -> Seen:
    """The stream's RMS, or a gradient, at each depth."""
    return lambda cases: getattr(cases[placement, init], what)


def over(one: Seen, other: Seen) -> Seen:
    """The ratio of two."""
    return lambda cases: [a / b for a, b in zip(one(cases), other(cases), strict=True)]


def plus(one: Seen, other: Seen) -> Seen:
    """The sum of two."""
    return lambda cases: [a + b for a, b in zip(one(cases), other(cases), strict=True)]


def by_depth(number: Callable[[int], float]) -> Seen:
    """A number of the depth alone."""
    return lambda cases: [number(depth) for depth in _depths(cases)]


def power(seen: Seen, of_depth: Callable[[int], float] = float) -> Seen:
    """The power of L, or of a number of L, by which something grows: the slope between their logarithms."""
    return lambda cases: [slope([of_depth(depth) for depth in _depths(cases)], seen(cases))]


def less(one: Seen, other: Seen) -> Seen:
    """The difference of two."""
    return lambda cases: [a - b for a, b in zip(one(cases), other(cases), strict=True)]


def root_of_2l(depth: int) -> float:
    """sqrt(2L): the RMS of as many independent branches of RMS 1."""
    return math.sqrt(2 * depth)


def harmonic(depth: int) -> float:
    """The sum of 1 / l over the blocks."""
    return math.fsum(1 / layer for layer in range(1, depth + 1))


def _depths(cases: Cases) -> list[int]:
    return next(iter(cases.values())).depths


def last_over_first(placement: str, init: str = "xavier") -> Seen:
    """The last gradient over the first."""
    return over(of(placement, "last", init), of(placement, "first", init))


def post_over_pre(init: str) -> Seen:
    """The ratio of their last gradients."""
    return over(of("post", "last", init), of("pre", "last", init))


def shown(values: Sequence[float]) -> str:
    """Three digits of each."""
    return ", ".join(f"{value:.3g}" for value in values)
