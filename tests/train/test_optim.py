"""Optimisers against torch.optim, schedules against their formulas, clipping against torch's."""

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import torch

from normlab.base.options import plain_tree
from normlab.catalogue.optimizers.options import (
    OPTIMIZERS,
    SGD,
    AdamW,
    GainGroups,
    GroupOptions,
    Hyperball,
    Lion,
    Muon,
    NorMuon,
    OptimConfig,
    ParameterGroups,
)
from normlab.catalogue.optimizers.updates import UPDATES
from normlab.config.compose import compose_run
from normlab.model.groups import groups_of
from normlab.model.init import build_model
from normlab.model.runner import SingleRun
from normlab.model.stack import Stack
from normlab.training.optim import (
    Hyperparameters,
    Optimizer,
    coefficients_of,
    decay_start,
    families,
    hyperparameters_at,
    learning_rate,
)
from normlab.training.step import Step

STEPS = 50


def drawn(*lead: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (5, 3), "gain": (3,), "scalar": ()}
    return {n: torch.randn((*lead, *s), generator=generator, dtype=torch.float64) for n, s in shapes.items()}


GROUPS_OF_DRAWN = {"weight": "matrices", "gain": "gains.input", "scalar": "scalars"}


def gradients(step: int, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in like.items()}


def torch_adamw(options: AdamW, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    betas = (options.beta1, options.beta2)
    return torch.optim.AdamW(groups, lr=options.lr, betas=betas, eps=options.eps, foreach=False)


def torch_sgd(options: SGD, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, nesterov=options.nesterov, foreach=False)


def torch_lion(options: Lion, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return pytorch_optimizer.Lion(groups, lr=options.lr, betas=(options.beta1, options.beta2))


TORCH: dict[type, Callable[[Any, list[dict[str, Any]]], torch.optim.Optimizer]] = {
    AdamW: torch_adamw, SGD: torch_sgd, Lion: torch_lion,
}  # fmt: skip
"""The public optimiser that each of ours must equal."""


def reference(options: OptimConfig, params: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    """Return the optimiser of torch with one group for each of the drawn parameters."""
    decay, is_all = options.weight_decay, options.decay == "all"
    lr = dict.fromkeys(params, options.lr)
    decays = {"weight": decay, "gain": decay * is_all, "scalar": decay * is_all}
    if options.groups != ParameterGroups():
        lr |= {"gain": 0.5 * options.lr, "scalar": 3 * options.lr}
        decays |= {"gain": 0.7, "weight": 0.0}
    return TORCH[type(options)](
        options, [{"params": [p], "lr": lr[n], "weight_decay": decays[n]} for n, p in params.items()]
    )


def hyperparameters(optimizer: Optimizer, step: int) -> list[Hyperparameters]:
    """Return those of a single run's families."""
    return [hyperparameters_at(family.options[0], STEPS, step) for family in optimizer.families]


CONSTANT: dict[str, Any] = {"schedule": "constant", "warmup_steps": 0}
OPTIONS: dict[str, OptimConfig] = {
    "adamw": AdamW(lr=0.01, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.3, **CONSTANT),
    "adamw-all": AdamW(lr=0.02, weight_decay=0.3, decay="all", **CONSTANT),
    "lion": Lion(lr=0.01, beta1=0.8, weight_decay=0.3, **CONSTANT),
    "sgd": SGD(lr=0.05, momentum=0.7, weight_decay=0.2, **CONSTANT),
    "nesterov": SGD(lr=0.05, momentum=0.7, nesterov=True, **CONSTANT),
    "groups": AdamW(
        lr=0.01,
        weight_decay=0.3,
        **CONSTANT,
        groups=ParameterGroups(
            matrices=GroupOptions(decay=0.0),
            scalars=GroupOptions(lr=3.0),
            gains=GainGroups(input=GroupOptions(lr=0.5, decay=0.7)),
        ),
    ),
    "plain-sgd": SGD(lr=0.05, momentum=0.0, **CONSTANT),
}
with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimiser_is_complete(name: str) -> None:
    kind: Any = OPTIMIZERS[name]
    options = kind()
    assert options.name == name
    assert kind.formula
    assert kind.source
    assert name in UPDATES
    assert kind in TORCH or name in MATRICES, "add the optimiser that it must equal"
    assert kind in {*map(type, OPTIONS.values()), *MATRICES.values()}, "add a row of options"
    assert set(kind.per_run) <= set(plain_tree(options))


MATRICES = {"muon": Muon, "normuon": NorMuon, "hyperball": Hyperball}
"""The optimisers of matrices, which tests/train/test_muon.py tests."""


PUBLIC_DEFAULTS = {
    "adamw": (torch.optim.AdamW, {"lr": "lr", "eps": "eps"}),
    "lion": (pytorch_optimizer.Lion, {"betas": ("beta1", "beta2")}),
    "muon": (torch.optim.Muon, {name: name for name in ("lr", "weight_decay", "momentum", "nesterov", "ns_steps")}),
    "normuon": (pytorch_optimizer.NorMuon, {"momentum": "momentum", "beta2": "row_decay", "ns_steps": "ns_steps"}),
}
"""The public optimisers, and the options whose defaults are theirs, as the documentation says."""


@pytest.mark.parametrize("name", PUBLIC_DEFAULTS)
def test_defaults_are_those_of_the_public_code(name: str) -> None:
    public, options = PUBLIC_DEFAULTS[name]
    defaults, ours = inspect.signature(public).parameters, OPTIMIZERS[name](name=name)
    for theirs, option in options.items():
        found = tuple(getattr(ours, each) for each in option) if isinstance(option, tuple) else getattr(ours, option)
        assert found == defaults[theirs].default


@with_options
def test_update_of_a_single_run_equals_torch_optim(options: OptimConfig) -> None:
    params = drawn()
    reference_params = {n: p.clone().requires_grad_() for n, p in params.items()}
    optimizer = Optimizer([options], params, GROUPS_OF_DRAWN)
    other = reference(options, reference_params)
    for step in range(STEPS):
        grads = gradients(step, params)
        for n, p in reference_params.items():
            p.grad = grads[n].clone()
        other.step()
        optimizer.update(params, grads, hyperparameters(optimizer, step), torch.tensor(True))
        for n, p in params.items():
            torch.testing.assert_close(p, reference_params[n].detach(), atol=1e-12, rtol=1e-12)
            if isinstance(options, AdamW):
                state = other.state[reference_params[n]]
                for kind, name in (("mean", "exp_avg"), ("square", "exp_avg_sq")):
                    torch.testing.assert_close(optimizer.moments[kind][n], state[name], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("runs", [1, 2])
def test_independent_decay_is_weight_decay_times_the_schedule(runs: int) -> None:
    options = AdamW(lr=0.02, weight_decay=0.3, decay_mode="independent", warmup_steps=2, final_lr_fraction=0.1)
    params = Stack(drawn(runs)) if runs > 1 else drawn()
    expected = {n: p[-1].clone() if runs > 1 else p.clone() for n, p in params.items()}
    other = torch_adamw(options, [{"params": [*expected.values()], "weight_decay": 0.0}])
    optimizer = Optimizer([options] * runs, params, GROUPS_OF_DRAWN)
    for step in range(STEPS):
        grads, hypers = gradients(step, params), hyperparameters_at(options, STEPS, step)
        other.param_groups[0]["lr"] = learning_rate(options, STEPS, step)
        for n, p in expected.items():
            p.grad = grads[n][-1].clone() if runs > 1 else grads[n].clone()
            if p.dim() >= 2:
                p *= 1 - options.weight_decay * learning_rate(options, STEPS, step) / options.lr
        other.step()
        if runs > 1:
            optimizer.update(
                params, Stack(grads), coefficients_of([[hypers] * runs], step + 1), torch.tensor([True] * runs)
            )
        else:
            optimizer.update(params, grads, [hypers], torch.tensor(True))
    for n, p in params.items():
        torch.testing.assert_close(p[-1] if runs > 1 else p, expected[n], atol=1e-12, rtol=1e-12)


def test_cautious_decay_leaves_out_the_weights_that_the_update_moves_away_from_zero() -> None:
    """A weight that has had no gradient, such as that of an unseen token, does not move and is decayed."""
    options = AdamW(lr=0.02, weight_decay=0.3, decay_mode="cautious", **CONSTANT)
    params = drawn()
    expected = {n: p.clone() for n, p in params.items()}
    other = torch_adamw(options, [{"params": [*expected.values()], "weight_decay": 0.0}])
    optimizer = Optimizer([options], params, GROUPS_OF_DRAWN)
    for step in range(STEPS):
        grads = gradients(step, params)
        grads["weight"][0] = 0
        before = {n: p.clone() for n, p in expected.items()}
        for n, p in expected.items():
            p.grad = grads[n].clone()
        other.step()
        update = (before["weight"] - expected["weight"]) / options.lr
        is_decayed = update * before["weight"] >= 0
        assert is_decayed[0].all()
        assert not is_decayed.all()
        expected["weight"] -= options.lr * options.weight_decay * torch.where(is_decayed, before["weight"], 0.0)
        optimizer.update(params, grads, hyperparameters(optimizer, step), torch.tensor(True))
    for n, p in params.items():
        torch.testing.assert_close(p, expected[n], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("is_cautious", [False, True])
@with_options
def test_update_of_stacked_runs_equals_single_updates(options: OptimConfig, is_cautious: bool) -> None:
    if is_cautious and isinstance(options, SGD):
        return
    runs = [copy.deepcopy(options) for _ in range(3)]
    for number, run in enumerate(runs):
        run.lr, run.weight_decay = options.lr * (1 + number), 0.1 * number
        if is_cautious and number:
            run.decay_mode = "cautious"
    order = [name for family in families(runs, GROUPS_OF_DRAWN) for name in family.names]
    stacked = Stack(drawn(3), order=order)
    single = [{n: p[r].clone() for n, p in stacked.items()} for r in range(3)]
    together = Optimizer(runs, stacked, GROUPS_OF_DRAWN)
    optimizers = [Optimizer([run], single[r], GROUPS_OF_DRAWN) for r, run in enumerate(runs)]
    alive = torch.tensor([True, False, True])
    start = {n: p.clone() for n, p in stacked.items()}
    for step in range(STEPS - 1):  # an odd number: a change of sign at each would be seen
        grads = gradients(step, stacked)
        hypers = [[hyperparameters_at(each, STEPS, step) for each in family.options] for family in together.families]
        together.update(stacked, Stack(grads, order=order), coefficients_of(hypers, step + 1), alive)
        for r in (0, 2):
            own, gradient = hyperparameters(optimizers[r], step), {n: g[r] for n, g in grads.items()}
            optimizers[r].update(single[r], gradient, own, torch.tensor(True))
    for n, p in stacked.items():
        assert torch.equal(p[1], start[n][1])
        for r in (0, 2):
            torch.testing.assert_close(p[r], single[r][n], atol=1e-12, rtol=1e-12)


@with_options
def test_skipped_update_changes_no_bit(options: OptimConfig) -> None:
    params = drawn()
    optimizer = Optimizer([options], params, GROUPS_OF_DRAWN)
    optimizer.update(params, gradients(0, params), hyperparameters(optimizer, 0), torch.tensor(True))
    before = copy.deepcopy((params, optimizer.moments))
    spoiled = {n: torch.full_like(g, math.nan) for n, g in gradients(1, params).items()}
    optimizer.update(params, spoiled, hyperparameters(optimizer, 1), torch.tensor(False))
    for n, p in params.items():
        assert torch.equal(p, before[0][n])
        for kind, moments in optimizer.moments.items():
            assert torch.equal(moments[n], before[1][kind][n])


@pytest.mark.parametrize("clip", [0.01, 1e9])
def test_clipping_equals_torch(clip: float) -> None:
    config = compose_run(["model=gpt2_nano", "model.context=8", f"optim.clip={clip}"])
    model = build_model(config, 20)
    tokens = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    runner = SingleRun(model, compiled=False)
    step = Step(runner, Optimizer([config.optim], runner.params, groups_of(runner.model)), clip=clip)
    other = copy.deepcopy(model)
    out = step(tokens[:, :-1], tokens[:, 1:], [hyperparameters_at(config.optim, 10, 0)])
    logits = other(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    before: dict[str, torch.Tensor] = {}
    for name, p in other.named_parameters():
        assert p.grad is not None
        before[name] = p.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), clip)
    _, grad_norm, clip_factor, _ = out.scalars
    torch.testing.assert_close(grad_norm, norm, rtol=1e-6, atol=0)
    largest = max(before, key=lambda n: before[n].abs().max().item())
    clipped = other.get_parameter(largest).grad
    assert clipped is not None
    factor = clipped / before[largest]
    torch.testing.assert_close(clip_factor, factor.median(), rtol=1e-5, atol=0)


def test_schedules_follow_their_formulas() -> None:
    steps, warm = 100, 10

    def at(step: int, **overrides) -> float:
        options = AdamW(lr=1.0, warmup_steps=warm, **overrides)
        options.resolve(steps)
        return learning_rate(options, steps, step)

    for schedule in ("cosine", "linear", "constant", "wsd"):
        assert [at(s, schedule=schedule) for s in range(warm)] == [(s + 1) / warm for s in range(warm)]
        assert at(warm, schedule=schedule) == 1.0
    for step in range(warm, steps):
        p = (step - warm) / (steps - warm)
        assert at(step, schedule="cosine") == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * p)))
        assert at(step, schedule="linear", final_lr_fraction=0.2) == pytest.approx(1 - 0.8 * p)
        assert at(step, schedule="constant") == 1.0
        decay = max(0.0, (step - 75) / 25)
        assert at(step, schedule="wsd", decay_fraction=0.25) == pytest.approx(1 - decay)


@pytest.mark.parametrize(("schedule", "start"), [("constant", 100), ("wsd", 80), ("cosine", 10), ("linear", 10)])
def test_longer_runs_share_the_steps_before_the_decay(schedule: str, start: int) -> None:
    options = AdamW(schedule=schedule, warmup_steps=10)
    options.resolve(100)
    assert decay_start(options, 100) == start
    if schedule in ("constant", "wsd"):
        shared = [learning_rate(options, 100, s) == learning_rate(options, 300, s) for s in range(100)]
        assert all(shared[:start])


@pytest.mark.parametrize(("steps", "warm"), [(1, 0), (10, 5), (1000, 50)])
def test_the_default_warmup_fits_short_runs(steps: int, warm: int) -> None:
    options = AdamW()
    options.resolve(steps)
    assert options.warmup_steps == warm
    assert all(0 < learning_rate(options, steps, s) <= options.lr for s in range(steps))
