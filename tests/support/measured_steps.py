"""Training steps with statistics, and the reference of each statistic."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normlab.catalogue.statistics.statistic import CORE
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT
from normlab.model.groups import groups_of
from normlab.model.init import build_model
from normlab.model.runner import SingleRun, StackedRuns
from normlab.training.measure.core import CoreStatistics
from normlab.training.optim import Optimizer, coefficients_of, hyperparameters_at
from normlab.training.step import Step
from support.reference_statistics import reference

VOCAB = 16


@dataclass
class Case:
    """Runs that differ in their seeds."""

    configs: Sequence[RunConfig]
    dtype: torch.dtype
    accumulation: int = 1
    compiled: bool = False

    def models(self) -> list[GPT]:
        models = [build_model(config, VOCAB).to(self.dtype) for config in self.configs]
        for number, model in enumerate(models):
            generator = torch.Generator().manual_seed(number)
            for name, p in model.named_parameters():
                if name.endswith(".gain"):  # initial gains are 1, and so are most of their statistics
                    with torch.no_grad():
                        p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))
        return models

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        drawn = torch.randint(0, VOCAB, (2, len(self.configs), 8, 12), generator=generator)
        return drawn[0], drawn[1]

    def step_of(self, models: list[GPT]) -> Step:
        config = self.configs[0]
        single = len(models) == 1
        runner = SingleRun(models[0], compiled=self.compiled) if single else StackedRuns(models, compiled=self.compiled)
        optimizer = Optimizer([config.optim], runner.params, groups_of(runner.model))
        return Step(
            runner, optimizer, accumulation=self.accumulation, clip=config.optim.clip,
            measure=CoreStatistics(runner, config.stats.names(CORE)),
        )  # fmt: skip

    def measured(self, steps: int) -> list[dict[tuple[str, str, int], float]]:
        """Return the statistics of the last of some steps, for each run."""
        step = self.step_of(copy.deepcopy(self.models()))
        out: Any = None
        for number in range(steps):
            tokens, targets = self.batch(number)
            hypers = [hyperparameters_at(config.optim, config.train.steps, number) for config in self.configs]
            if len(self.configs) == 1:
                out = step(tokens[0], targets[0], hypers, measured=True)
            else:
                out = step(tokens, targets, coefficients_of([hypers], number + 1), measured=True)
        values = out.measured.values.view(-1, len(self.configs)).T.tolist()
        return [dict(zip(map(tuple, out.measured.columns), run, strict=True)) for run in values]

    def expected(self, steps: int, placement: str) -> list[dict[tuple[str, str, int], float]]:
        found: list[dict[tuple[str, str, int], float]] = []
        for number, (config, model) in enumerate(zip(self.configs, self.models(), strict=True)):
            model, offset = model.double(), float(getattr(config.norm, "unit_offset", False))
            groups = [
                {
                    "params": [p for p in model.parameters() if (p.dim() >= 2) is decayed],
                    "weight_decay": decay,
                }
                for decayed, decay in ((True, config.optim.weight_decay), (False, 0.0))
            ]
            optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
            statistics: dict[tuple[str, str, int], float] = {}
            for step in range(steps):
                for group in optimizer.param_groups:
                    group["lr"] = hyperparameters_at(config.optim, config.train.steps, step).lr
                tokens, targets = (x[number] for x in self.batch(step))
                statistics = reference(model, placement, tokens, targets, optimizer, config.optim.clip or 0.0, offset)
            found.append(statistics)
        return found


def case(placement: str, runs: int, *overrides: str, **options: Any) -> Case:
    overrides = (
        "model=gpt2_nano",
        "model.depth=3",
        "model.context=12",
        "model.bias=false",
        "train.steps=50",
        *overrides,
    )
    config = compose_run([*overrides, f"placement={placement}"])
    configs = [replace(config, seed=seed) for seed in range(runs)]
    return Case(configs, **{"dtype": torch.float64, **options})
