"""How many runs train together where `sweep.pack=auto`: what fits and pays, tried before the plan is frozen.

A lone run is tried, then packs of two, four, eight and so on, while each is faster than the one before. What is tried
costs time too: no more of it is spent than what packing has gained so far, and a small share of the whole sweep. So a
sweep that is too short to try anything is not packed, and one where packs do not pay loses that share at most.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from normlab.config import RunConfig
from normlab.memory import weights_of
from normlab.sweep.packs import split
from normlab.sweep.process import threads_each
from normlab.sweep.trial import Trial, try_pack
from normlab.train.resolve import resolve

MOST = 64
"""Most runs in a pack that are tried."""
SHARE = 0.02
"""Of the time that the sweep takes unpacked: what trials may cost where they come to nothing."""
GAIN = 0.97
"""A pack is to take no more than this share of the time that its runs take one after the other."""
FIRST_TRIAL_S = {False: 6.0, True: 45.0}
"""What the first trial costs, eager and compiled: its own numbers are not known before it."""
FASTEST = {"cpu": (5e10, 1e-3), "cuda": (4e14, 2e-3)}
"""Operations a second, of a core or of a GPU, and seconds a step, that no run beats: how short a sweep may be."""

Try = Callable[[Sequence[RunConfig], int | None], Trial]


@dataclass(slots=True)
class Decision:
    """How many runs of a group train together, and what that rests on."""

    most: int = 1
    """Most in a pack."""
    why: str = ""
    """Why no more were tried, or none."""
    trials: list[Trial] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """As plain values, for the plan."""
        return asdict(self)


def decide(configs: Sequence[RunConfig], jobs: int, attempt: Try = try_pack) -> Decision:
    """How many of these runs, which may all train together, are to.

    Args:
        configs: The group.
        jobs: Packs that run at once.
        attempt: Tries a pack.
    """
    resolved, steps = resolve(configs[0]), configs[0].train.steps
    if SHARE * shortest(configs, resolved.device) < FIRST_TRIAL_S[resolved.compile == "on"]:
        return Decision(why="too short to try more in")
    decision, runs, largest = Decision(), 1, min(MOST, len(configs))
    spent, alone, best = 0.0, math.inf, math.inf
    while not decision.why:
        found = attempt(configs[:runs], threads_each(jobs))
        decision.trials.append(found)
        if found.error:
            decision.why = f"{runs}: {found.error}"
            break
        spent += found.seconds
        seconds = seconds_of(found, len(configs), steps, jobs)
        alone = seconds if runs == 1 else alone
        if runs > 1 and seconds > GAIN * best:
            decision.why = f"{runs} are no faster"
        elif runs == largest:
            decision.why = "all of them" if runs == len(configs) else "more are not tried"
        elif spent + 2 * found.seconds > SHARE * alone + (alone - min(best, seconds)):
            decision.why = "to try more would cost more than it may gain"
        if seconds <= GAIN * best:
            best, decision.most = seconds, runs
        runs = min(2 * runs, largest)
    return decision


def seconds_of(trial: Trial, runs: int, steps: int, jobs: int) -> float:
    """Seconds that so many runs take in packs of the trial's size, `jobs` of them at once.

    A smaller pack, the rest, is taken to be as much faster as it is smaller.
    """
    packs = split(list(range(runs)), trial.runs)
    each = [trial.first_s + steps * trial.step_s * len(pack) / trial.runs for pack in packs]
    return max(sum(each) / jobs, max(each))


def shortest(configs: Sequence[RunConfig], device: str) -> float:
    """Seconds that these runs cannot be faster than, one after the other, by what a matrix product costs at best."""
    speed, floor = FASTEST["cuda" if device == "cuda" else "cpu"]
    if device != "cuda":
        speed *= os.cpu_count() or 1
    return sum(
        config.train.steps * max(floor, 6 * weights_of(config) * config.train.batch_size * config.model.context / speed)
        for config in configs
    )
