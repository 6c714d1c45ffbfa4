"""Steps of small models on a text that is quickly learned."""

from collections.abc import Sequence

import torch
from torch import Tensor

from normlab.catalogue.placements.base import load_all
from normlab.catalogue.statistics.statistic import CORE
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.model.groups import groups_of
from normlab.model.runner import ModelRunner
from normlab.training.average import WeightAverage
from normlab.training.measure.core import CoreStatistics
from normlab.training.optim import Optimizer
from normlab.training.step import Step, StepOutput

VOCAB = 16


def config_of(*overrides: str) -> RunConfig:
    return compose_run(["model=gpt2_nano", "data=stdlib", "train.steps=50", "model.context=16", *overrides])


def step_of(config: RunConfig, runner: ModelRunner) -> Step:
    optimizer = Optimizer([config.optim], runner.params, groups_of(runner.model))
    clip: Tensor | float | None = config.optim.clip
    if clip is not None and runner.run_shape:
        clip = torch.full(runner.run_shape, clip, dtype=torch.float64)
    measure = CoreStatistics(runner, config.stats.names(CORE))
    average = None if config.eval.ema is None else WeightAverage(runner.params, config.eval.ema)
    return Step(
        runner, optimizer, clip=clip, project=config.placement.project, measure=measure, average=average,
        qk_clip=config.optim.qk_clip,
    )  # fmt: skip


def assert_same_measurements(found: Sequence[StepOutput], expected: Sequence[StepOutput]) -> None:
    """Compare everything that was measured, of a pack and of its runs alone, or of two ways to run one."""
    ours, theirs = ([out.measured for out in outputs if out.measured is not None] for outputs in (found, expected))
    assert ours
    assert {one.columns for one in [*ours, *theirs]} == {ours[0].columns}
    values = [torch.cat([one.values.view(len(one.columns), -1) for one in each], dim=1) for each in (ours, theirs)]
    torch.testing.assert_close(*values, atol=1e-9, rtol=1e-8, equal_nan=True)


def cyclic_batch(generator: torch.Generator, runs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counting modulo VOCAB from a random start: uniform unigrams (ln 16 nats), and quickly learned."""
    start = torch.randint(0, VOCAB, (runs, 8, 1), generator=generator)
    text = (start + torch.arange(17)) % VOCAB
    return text[..., :-1], text[..., 1:]


def norm_in(name: str, norm: str) -> str:
    """Return the override for a norm, or for none where the placement has no place for one."""
    return f"norm={norm if load_all()[name].has_norms(4) else 'none'}"
