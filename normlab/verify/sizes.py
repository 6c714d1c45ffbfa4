"""Check a norm against its reference at sizes like those of a run.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from normlab.config.schema import RunConfig
from normlab.model.small import TIME, WIDTHS
from normlab.norms.base import NormConfig
from normlab.verify.check import Check, LargestError
from normlab.verify.norms import Comparison, batch_size, change_by_last_token, tolerances
from normlab.verify.variants import is_valid

LONG_TIME, WIDTH_FACTOR = 40, 20
"""The context, and the factor of the width, that every norm is checked at."""
SCALES = (1.0, 12.0)
"""Factors of the input."""
MAX_NUMBERS = 2**16
"""The most numbers in a batch; a run with more is checked with fewer tokens."""

Size = tuple[int, int, int]
"""B, T and D."""


def sizes_of_norm(norm: NormConfig, width: int) -> list[Size]:
    """Return the sizes of every norm's checks: long and wide, one sequence, one token."""
    candidates = (WIDTH_FACTOR * width, *reversed(WIDTHS))
    wide = next((candidate for candidate in candidates if is_valid(norm, candidate)), width)
    return [(batch_size(norm), LONG_TIME, wide), (1, LONG_TIME, wide), (1, 1, wide)]


def size_of_run(config: RunConfig) -> Size:
    """Return the size of a run's micro-batch, with at most `MAX_NUMBERS` numbers and sequences as long as possible."""
    model, train = config.model, config.train
    tokens = max(TIME, MAX_NUMBERS // model.width)
    time = min(model.context, tokens)
    return max(1, min(train.batch_size // train.accumulation, tokens // time)), time, model.width


def size_check(norm: NormConfig, subject: str, size: Size) -> Iterator[Check]:
    """Compare values and gradients in each precision, and check which outputs depend on later tokens."""
    batch, time, width = size
    at = f"at B = {batch}, T = {time}, D = {width}"
    # With one sequence the first two tokens, centred, are -1 and 1: a larger x leaves no gradient.
    scales = SCALES if batch > 1 else SCALES[:1]
    found: list[LargestError] = []
    try:
        for dtype, tolerance in tolerances(norm).items():
            largest, compared = LargestError(tolerance), Comparison(norm, width, dtype)
            for training, scale in product((True, False), scales):
                mode = "training" if training else "evaluation"
                for name, error in compared.errors(scale, training, batch=batch, time=time):
                    if time == 1 and dtype != torch.float64 and name.startswith("the gradient"):
                        continue  # one token's gradient may be a small difference of large numbers
                    largest.add(error, f"x times {scale:g}, {mode} in {dtype}: {name}")
            found.append(largest)
    except NotImplementedError:
        return  # `oracle_checks` reports the missing reference
    result = "; ".join(map(str, [largest for largest in found if not largest.passed] or found[:1]))
    passed = all(largest.passed for largest in found)
    yield Check(subject=subject, claim=f"is the same {at}", passed=passed, result=result)
    if time == 1:
        return
    change = change_by_last_token(norm, width, batch, time)
    claim = f"{'no output depends on' if norm.causal else 'outputs depend on'} a later token {at}"
    passed = (change == 0) == norm.causal
    yield Check(subject=subject, claim=claim, passed=passed, result=f"largest change {change:.1e}")
