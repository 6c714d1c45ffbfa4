"""Each norm against its own `reference`, in float64: outputs, all gradients, in training and in evaluation."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from normlab.norms.base import NormConfig, load_all
from normlab.norms.batchnorm import BatchNormConfig
from normlab.norms.batchnorm_by_position import BatchNormPastConfig, BatchNormPositionConfig
from normlab.norms.bhyt import BHyTConfig
from normlab.norms.gatednorm import GatedNormConfig
from normlab.norms.groupnorm import GroupNormConfig
from normlab.norms.l2norm import L2NormConfig, ScaleNormConfig
from normlab.norms.layernorm import LayerNormConfig
from normlab.norms.minmax import MinMaxConfig
from normlab.norms.pointwise import FUNCTIONS, PointwiseConfig
from normlab.norms.prmsnorm import PRMSNormConfig
from normlab.norms.rmsnorm import RMSNormConfig
from normlab.norms.seednorm import SeeDNormConfig
from normlab.norms.zscore import ZScoreConfig
from support.norm_variants import ALL, both_modes, build, draw, label

WIDTH = 8
CLASSES = load_all()
SHIPPED = {name: kind for name, kind in CLASSES.items() if kind.__module__.startswith("normlab.norms.")}

# Options beyond single switches: an eps that counts, and what acts only together with another.
FURTHER = [
    *(RMSNormConfig(eps=0.3, eps_mode=mode, bias=True) for mode in ("inside_ms", "outside_rms", "inside_sum", "clamp")),
    LayerNormConfig(eps=0.3, eps_mode="outside", unit_offset=True),
    ZScoreConfig(eps=0.3, sigma="sample", gain=True, unit_offset=True, bias=True),
    ZScoreConfig(eps=0.0),
    GroupNormConfig(groups=2, eps=0.3),
    GroupNormConfig(groups=1),
    L2NormConfig(eps=3.0, radius=None, learn_radius=True),
    ScaleNormConfig(eps=3.0, radius=2.0),
    MinMaxConfig(eps=0.3, gain=True, unit_offset=True, bias=True),
    PRMSNormConfig(eps=0.3, fraction=0.3, count="ceil", bias=True),
    PRMSNormConfig(eps=0.3, fraction=1.0),
    SeeDNormConfig(eps=0.3, alpha=0.4, unit_offset=True),
    GatedNormConfig(eps=0.3, rank=3, std=0.5, gate_scale=2.0, unit_offset=True, bias=True),
    BHyTConfig(eps=0.3, lam=3.0, kappa=2.0, learn_lam=True, bias=True),
    BatchNormConfig(eps=0.3, unit_offset=True),
    BatchNormPastConfig(eps=0.3, unit_offset=True),
    BatchNormPositionConfig(eps=0.3, unit_offset=True),
    *(PointwiseConfig(function=name, shift=True, alpha=1.5) for name in FUNCTIONS),
]
EVERY = [*ALL, *FURTHER]

each_case = pytest.mark.parametrize("options", EVERY, ids=label)
each_class = pytest.mark.parametrize("name", SHIPPED)


def slopes(y: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of one fixed sum of the outputs; zero where they do not depend on a leaf."""
    total = (y * draw(*y.shape, seed=99)).sum()
    if not total.requires_grad:
        return {}
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(leaf) if g is None else g for (n, leaf), g in zip(leaves.items(), grads, strict=True)}


def both(options: NormConfig, x: Tensor, training: bool, width: int = WIDTH) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Output and gradients of the module, then of its reference."""
    norm = build(options, width=width, training=training).double()
    # Taken before the module runs, for running statistics move.
    weights = {name: tensor.detach().clone() for name, tensor in norm.state_dict().items()}
    trained = [name for name, _ in norm.named_parameters()]
    for name in trained:
        weights[name].requires_grad_()
    mine, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    module = norm(mine)
    reference = (options.reference if training else options.reference_in_eval)(its, weights)
    return [
        (module.detach(), slopes(module, {"x": mine} | dict(norm.named_parameters()))),
        (reference.detach(), slopes(reference, {"x": its} | {name: weights[name] for name in trained})),
    ]


def assert_held(options: NormConfig, x: Tensor, training: bool, width: int = WIDTH) -> None:
    (y, grads), (expected, slopes_expected) = both(options, x, training, width)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    # In units of the largest one: a gradient is a sum in which large terms may cancel.
    assert grads.keys() == slopes_expected.keys()
    for name, grad in grads.items():
        scale = max(1.0, slopes_expected[name].abs().max().item())
        torch.testing.assert_close(grad, slopes_expected[name], rtol=1e-10, atol=1e-11 * scale, msg=name)


@each_case
@both_modes
@pytest.mark.parametrize("scale", [0.05, 1.0, 20.0])
def test_norm_equals_its_reference(options: NormConfig, training: bool, scale: float) -> None:
    assert_held(options, scale * (draw(3, 5, WIDTH, seed=4) + 0.3), training)


@each_case
@both_modes
def test_additional_axes_are_additional_tokens(options: NormConfig, training: bool) -> None:
    assert_held(options, draw(2, 3, 4, WIDTH, seed=5), training)


@each_case
def test_at_zero_and_where_all_channels_are_the_same(options: NormConfig) -> None:
    """A reference may be NaN there; a number in it is the module's."""
    for x in (torch.zeros(2, 3, WIDTH, dtype=torch.float64), torch.full((2, 3, WIDTH), 0.7, dtype=torch.float64)):
        (y, grads), (expected, slopes_expected) = both(options, x, training=True)
        known = expected.isfinite()
        torch.testing.assert_close(y[known], expected[known], rtol=1e-9, atol=1e-9)
        for name, grad in grads.items():
            known = slopes_expected[name].isfinite()
            wanted = slopes_expected[name][known]
            torch.testing.assert_close(grad[known], wanted, rtol=1e-9, atol=1e-8 * max(1.0, wanted.abs().sum().item()))


@each_class
def test_number_of_parameters_equals_the_declared_one(name: str) -> None:
    options = SHIPPED[name]()  # pyright: ignore[reportCallIssue]
    for width in (8, 24):
        counted = sum(parameter.numel() for parameter in options.build(width).parameters())
        declared = eval(options.parameters, {"__builtins__": {}}, {"D": width})  # noqa: S307
        assert declared == counted


@each_class
def test_norm_declares_its_oracle(name: str) -> None:
    kind = SHIPPED[name]
    assert kind.reference_kind in ("external", "identity", "self")
    for text in (kind.verified_by, kind.parameters, *kind.pitfalls):
        assert text
        assert text == text.strip()
    assert kind.reference is not NormConfig.reference
    assert all(text.endswith(".") for text in kind.pitfalls)


@each_class
def test_reference_does_not_use_the_module(name: str) -> None:
    kind: Any = SHIPPED[name]
    module = type(kind().build(WIDTH)).__name__
    for method in (kind.reference, kind.reference_in_eval):
        if method is not NormConfig.reference_in_eval:
            assert f"{module}(" not in inspect.getsource(method)
            assert "FUNCTIONS" not in inspect.getsource(method)
            assert "self.build" not in inspect.getsource(method)


def test_a_norm_with_batch_statistics_has_two_references() -> None:
    for kind in SHIPPED.values():
        assert (kind.reference_in_eval is not NormConfig.reference_in_eval) == kind.batch_statistics


def test_additional_cases_are_not_duplicates() -> None:
    seen = [dataclasses.astuple(options) for options in EVERY]
    assert len({(type(o).__name__, *t) for o, t in zip(EVERY, seen, strict=True)}) == len(EVERY)
