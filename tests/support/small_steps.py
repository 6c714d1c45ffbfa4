"""Steps of small models on a text that is quickly learned."""

from __future__ import annotations

import torch

from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.model.runner import ModelRunner
from normlab.placements.base import load_all
from normlab.stats.measure.core import CoreStatistics
from normlab.stats.statistic import CORE
from normlab.training.optim import Optimizer, is_decayed
from normlab.training.step import Step

VOCAB = 16


def config_of(*overrides: str) -> RunConfig:
    return compose_run(["model=gpt2_nano", "data=stdlib", "train.steps=50", "model.context=16", *overrides])


def step_of(config: RunConfig, runner: ModelRunner) -> Step:
    decayed = [name for name, p in runner.model.named_parameters() if is_decayed(config.optim, p)]
    optimizer = Optimizer(config.optim, runner.params, decayed)
    clip = (
        torch.full(runner.run_shape, config.optim.clip, dtype=torch.float64) if runner.run_shape else config.optim.clip
    )
    measure = CoreStatistics(runner, config.stats.names(CORE))
    return Step(runner, optimizer, clip=clip, project=config.placement.project, measure=measure)


def cyclic_batch(generator: torch.Generator, runs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counting modulo VOCAB from a random start: uniform unigrams (ln 16 nats), and quickly learned."""
    start = torch.randint(0, VOCAB, (runs, 8, 1), generator=generator)
    text = (start + torch.arange(17)) % VOCAB
    return text[..., :-1], text[..., 1:]


def norm_in(name: str, norm: str) -> str:
    """Return the override for a norm, or for none where the placement has no place for one."""
    return f"norm={norm if load_all()[name].has_norms(4) else 'none'}"
