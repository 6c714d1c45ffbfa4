"""What the grids of a study cost: tokens, and an estimate of the time on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from normlab.config.schema import RunConfig
from normlab.config.sweep_options import SweepOptions
from normlab.model.init import build_model
from normlab.model.runner import SingleRun, StackedRuns
from normlab.sweeps.packs import make_packs
from normlab.training.machine import resolve

VOCAB_SIZE = 512


@dataclass(frozen=True, slots=True)
class Cost:
    """What a grid costs."""

    runs: int
    tokens: int
    seconds: float
    """Estimate for one process of this machine, without optimizer steps, evaluations and starts."""


def cost_of(options: SweepOptions, configs: Sequence[RunConfig]) -> Cost:
    """Return the cost of some runs; the time is that of one forward and backward pass of each kind of pack."""
    seconds, timed = 0.0, dict[tuple[object, ...], float]()
    for pack in make_packs(configs, range(len(configs)), (), options.largest_pack or 1):
        config = configs[pack[0]]
        model, batch_size = config.model, config.train.batch_size
        key = (config.norm.label, config.placement.name, model.depth, model.width, model.context, batch_size, len(pack))
        if key not in timed:
            timed[key] = _seconds(config, len(pack))
        seconds += config.train.steps * timed[key]
    tokens = sum(config.train.steps * config.train.batch_size * config.model.context for config in configs)
    return Cost(len(configs), tokens, seconds)


def _seconds(config: RunConfig, size: int) -> float:
    """Return the time of the second forward and backward pass of a pack."""
    device = resolve(config).device
    models = [build_model(config, VOCAB_SIZE).to(device).train() for _ in range(size)]
    runner = SingleRun(models[0], compiled=False) if size == 1 else StackedRuns(models, compiled=False)
    shape = config.train.batch_size, config.model.context + 1
    tokens = (torch.arange(math.prod(shape), device=device) % VOCAB_SIZE).view(shape)
    tokens = tokens.expand(*runner.run_shape, *tokens.shape)
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        loss = runner.loss(tokens[..., :-1], tokens[..., 1:]).loss.sum()
        loss.backward()
        loss.item()  # waits for a GPU, which until then still computes
        seconds = time.perf_counter() - start
    return seconds
