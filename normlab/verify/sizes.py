"""A norm against its reference at other sizes: what holds of few tokens and channels may not hold of a run's.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from normlab.config import ModelConfig
from normlab.norms.base import NormConfig
from normlab.verify.check import Check, Worst
from normlab.verify.norms import TOLERANCES, change_by_last, errors
from normlab.verify.small import BATCH, TIME, WIDTHS
from normlab.verify.variants import allowed

LONG, TIMES_WIDER = 40, 6
"""Tokens, and how many times as many channels as elsewhere: what every norm is tried at."""
MOST = 2**16
"""Numbers in a batch of a run's size: of a run with more of them, fewer tokens."""


def longer(norm: NormConfig, width: int) -> tuple[int, int]:
    """T and D of the size that every norm is tried at: a larger width, if it takes one."""
    wider = (TIMES_WIDER * width, *reversed(WIDTHS))
    return LONG, next((each for each in wider if allowed(norm, each)), width)


def of_run(model: ModelConfig) -> tuple[int, int]:
    """T and D of a run: the words' own, with at least as many tokens as elsewhere, and no more than take a second."""
    return max(TIME, min(model.context, MOST // (BATCH * model.width))), model.width


def size_check(norm: NormConfig, of: str, size: tuple[int, int]) -> Iterator[Check]:
    """Values and gradients in float64, training and evaluation, and what moves with a later token."""
    time, width = size
    at, worst = f"at T = {time}, D = {width}", Worst(TOLERANCES[torch.float64])
    try:
        for training in (True, False):
            for what, error in errors(norm, width, 1.0, torch.float64, training, time=time):
                worst.add(error, f"{'training' if training else 'evaluation'}: {what}")
    except NotImplementedError:
        return  # which is said where it is looked for first
    yield Check(of=of, check=f"is the same {at}", passed=worst.passed, seen=str(worst))
    change = change_by_last(norm, width, time)
    check = f"{'no output moves with' if norm.causal else 'outputs move with'} a later token {at}"
    yield Check(of=of, check=check, passed=(change == 0) == norm.causal, seen=f"largest change {change:.1e}")
