"""A norm against its reference at other sizes: what holds of few tokens and channels may not hold of a run's.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from normlab.config import RunConfig
from normlab.norms.base import NormConfig
from normlab.verify.check import Check, Worst
from normlab.verify.norms import change_by_last, errors, sequences, tolerances
from normlab.verify.small import TIME, WIDTHS
from normlab.verify.variants import allowed

LONG, TIMES_WIDER = 40, 20
"""Tokens, and how many times as many channels as elsewhere: what every norm is tried at."""
SCALES = (1.0, 12.0)
"""What x is multiplied by."""
MOST = 2**16
"""Numbers in a batch of a run's size: of a run with more of them, fewer tokens."""


Size = tuple[int, int, int]
"""Sequences, tokens of each, channels."""


def of_norm(norm: NormConfig, width: int) -> list[Size]:
    """The sizes that every norm is tried at: long and wide, if it takes a larger width; one sequence; one token."""
    wider = (TIMES_WIDER * width, *reversed(WIDTHS))
    wide = next((each for each in wider if allowed(norm, each)), width)
    return [(sequences(norm), LONG, wide), (1, LONG, wide), (1, 1, wide)]


def of_run(config: RunConfig) -> Size:
    """The size of a run's micro-batch: the words' own, of no more tokens than take a second, as long as they can be."""
    model, train = config.model, config.train
    tokens = max(TIME, MOST // model.width)
    time = min(model.context, tokens)
    return max(1, min(train.batch_size // train.accumulation, tokens // time)), time, model.width


def size_check(norm: NormConfig, of: str, size: Size) -> Iterator[Check]:
    """Values and gradients in each precision, training and evaluation, and what moves with a later token."""
    batch, time, width = size
    at = f"at B = {batch}, T = {time}, D = {width}"
    # Of one sequence the first two tokens, their mean taken off, are -1 and 1: of a larger x no gradient is left.
    scales = SCALES if batch > 1 else SCALES[:1]
    found: list[Worst] = []
    try:
        for dtype, tolerance in tolerances(norm).items():
            worst = Worst(tolerance)
            for training, scale in product((True, False), scales):
                for what, error in errors(norm, width, scale, dtype, training, batch=batch, time=time):
                    if time == 1 and dtype != torch.float64 and what.startswith("the gradient"):
                        continue  # of one token, it may be a small difference of large numbers
                    mode = "training" if training else "evaluation"
                    worst.add(error, f"x times {scale:g}, {mode} in {dtype}: {what}")
            found.append(worst)
    except NotImplementedError:
        return  # which is said where it is looked for first
    seen = "; ".join(map(str, [worst for worst in found if not worst.passed] or found[:1]))
    yield Check(of=of, check=f"is the same {at}", passed=all(worst.passed for worst in found), seen=seen)
    if time == 1:
        return
    change = change_by_last(norm, width, batch, time)
    check = f"{'no output moves with' if norm.causal else 'outputs move with'} a later token {at}"
    yield Check(of=of, check=check, passed=(change == 0) == norm.causal, seen=f"largest change {change:.1e}")
