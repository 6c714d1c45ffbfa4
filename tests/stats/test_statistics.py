"""Every core statistic against a reference implementation: single, accumulated, stacked and compiled."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from by_hooks import reference
from torch import Tensor

from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT
from normlab.model.init import build_model
from normlab.model.runner import SingleRun, StackedRuns
from normlab.stats.measure.core import CoreStatistics
from normlab.stats.registry import STATISTICS
from normlab.stats.statistic import CORE
from normlab.train.optim import Optimizer, hyperparameters_at, is_decayed
from normlab.train.step import Step

VOCAB = 16
MEASURED = {name for name, entry in STATISTICS.items() if entry.tier == CORE and entry.derive is None}


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
        decayed = [name for name, p in runner.model.named_parameters() if is_decayed(config.optim, p)]
        optimizer = Optimizer(config.optim, runner.params, decayed)
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
                out = step(tokens[0], targets[0], hypers[0], measured=True)
            else:
                out = step(tokens, targets, hypers, measured=True)
        values = out.measured.values.view(-1, len(self.configs)).T.tolist()
        return [dict(zip(map(tuple, out.measured.columns), run, strict=True)) for run in values]

    def expected(self, steps: int, placement: str) -> list[dict[tuple[str, str, int], float]]:
        found: list[dict[tuple[str, str, int], float]] = []
        for number, (config, model) in enumerate(zip(self.configs, self.models(), strict=True)):
            model, offset = model.double(), float(getattr(config.norm, "unit_offset", False))
            groups = [
                {
                    "params": [p for p in model.parameters() if is_decayed(config.optim, p) is decayed],
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


@pytest.mark.parametrize("runs", [1, 3], ids=["single", "stacked"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("placement", ["pre", "post", "peri"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_every_statistic_equals_the_reference(placement: str, accumulation: int, runs: int, dtype: torch.dtype) -> None:
    setup = case(placement, runs, "norm=layernorm", dtype=dtype, accumulation=accumulation)
    compare(setup.measured(3), setup.expected(3, placement), 1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [pytest.param(1, marks=pytest.mark.slow), 3], ids=["single", "stacked"])
def test_every_compiled_statistic_equals_the_reference(runs: int) -> None:
    torch.compiler.reset()
    setup = case(
        "peri", runs, "norm=rmsnorm", "norm.unit_offset=true", dtype=torch.float32, accumulation=4, compiled=True
    )
    compare(setup.measured(2), setup.expected(2, "peri"), 1e-5)


def compare(found: Sequence[dict[Any, float]], expected: Sequence[dict[Any, float]], tolerance: float) -> None:
    for values, references in zip(found, expected, strict=True):
        assert values.keys() == references.keys()
        for name in {key[0] for key in references}:
            # Relative to the statistic's largest value: the mean of values around 0 has their rounding error.
            largest = max(abs(value) for key, value in references.items() if key[0] == name)
            for key in (key for key in references if key[0] == name):
                slack = tolerance * min(largest, 1)
                if name == "update_norm" and tolerance > 1e-6:  # the updated weight is rounded too
                    slack += 1.2e-7 * references["param_norm", *key[1:]]
                assert values[key] == pytest.approx(references[key], rel=tolerance, abs=slack), key
