"""Stacked runs equal single runs in the step; compiled graphs and placements from plugins."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from normlab.catalogue.norms.base import load_all as load_norms
from normlab.catalogue.placements.algebra import AlgebraPlacement
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.model.groups import groups_of
from normlab.model.init import build_model
from normlab.model.runner import SingleRun, StackedRuns, Tensors
from normlab.training.machine import KINDS_OF_BLOCKS
from normlab.training.optim import coefficients_of, families, hyperparameters_at
from normlab.training.step import Step
from support.small_steps import VOCAB, assert_same_measurements, config_of, cyclic_batch, norm_in, step_of

# The default of prmsnorm uses two of 32 channels, whose norm may be tiny: then rounding grows to 1e-1.
OPTIONS = {"prmsnorm": ("norm.fraction=0.5",)}
PAIRS = [(f"norm={norm}", "placement=pre", *OPTIONS.get(norm, ())) for norm in load_norms()] + [
    (norm_in(name, "rmsnorm"), f"placement={name}") for name in load_placements() if name != "pre"
]
OWN_WIRING = [
    name
    for name, placement in load_placements().items()
    if not isinstance(placement, AlgebraPlacement) and type(placement).__module__.startswith("normlab.")
]
NUMBERS = (
    ("seed=0", "optim.warmup_steps=2"),
    ("seed=1", "optim.warmup_steps=5", "optim.weight_decay=0", "optim.clip=0.5"),
)


def assert_pack_equals_single_runs(
    overrides: tuple[str, ...], steps: int, *, compiled: bool = False, losses_only: bool = False
) -> None:
    """Compare two stacked runs with the same single runs in float64: losses, and all other results of the steps."""
    torch.compiler.reset()
    first, second = NUMBERS
    if "optim=sgd" not in overrides:
        second = (*second, "optim.beta1=0.8")
    configs = [config_of(*overrides, *numbers) for numbers in (first, second)]
    models = [build_model(config, VOCAB).double() for config in configs]
    singles = [step_of(c, SingleRun(copy.deepcopy(m), compiled=compiled)) for c, m in zip(configs, models, strict=True)]
    groups = groups_of(models[0])
    order = [name for family in families([configs[0].optim], groups) for name in family.names]
    pack = step_of(configs[0], StackedRuns(models, order=order, compiled=compiled))
    pack.clip = torch.tensor([config.optim.clip for config in configs], dtype=torch.float64)
    generator, losses = torch.Generator().manual_seed(0), torch.empty(2)
    for step in range(steps):
        (tokens, targets), measured = cyclic_batch(generator, 2), step == steps - 1 and not (compiled or losses_only)
        hypers = [hyperparameters_at(config.optim, 50, step) for config in configs]
        outputs = [one(tokens[r], targets[r], [hypers[r]], measured=measured) for r, one in enumerate(singles)]
        together = pack(tokens, targets, coefficients_of([hypers], step + 1), measured=measured)
        losses, count = together.scalars[0], 1 if losses_only else 3  # the loss, the gradient norm, the clip factor
        expected = torch.stack([out.scalars[:count] for out in outputs], dim=1)
        torch.testing.assert_close(together.scalars[:count], expected, atol=1e-9, rtol=0)
        if measured:
            assert_same_measurements([together], outputs)
    # Without this assertion, the compared models could have learned nothing.
    assert steps < 50 or losses.max() < math.log(VOCAB)
    for r, single in enumerate(() if losses_only else singles):
        for expected, stacked in zip(state_of(single), state_of(pack), strict=True):
            for name, tensor in expected.items():
                values = stacked[name][r]
                torch.testing.assert_close(values, tensor, atol=1e-9, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def state_of(step: Step) -> list[Tensors]:
    return [step.runner.params, step.runner.buffers, {} if step.average is None else step.average.tensors]


@pytest.mark.few(1)
@pytest.mark.parametrize("overrides", PAIRS, ids=" ".join)
def test_the_blocks_of_a_pack_share_their_compiled_code(overrides: tuple[str, ...]) -> None:
    torch.compiler.reset()
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    config = config_of(*overrides, "model.depth=6")
    model = build_model(config, VOCAB)
    tokens = torch.zeros(2, 1, config.model.context, dtype=torch.long)
    StackedRuns([model, copy.deepcopy(model)], compiled=True, backend=count).loss(tokens, tokens)
    assert len(graphs) <= 2 + KINDS_OF_BLOCKS  # those of the embeddings and the head, too


@pytest.mark.few(2)
@pytest.mark.parametrize("norm", ["layernorm", "batchnorm"])
@pytest.mark.parametrize("name", OWN_WIRING)
def test_pack_equals_single_runs(name: str, norm: str) -> None:
    assert_pack_equals_single_runs((norm_in(name, norm), f"placement={name}", "model.depth=2"), 10)


@pytest.mark.parametrize(
    "overrides",
    [
        ("optim.qk_clip=1e-4", "eval.ema=0.9", "model.depth=2"),
        ("model.value_residual=learned", "model.attn_softcap=0.1", "model.v_norm=true", "model.depth=3"),
        ("model.value_embed=true", "model.depth=3"),
        ("placement=post", "placement.branch_warmup=7", "model.depth=3"),
        ("placement=peri", "placement.branch_factor=0.3", "placement.residual_affine=true", "model.depth=2"),
        ("norm=layernorm", "norm.taper_warmup=3", "norm.taper_steps=4", "placement=peri", "model.depth=2"),
        (
            "norm=rmsnorm",
            "norm.at.output.eps=1e-2",
            "norm.at.input_mlp=gatednorm",
            "norm.at.input_mlp.layers='1:'",
            "norm.at.final=layernorm",
            "norm.at.qk=batchnorm",
            "model.qk_norm=head",
            "placement=peri",
            "model.depth=3",
        ),
    ],
    ids=" ".join,
)
def test_pack_with_options_equals_single_runs(overrides: tuple[str, ...]) -> None:
    assert_pack_equals_single_runs(overrides, 10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("overrides", PAIRS, ids=" ".join)
def test_losses_of_every_norm_and_placement(overrides: tuple[str, ...]) -> None:
    assert_pack_equals_single_runs(overrides, 50, losses_only=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("overrides", "compiled"),
    [
        (("norm=batchnorm",), False),
        (("norm=layernorm", "optim=sgd", "optim.lr=0.2", "placement=post"), False),
        # A norm with buffers, a shared factor, blocks of two kinds; the others share their path.
        (("norm=batchnorm",), True),
        (("norm=none", "placement=rezero"), True),
        (("norm=rmsnorm", "placement=hybridnorm_star"), True),
    ],
)
def test_long_pack_equals_single_runs(overrides: tuple[str, ...], compiled: bool) -> None:
    assert_pack_equals_single_runs(overrides, 50, compiled=compiled)


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
        out = pack(tokens, targets, coefficients_of([hypers], step + 1))
        single_output = single(tokens[1], targets[1], [hypers[1]])
        losses, _, _, alive = out.scalars
        assert alive.tolist() == [step < 3, True]
        torch.testing.assert_close(losses[1], single_output.scalars[0], atol=1e-9, rtol=0)
    for name, tensor in (pack.runner.params | pack.runner.buffers).items():
        assert torch.equal(tensor[0], frozen[name]), name


class DoublingLinear(nn.Linear):
    """A linear layer as a plugin may have it, with a forward pass of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_a_pack_calls_the_forward_pass_of_a_linear_layer_of_a_plugin() -> None:
    models = [build_model(config_of(f"seed={seed}"), VOCAB).double() for seed in (0, 1)]
    for model in models:
        block: Any = model.blocks[0]
        block.attn.out.__class__ = DoublingLinear
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
            step(tokens, targets, [hyperparameters_at(config.optim, 50, number)], measured=number % 2 == 1)
            counts.append(counters["stats"]["unique_graphs"])
        graphs.append(counts)
        assert not counters["graph_break"]
    assert graphs == [[3, 6, 6, 6]] * 2
