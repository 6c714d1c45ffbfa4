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


def losses(overrides: tuple[str, ...], steps: int, dtype: torch.dtype, *, nudge: bool = False) -> torch.Tensor:
    """Return the losses of two stacked runs, of both as single runs, and of the first repeated: (steps, 5).

    Args:
        overrides: The overrides that the runs share.
        steps: The number of steps.
        dtype: The dtype of the model.
        nudge: Whether to change the last bit of one weight of the repeated run.
    """
    configs = [config_of(*overrides, *numbers) for numbers in NUMBERS]
    models = [build_model(config, VOCAB).to(dtype) for config in configs]
    nudged = copy.deepcopy(models[0])
    with torch.no_grad():
        weight = next(p for p in nudged.parameters() if p.dim() > 1).view(-1)
        weight[:1] = torch.nextafter(weight[:1], weight[:1] + 1) if nudge else weight[:1]
    runners = [SingleRun(copy.deepcopy(model), compiled=False) for model in models] + [
        SingleRun(nudged, compiled=False)
    ]
    of_each = [*configs, configs[0]]
    singles = [step_of(config, runner) for config, runner in zip(of_each, runners, strict=True)]
    pack = step_of(configs[0], StackedRuns(models, compiled=False))
    pack.clip = torch.tensor([config.optim.clip for config in configs], dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for step in range(steps):
        tokens, targets = cyclic_batch(generator, 2)
        hypers = [hyperparameters_at(config.optim, 50, step) for config in configs]
        together = pack(tokens, targets, coefficients_of(hypers, step + 1)).loss
        separate = [single(tokens[r % 2], targets[r % 2], hypers[r % 2]).loss for r, single in enumerate(singles)]
        rows.append(torch.stack([*together, *separate]))
    return torch.stack(rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("overrides", PAIRS, ids=" ".join)
def test_stacked_runs_equal_single_runs(overrides: tuple[str, ...]) -> None:
    """The losses agree to 1e-10 over ten steps in float64."""
    rows = losses(overrides, 10, torch.float64)
    torch.testing.assert_close(rows[:, :2], rows[:, 2:4], atol=1e-10, rtol=0)
    assert (rows[:, 0] - rows[:, 1]).abs().max() > 1e-4, "the two runs are the same, so the comparison says nothing"


@pytest.mark.exhaustive
@pytest.mark.parametrize("overrides", PAIRS, ids=" ".join)
def test_stacked_runs_equal_single_runs_while_they_learn(overrides: tuple[str, ...]) -> None:
    """The losses agree to 1e-9 over fifty steps in float64, and fall below the unigram entropy."""
    rows = losses(overrides, 50, torch.float64)
    torch.testing.assert_close(rows[:, :2], rows[:, 2:4], atol=1e-9, rtol=0)
    assert rows[-1].max() < math.log(VOCAB)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides", [("norm=layernorm", "placement=pre"), ("norm=rmsnorm", "placement=post")], ids=" ".join
)
def test_stacking_at_a_high_learning_rate_is_no_worse_than_one_flipped_bit(overrides: tuple[str, ...]) -> None:
    """Training is chaotic there: the tolerance is ten times the effect of one changed bit in one weight."""
    rows = losses((*overrides, "optim.lr=0.1"), 50, torch.float32, nudge=True)
    gap, measure = (rows[:, 0] - rows[:, 2]).abs().max(), (rows[:, 4] - rows[:, 2]).abs().max()
    assert measure > 1e-5, "training is not chaotic, so the comparison says nothing"
    assert gap <= 10 * measure
