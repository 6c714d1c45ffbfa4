"""Measurements at initialisation, three numbers for each case and depth, and functions of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from normlab.config.compose import compose_run
from normlab.model.init import build_model
from normlab.verify.init_laws import VOCAB_SIZE, mean_profile, measure, slope

OVERRIDES = [
    "model.width=128", "model.heads=4", "model.bias=false", "model.tie_embeddings=false", "model.context=64",
    "train.batch_size=8",
]  # fmt: skip
LAYERNORM = ["norm=layernorm", "norm.gain=false", "norm.bias=false"]
KEEL_SAME = "keel placement.first_block=same"
"""Keel with a first block equal to the others."""
CASES = (
    ("post", "xavier"), ("pre", "xavier"), ("peri", "xavier"), ("res_post", "xavier"), ("lns", "xavier"),
    ("deepnorm", "deepnorm"), ("sub_ln", "sub_ln"), ("hybridnorm", "xavier"), ("siamese", "xavier"),
    ("resi_dual", "xavier"), (KEEL_SAME, "xavier"), ("keel", "gpt2"), ("none", "xavier"), ("pre", "gpt2"),
    ("post", "gpt2"), ("none", "gpt2"), ("peri", "gpt2_scaled"), ("res_post", "gpt2_scaled"),
)  # fmt: skip
"""Pairs (placement with its options, init rule); the placement `none` stands for pre without a norm."""


@dataclass(frozen=True)
class Case:
    """Means over seeds at each depth; NaN if a seed's number is not finite."""

    depths: list[int]
    stream: list[float]
    """RMS after the last block."""
    first: list[float]
    """Gradient norm of the first block's `mlp.down.weight`."""
    last: list[float]
    """Gradient norm of the last block's `mlp.down.weight`."""


Cases = dict[tuple[str, str], Case]
Statistic = Callable[[Cases], list[float]]
"""Maps the cases to one number for each depth, or to one number."""


def measure_case(task: tuple[str, str, int, int]) -> tuple[float, float, float]:
    """Return stream, first and last gradient of one case at one depth, means over the seeds."""
    placement, init, depth, seeds = task
    torch.set_num_threads(1)
    overrides = (
        ["norm=none", "placement=pre"] if placement == "none" else [*LAYERNORM, *f"placement={placement}".split()]
    )
    config = compose_run([*OVERRIDES, *overrides, f"init={init}", f"model.depth={depth}"])
    configs = [dataclasses.replace(config, seed=seed) for seed in range(seeds)]
    numbers = mean_profile([measure(each, build_model(each, VOCAB_SIZE).train()) for each in configs])[1:]
    stream, first, last = (value if math.isfinite(value) else math.nan for value in numbers)
    return stream, first, last


def of(placement: str, what: str, init: str = "xavier") -> Statistic:
    """Return the stream's RMS or a gradient at each depth."""
    return lambda cases: getattr(cases[placement, init], what)


def over(first: Statistic, second: Statistic) -> Statistic:
    """Return the ratio of two statistics."""
    return lambda cases: [a / b for a, b in zip(first(cases), second(cases), strict=True)]


def plus(first: Statistic, second: Statistic) -> Statistic:
    """Return the sum of two statistics."""
    return lambda cases: [a + b for a, b in zip(first(cases), second(cases), strict=True)]


def by_depth(number: Callable[[int], float]) -> Statistic:
    """Return a function of the depth."""
    return lambda cases: [number(depth) for depth in _depths(cases)]


def power(statistic: Statistic, of_depth: Callable[[int], float] = float) -> Statistic:
    """Return the power of L, or of a function of L, by which a statistic grows: a log-log slope."""
    return lambda cases: [slope([of_depth(depth) for depth in _depths(cases)], statistic(cases))]


def less(first: Statistic, second: Statistic) -> Statistic:
    """Return the difference of two statistics."""
    return lambda cases: [a - b for a, b in zip(first(cases), second(cases), strict=True)]


def root_of_2l(depth: int) -> float:
    """Return sqrt(2L), the RMS of the sum of 2L independent branches with RMS 1."""
    return math.sqrt(2 * depth)


def _depths(cases: Cases) -> list[int]:
    return next(iter(cases.values())).depths


def last_over_first(placement: str, init: str = "xavier") -> Statistic:
    """Return the ratio of the last gradient to the first."""
    return over(of(placement, "last", init), of(placement, "first", init))


def post_over_pre(init: str) -> Statistic:
    """Return the ratio of the last gradients of post and pre."""
    return over(of("post", "last", init), of("pre", "last", init))


def format_numbers(values: Sequence[float]) -> str:
    """Return the numbers with three digits."""
    return ", ".join(f"{value:.3g}" for value in values)
