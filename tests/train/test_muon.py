"""Optimisers of matrices against torch.optim.Muon and pytorch_optimizer; alone and in packs; what no update changes."""

import copy
import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import pytorch_optimizer
import torch
from pytorch_optimizer.optimizer.muon import normuon
from torch import Tensor

from normlab.catalogue.optimizers.options import (
    AdamW,
    GroupOptions,
    Hyperball,
    Muon,
    NorMuon,
    Orthogonal,
    ParameterGroups,
)
from normlab.catalogue.optimizers.updates import orthogonalise, scale_by_power_of_two
from normlab.model.stack import Stack
from normlab.training.optim import Optimizer, coefficients_of, families, hyperparameters_at

STEPS = 50
SHAPES = {
    "blocks.0.attn.q.weight": (8, 8), "blocks.0.attn.k.weight": (8, 8), "blocks.0.attn.v.weight": (8, 8),
    "blocks.1.attn.q.weight": (8, 8), "blocks.1.attn.k.weight": (8, 8), "blocks.1.attn.v.weight": (8, 8),
    "up": (20, 8), "down": (8, 20), "embed": (30, 8), "gain": (8,),
}  # fmt: skip
GROUPS = {name: {"embed": "embed", "gain": "gains.input"}.get(name, "matrices") for name in SHAPES}
HIDDEN = [name for name, group in GROUPS.items() if group == "matrices"]
COMMON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "schedule": "constant", "warmup_steps": 0}
OPTIONS = {
    "muon": Muon(**COMMON),
    "shape": Muon(**COMMON, scale="shape", momentum=0.8, nesterov=False, ns_steps=3),
    "convergent": Muon(**COMMON, polynomial="convergent", ns_steps=12),
    "normuon": NorMuon(**COMMON, row_decay=0.9),
    "normuon-code": NorMuon(**COMMON, scale="shape", nesterov=True, row_decay=0.9),
    "hyperball": Hyperball(**COMMON),
    "together": Muon(**COMMON, qkv="together"),
    "heads": NorMuon(**COMMON, qkv="heads", heads=2),
}
with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the other implementations compute in float64, not in bfloat16."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda self: self.clone())
    in_float64 = partial(normuon.zero_power_via_newton_schulz_5, dtype=torch.float64)
    monkeypatch.setattr(normuon, "zero_power_via_newton_schulz_5", in_float64)


def drawn(seed: int, *lead: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn((*lead, *s), generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}


def updated(options: Orthogonal, *, steps: int = STEPS, scale: float = 1.0) -> dict[str, Tensor]:
    """Return the parameters of a single run after some updates."""
    params = {name: scale * p for name, p in drawn(0).items()}
    optimizer = Optimizer([options], params, GROUPS)
    for step in range(steps):
        own = [hyperparameters_at(family.options[0], steps, step) for family in optimizer.families]
        optimizer.update(params, drawn(1 + step), own, torch.tensor(True))
    return params


def updated_by(others: list[torch.optim.Optimizer], params: dict[str, Tensor]) -> dict[str, Tensor]:
    for step in range(STEPS):
        for (name, p), grad in zip(params.items(), drawn(1 + step).values(), strict=True):
            assert p.shape == SHAPES[name]
            p.grad = grad
        for other in others:
            other.step()
    return {name: p.detach() for name, p in params.items()}


def adamw(options: Orthogonal, params: dict[str, Tensor]) -> torch.optim.Optimizer:
    groups = [
        {"params": [params["embed"]], "weight_decay": options.weight_decay},
        {"params": [params["gain"]], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps)


@pytest.mark.parametrize("name", ["muon", "shape", "convergent"])
def test_muon_equals_torch(name: str) -> None:
    options = OPTIONS[name]
    params = {name: p.requires_grad_() for name, p in drawn(0).items()}
    other = torch.optim.Muon(
        [params[name] for name in HIDDEN], lr=options.lr, weight_decay=options.weight_decay,
        momentum=options.momentum, nesterov=options.nesterov, ns_steps=options.ns_steps,
        ns_coefficients={"fast": (3.4445, -4.7750, 2.0315), "convergent": (2.0, -1.5, 0.5)}[options.polynomial],
        adjust_lr_fn={"rms": "match_rms_adamw", "shape": "original"}[options.scale],
    )  # fmt: skip
    expected, found = updated_by([other, adamw(options, params)], params), updated(options)
    for name, p in found.items():
        torch.testing.assert_close(p, expected[name], atol=1e-12, rtol=1e-11)


@pytest.mark.parametrize(
    ("name", "update_scale"),
    [("normuon", "match_rms"), ("normuon-code", "preserve_norm")],  # algorithm 1 of the paper, and the authors' code
)
def test_normuon_equals_pytorch_optimizer(name: str, update_scale: str) -> None:
    options = OPTIONS[name]
    assert isinstance(options, NorMuon)
    params = {name: p.requires_grad_() for name, p in drawn(0).items()}
    other = pytorch_optimizer.NorMuon(
        [{"params": [params[name] for name in HIDDEN], "use_muon": True}], lr=options.lr, momentum=options.momentum,
        beta2=options.row_decay, weight_decay=options.weight_decay, nesterov=options.nesterov,
        update_scale=update_scale, foreach=False,
    )  # fmt: skip
    expected, found = updated_by([other, adamw(options, params)], params), updated(options)
    for name, p in found.items():
        torch.testing.assert_close(p, expected[name], atol=1e-12, rtol=1e-11)


def test_the_default_of_normuon_is_the_step_of_the_paper() -> None:
    """Its root mean square is 0.2 lr; that of Muon, whose singular values are near 1 only, is below 0.2 lr."""
    start, options = drawn(0), dataclasses.replace(NorMuon(), weight_decay=0.0, schedule="constant", warmup_steps=0)
    after = updated(options, steps=1)
    for name in HIDDEN:
        rms = (after[name] - start[name]).square().mean().sqrt()
        torch.testing.assert_close(rms, torch.tensor(0.2 * options.lr, dtype=rms.dtype), atol=0.0, rtol=1e-8)


@pytest.mark.parametrize("decay", [None, 5.0])
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_hyperball_turns_muons_direction_on_the_sphere(decay: float | None, scale: float) -> None:
    options = Hyperball(**COMMON, groups=ParameterGroups(matrices=GroupOptions(decay=decay)))
    found = updated(options, scale=scale)
    for name in HIDDEN:
        p = scale * drawn(0)[name]
        radius, direction = p.norm(), torch.zeros_like(p).requires_grad_()
        muon = torch.optim.Muon([direction], lr=1.0, weight_decay=0.0, momentum=options.momentum)
        for step in range(STEPS):
            direction.detach().zero_()
            direction.grad = drawn(1 + step)[name]
            muon.step()
            new = (1 - options.lr * (decay or 0)) * p + options.lr * radius * direction.detach() / direction.norm()
            p = radius * new / new.norm()
        torch.testing.assert_close(found[name], p, atol=1e-12, rtol=1e-11)


def test_a_cpu_computes_in_the_dtype_of_the_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", None)
    assert orthogonalise(drawn(0)["up"][None], 5).dtype == torch.float64


def test_together_q_k_and_v_are_one_matrix() -> None:
    options = OPTIONS["together"]
    start, grads, found = drawn(0), drawn(1), updated(options, steps=1)
    names = [f"blocks.1.attn.{leaf}.weight" for leaf in "qkv"]
    joint = torch.cat([start[name] for name in names]).requires_grad_()
    joint.grad = torch.cat([grads[name] for name in names])
    torch.optim.Muon([joint], lr=options.lr, momentum=options.momentum, adjust_lr_fn="match_rms_adamw").step()
    for name, expected in zip(names, joint.detach().chunk(3), strict=True):
        torch.testing.assert_close(found[name], expected, atol=1e-12, rtol=1e-12)
        assert not torch.allclose(found[name], updated(OPTIONS["muon"], steps=1)[name])


def test_heads_of_q_k_and_v_are_matrices_of_their_own() -> None:
    options = Muon(**COMMON, qkv="heads", heads=2)
    start, grads, found = drawn(0), drawn(1), updated(options, steps=1)
    for name in HIDDEN:
        parts = 2 if ".attn." in name else 1
        rows = [part.clone().requires_grad_() for part in start[name].chunk(parts)]
        for part, grad in zip(rows, grads[name].chunk(parts), strict=True):
            part.grad = grad
        torch.optim.Muon(rows, lr=options.lr, momentum=options.momentum, adjust_lr_fn="match_rms_adamw").step()
        torch.testing.assert_close(found[name], torch.cat(rows).detach(), atol=1e-12, rtol=1e-12)


@with_options
def test_the_update_does_not_depend_on_the_size_of_the_gradient(options: Orthogonal) -> None:
    start = {name: p.float() for name, p in drawn(0).items()}
    by_scale: list[dict[str, Tensor]] = []
    for scale in (1.0, 2.0**-30, 2.0**-100):  # float32 holds their multiples without rounding
        params = {name: p.clone() for name, p in start.items()}
        optimizer = Optimizer([options], params, GROUPS)
        for step in range(3):
            grads = {name: scale * g.float() for name, g in drawn(1 + step).items()}
            own = [hyperparameters_at(family.options[0], 3, step) for family in optimizer.families]
            optimizer.update(params, grads, own, torch.tensor(True))
        by_scale.append(params)
    for name in HIDDEN:
        assert not torch.equal(by_scale[0][name], start[name])
        assert torch.equal(by_scale[1][name], by_scale[0][name])
        assert torch.equal(by_scale[2][name], by_scale[0][name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # of a CPU and of a GPU
def test_matrices_that_are_updated_together_may_differ_in_size(dtype: torch.dtype) -> None:
    matrices = torch.stack([drawn(seed)["up"] for seed in range(3)]).to(dtype)
    factors = torch.tensor([2.0**-60, 0.0, 2.0**60], dtype=dtype).view(3, 1, 1)
    found, expected = orthogonalise(factors * matrices, 5), orthogonalise(matrices, 5)
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert torch.equal(found[1], torch.zeros_like(found[1]))


@pytest.mark.parametrize(
    ("dtype", "factor", "tolerance"),
    [
        (torch.float16, 2.0**-20, 0.02),  # below the smallest normal number
        (torch.float32, 2.0**-100, 1e-4),
        (torch.bfloat16, 2.0**-100, 0.1),
        (torch.float64, 2.0**-1000, 1e-10),
    ],
)
def test_small_matrices_are_those_of_the_dtype(dtype: torch.dtype, factor: float, tolerance: float) -> None:
    small = (factor * drawn(0)["up"][None]).to(dtype)
    found, expected = orthogonalise(small, 5), orthogonalise(small.double() / factor, 5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0.0)
    assert not orthogonalise(torch.zeros_like(small), 5).any()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_matrix_is_scaled_by_the_power_of_two_of_its_largest_element(sign: float) -> None:
    matrix = 37 * sign * drawn(0)["up"].abs()[None]  # all elements have one sign
    _, exponent = math.frexp(max(map(abs, matrix.flatten().tolist())))
    assert torch.equal(scale_by_power_of_two(matrix), matrix * 2.0**-exponent)


@with_options
def test_a_gradient_of_zero_changes_nothing(options: Orthogonal) -> None:
    options = dataclasses.replace(options, weight_decay=0.0)
    params = drawn(0)
    optimizer = Optimizer([options], params, GROUPS)
    own = [hyperparameters_at(family.options[0], 1, 0) for family in optimizer.families]
    optimizer.update(params, {name: torch.zeros_like(p) for name, p in params.items()}, own, torch.tensor(True))
    for name, p in drawn(0).items():
        # The sphere rounds the weights: w |w| / |w|.
        tolerance = 1e-14 if isinstance(options, Hyperball) else 0.0
        torch.testing.assert_close(params[name], p, atol=0.0, rtol=tolerance)


@with_options
def test_stacked_runs_equal_single_ones_and_a_skipped_one_keeps_its_bits(options: Orthogonal) -> None:
    runs = [copy.deepcopy(options) for _ in range(3)]
    for number, run in enumerate(runs):
        run.lr, run.weight_decay, run.momentum = options.lr * (1 + number), 0.1 * number, 0.9 - 0.1 * number
    made = families(runs, GROUPS)
    order = [name for family in made for name in family.names]
    start = drawn(0, 3)
    stacked = Stack(start, transposed=["up", "down"], order=order)
    together = Optimizer(runs, stacked, GROUPS)
    single = [{name: p[r].clone() for name, p in start.items()} for r in range(3)]
    alone = [Optimizer([run], single[r], GROUPS) for r, run in enumerate(runs)]
    alive = torch.tensor([True, False, True])
    for step in range(6):
        sizes = torch.tensor([1.0, 2.0, 1e-12])  # of the gradients of each run
        grads = {name: g * sizes.view(3, *[1] * (g.dim() - 1)) for name, g in drawn(step, 3).items()}
        grads = {name: torch.where(alive.view(3, *[1] * (g.dim() - 1)), g, torch.nan) for name, g in grads.items()}
        by_family = [[hyperparameters_at(each, 6, step) for each in family.options] for family in together.families]
        gathered = Stack(grads, transposed=["up", "down"], order=order)
        together.update(stacked, gathered, coefficients_of(by_family, step + 1), alive)
        for r, optimizer in enumerate(alone):
            own = [hyperparameters_at(family.options[0], 6, step) for family in optimizer.families]
            optimizer.update(single[r], {name: g[r] for name, g in grads.items()}, own, alive[r])
    for name, p in stacked.items():
        assert torch.equal(p[1], start[name][1])
        for r in range(3):
            torch.testing.assert_close(p[r], single[r][name], atol=1e-12, rtol=1e-12)


def test_the_groups_that_are_not_matrices_have_adamw() -> None:
    options = Muon(lr=0.1, beta2=0.9, eps=1e-5, weight_decay=0.3)
    own = options.of_group("embed")
    assert type(own) is AdamW
    assert (own.name, own.lr, own.beta2, own.eps, own.weight_decay) == ("adamw", 0.1, 0.9, 1e-5, 0.3)
    optimizer = Optimizer([options], drawn(0), GROUPS)
    assert {kind: sorted(tensors) for kind, tensors in optimizer.moments.items()} == {
        "momentum": sorted(HIDDEN), "mean": ["embed", "gain"], "square": ["embed", "gain"],
    }  # fmt: skip
