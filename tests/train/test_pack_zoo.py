"""Stacked runs equal single runs for every norm with placement=pre and for every placement."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from normlab.model.init import build_model
from normlab.model.runner import SingleRun, StackedRuns
from normlab.norms.base import load_all as load_norms
from normlab.placements.base import load_all as load_placements
from normlab.training.optim import coefficients_of, hyperparameters_at
from support.small_steps import VOCAB, config_of, cyclic_batch, norm_in, step_of

# The default uses two of 32 channels, whose norm may be tiny: then rounding grows to 1e-1.
OPTIONS = {"prmsnorm": ("norm.fraction=0.5",)}
PAIRS = [(f"norm={norm}", "placement=pre", *OPTIONS.get(norm, ())) for norm in load_norms()] + [
    (norm_in(name, "rmsnorm"), f"placement={name}") for name in load_placements() if name != "pre"
]
NUMBERS = (
    ("seed=0", "optim.warmup_steps=2"),
    ("seed=1", "optim.warmup_steps=5", "optim.weight_decay=0", "optim.beta1=0.8", "optim.clip=0.5"),
)


def losses(overrides: tuple[str, ...], steps: int) -> torch.Tensor:
    """Return the losses of two stacked runs, and of both as single runs, in float64: (steps, 4)."""
    configs = [config_of(*overrides, *numbers) for numbers in NUMBERS]
    models = [build_model(config, VOCAB).double() for config in configs]
    singles = [
        step_of(config, SingleRun(copy.deepcopy(model), compiled=False))
        for config, model in zip(configs, models, strict=True)
    ]
    pack = step_of(configs[0], StackedRuns(models, compiled=False))
    pack.clip = torch.tensor([config.optim.clip for config in configs], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for step in range(steps):
        tokens, targets = cyclic_batch(generator, 2)
        hypers = [hyperparameters_at(config.optim, 50, step) for config in configs]
        together = pack(tokens, targets, coefficients_of(hypers, step + 1)).loss
        separate = [single(tokens[r], targets[r], hypers[r]).loss for r, single in enumerate(singles)]
        rows.append(torch.stack([*together, *separate]))
    return torch.stack(rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("overrides", PAIRS, ids=" ".join)
def test_stacked_runs_equal_single_runs(overrides: tuple[str, ...]) -> None:
    """The losses agree to 1e-9 over fifty steps in float64, and fall below the unigram entropy."""
    rows = losses(overrides, 50)
    torch.testing.assert_close(rows[:, :2], rows[:, 2:], atol=1e-9, rtol=0)
    assert rows[-1].max() < math.log(VOCAB)
