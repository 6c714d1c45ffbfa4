"""Stacked runs equal single runs in the step; compiled graphs and placements from plugins."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from normlab.model.init import build_model
from normlab.model.runner import SingleRun, StackedRuns
from normlab.training.optim import coefficients_of, hyperparameters_at
from support.small_steps import VOCAB, config_of, cyclic_batch, step_of


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("overrides", "compiled", "runs"),
    [
        (("norm=batchnorm",), False, 4),
        (("norm=layernorm", "optim=sgd", "optim.weight_decay=0.1", "placement=post"), False, 2),
        # A norm with buffers, a shared factor, blocks of two kinds; the others share their path.
        (("norm=batchnorm",), True, 2),
        (("norm=none", "placement=rezero"), True, 2),
        (("norm=rmsnorm", "placement=hybridnorm_star"), True, 2),
    ],
)
def test_stacked_runs_equal_single_runs(overrides: tuple[str, ...], compiled: bool, runs: int) -> None:
    torch.compiler.reset()
    sgd = "optim=sgd" in overrides
    lr = 0.1 if sgd else 1e-3
    configs = [config_of(*overrides, f"seed={seed}", f"optim.lr={(1 + seed) * lr}") for seed in range(runs)]
    models = [build_model(config, VOCAB).double() for config in configs]
    singles = [step_of(c, SingleRun(copy.deepcopy(m), compiled=compiled)) for c, m in zip(configs, models, strict=True)]
    pack = step_of(configs[0], StackedRuns(models, compiled=compiled))
    generator = torch.Generator().manual_seed(0)
    losses = torch.empty(runs)
    for step in range(50):
        tokens, targets = cyclic_batch(generator, runs)
        hypers = [hyperparameters_at(config.optim, 50, step) for config in configs]
        outputs = [single(tokens[r], targets[r], hypers[r]) for r, single in enumerate(singles)]
        together = pack(tokens, targets, coefficients_of(hypers, step + 1))
        losses = together.loss
        for name in ("loss", "grad_norm", "clip_factor"):
            expected = torch.stack([getattr(out, name) for out in outputs])
            torch.testing.assert_close(getattr(together, name), expected, atol=1e-9, rtol=0)
    # Without this assertion, the compared models could have learned nothing.
    assert losses.max() < math.log(VOCAB)
    for kind in ("params", "buffers"):
        stacked = getattr(pack.runner, kind)
        for r, single in enumerate(singles):
            for name, tensor in getattr(single.runner, kind).items():
                torch.testing.assert_close(
                    stacked[name][r], tensor, atol=1e-9, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
                )


def test_diverged_run_is_frozen_and_the_others_continue() -> None:
    configs = [config_of("norm=batchnorm", f"seed={seed}") for seed in (0, 1)]
    models = [build_model(config, VOCAB).double() for config in configs]
    single = step_of(configs[1], SingleRun(copy.deepcopy(models[1]), compiled=False))
    pack = step_of(configs[0], StackedRuns(models, compiled=False))
    generator = torch.Generator().manual_seed(0)
    frozen: dict[str, torch.Tensor] = {}
    for step in range(6):
        tokens, targets = cyclic_batch(generator, 2)
        if step == 3:
            frozen = {n: t[0].clone() for n, t in (pack.runner.params | pack.runner.buffers).items()}
            with torch.no_grad():
                pack.runner.params["embed.tokens.weight"][0, 0, 0] = math.inf
            frozen["embed.tokens.weight"] = pack.runner.params["embed.tokens.weight"][0].clone()
        hypers = [hyperparameters_at(config.optim, 50, step) for config in configs]
        out = pack(tokens, targets, coefficients_of(hypers, step + 1))
        single_output = single(tokens[1], targets[1], hypers[1])
        assert out.alive.tolist() == [step < 3, True]
        torch.testing.assert_close(out.loss[1], single_output.loss, atol=1e-9, rtol=0)
    for name, tensor in (pack.runner.params | pack.runner.buffers).items():
        assert torch.equal(tensor[0], frozen[name]), name


class DoublingLinear(nn.Linear):
    """A linear layer as a plugin may have it, with a forward pass of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_a_pack_calls_the_forward_pass_of_a_linear_layer_of_a_plugin() -> None:
    models = [build_model(config_of(f"seed={seed}"), VOCAB).double() for seed in (0, 1)]
    for model in models:
        out: Any = model.blocks[0].attn.out
        out.__class__ = DoublingLinear
    tokens, targets = cyclic_batch(torch.Generator().manual_seed(0), 2)
    alone = [
        SingleRun(copy.deepcopy(m), compiled=False).loss(t, y).loss
        for m, t, y in zip(models, tokens, targets, strict=True)
    ]
    together = StackedRuns(models, compiled=False).loss(tokens, targets).loss
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-12, rtol=0)


@pytest.mark.exhaustive
def test_number_of_graphs_does_not_depend_on_depth() -> None:
    """Three graphs for a plain step and three for a measured one: embeddings, block, head."""
    graphs = []
    for depth in (2, 24):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        config = config_of("norm=rmsnorm", f"model.depth={depth}")
        step = step_of(config, SingleRun(build_model(config, VOCAB), compiled=True))
        counters: dict[str, Counter] = torch._dynamo.utils.counters
        counts = []
        for number in range(4):
            tokens, targets = (t[0] for t in cyclic_batch(torch.Generator().manual_seed(number), 1))
            step(tokens, targets, hyperparameters_at(config.optim, 50, number), measured=number % 2 == 1)
            counts.append(counters["stats"]["unique_graphs"])
        graphs.append(counts)
        assert not counters["graph_break"]
    assert graphs == [[3, 6, 6, 6]] * 2
