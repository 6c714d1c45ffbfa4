"""The contract of `norms.base`, as far as `normlab verify` does not check it, over every norm and its choices."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from normlab.errors import ConfigError
from normlab.norms import base
from normlab.norms.base import NormConfig, load_all, register_norm
from normlab.norms.batchnorm import BatchNormConfig
from normlab.norms.layernorm import LayerNormConfig
from normlab.norms.rmsnorm import RMSNormConfig
from support.norm_variants import ALL, NO_EPS, WIDTH, both_modes, build, draw, label, validate

DEFAULTS = [kind() for kind in load_all().values()]  # pyright: ignore[reportCallIssue]

each_norm = pytest.mark.parametrize("options", DEFAULTS, ids=label)
each_variant = pytest.mark.parametrize("options", ALL, ids=label)
# Where a variant takes long: all but the defaults are slow; tests/verify holds each to its reference in any case.
mainly_defaults = pytest.mark.parametrize(
    "options",
    [pytest.param(one, marks=[] if one in DEFAULTS else pytest.mark.exhaustive, id=label(one)) for one in ALL],
)


def outcome(norm: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The output, the gradients of a fixed sum of it, and the buffers afterwards."""
    x = x.detach().clone().requires_grad_()
    y = norm(x)
    named = {"x": x} | dict(norm.named_parameters())
    grads = torch.autograd.grad((y * draw(*y.shape, seed=99, dtype=y.dtype)).sum(), list(named.values()))
    return y.detach(), dict(zip(named, grads, strict=True)), dict(norm.named_buffers())


def assert_same(actual: tuple, expected: tuple, **tolerance: float) -> None:
    for part, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(part, other, **tolerance)


# What is kept


@each_norm
def test_buffers_are_reassigned_not_written_in_place(options: NormConfig) -> None:
    norm = build(options)
    held = dict(norm.named_buffers())
    values = {name: tensor.clone() for name, tensor in held.items()}
    norm(draw(2, 3, WIDTH, dtype=torch.float32).requires_grad_())
    for name, tensor in held.items():
        torch.testing.assert_close(tensor, values[name], rtol=0, atol=0)
    # Nor do they hold on to the graph of the batch that moved them.
    assert not any(buffer.requires_grad for buffer in norm.buffers())


# How it runs


@each_variant
@both_modes
def test_vmap_equals_the_loop(options: NormConfig, training: bool) -> None:
    norms = [build(options, seed=seed, training=training).double() for seed in range(3)]
    x = draw(3, 2, 4, WIDTH).requires_grad_()
    weight = draw(3, 2, 4, WIDTH, seed=1)
    owned = [dict(norm.named_parameters()) for norm in norms]
    params = {name: torch.stack([own[name].detach() for own in owned]).requires_grad_() for name in owned[0]}
    owned = [dict(norm.named_buffers()) for norm in norms]
    buffers = {name: torch.stack([own[name] for own in owned]) for name in owned[0]}

    def one(tensors: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # functional_call writes reassigned buffers back into the dict that it is given.
        own = dict(tensors)
        y = functional_call(norms[0], own, (x,))
        return y, {name: own[name] for name in buffers}

    y, after = vmap(one)(params | buffers, x)
    leaves = {"x": x} | params
    grads = dict(zip(leaves, torch.autograd.grad((y * weight).sum(), list(leaves.values())), strict=True))
    for run, norm in enumerate(norms):
        own_x = x[run].detach().requires_grad_()
        own_y = norm(own_x)
        own = {"x": own_x} | dict(norm.named_parameters())
        own_grads = torch.autograd.grad((own_y * weight[run]).sum(), list(own.values()))
        torch.testing.assert_close(y[run], own_y, rtol=1e-12, atol=1e-12)
        for name, grad in zip(own, own_grads, strict=True):
            torch.testing.assert_close(grads[name][run], grad, rtol=1e-11, atol=1e-11)
        for name, buffer in norm.named_buffers():
            torch.testing.assert_close(after[name][run], buffer, rtol=1e-12, atol=1e-12)


class NormStack(nn.Module):
    """A stack of norms, compiled as one module.

    Each norm has a separate input: the rounding errors of a shared input's gradient could exceed that gradient.
    """

    def __init__(self, norms: list[nn.Module]):
        super().__init__()
        self.norms = nn.ModuleList(norms)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([norm(own) for norm, own in zip(self.norms, x, strict=True)])


@mainly_defaults
def test_one_graph_equals_eager(options: NormConfig) -> None:
    # Traced as a compiled run would be, but not lowered to C++: that is the slow part, done once below.
    torch.compiler.reset()
    norm, x = NormStack([build(options)]), draw(1, 2, 3, WIDTH, dtype=torch.float32)
    expected = outcome(copy.deepcopy(norm), x)
    norm.compile(fullgraph=True, dynamic=False, backend="eager")
    assert_same(outcome(norm, x), expected, rtol=0, atol=0)


# Gradients

INPUTS = {
    "zero": torch.zeros(2, 3, WIDTH, dtype=torch.float64),
    "tiny": 1e-8 * draw(2, 3, WIDTH),
    "huge": 1e4 * draw(2, 3, WIDTH),
    "constant": torch.full((2, 3, WIDTH), 0.1, dtype=torch.float64),
}


@pytest.mark.exhaustive
@each_variant
@pytest.mark.parametrize("kind", INPUTS)
def test_values_and_gradients_are_finite(options: NormConfig, kind: str) -> None:
    for training, dtype in itertools.product((True, False), (torch.float32, torch.bfloat16)):
        y, grads, buffers = outcome(build(options, training=training), INPUTS[kind].to(dtype))
        if options == NO_EPS and kind == "zero":
            # The one norm that is not defined everywhere says so.
            assert "NaN at x = 0" in (type(options).__doc__ or "")
            assert y.isnan().all()
            continue
        for tensor in (y, *grads.values(), *buffers.values()):
            assert tensor.isfinite().all(), (training, dtype)


# What it declares


@each_norm
def test_evaluation_changes_nothing(options: NormConfig) -> None:
    norm = build(options, training=False)
    before = copy.deepcopy(norm.state_dict())
    norm(draw(2, 3, WIDTH, dtype=torch.float32))
    torch.testing.assert_close(norm.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", load_all())
def test_norm_has_formula_source_and_name(name: str) -> None:
    kind = load_all()[name]
    # A dataclass without a docstring is given its signature for one.
    doc = kind.__doc__ or ""
    assert doc.strip()
    assert not doc.startswith(kind.__name__)
    assert all(text.endswith(".") for text in kind.pitfalls)
    for text in (kind.formula, kind.source, kind.verified_by, *kind.pitfalls):
        assert text == text.strip()
        assert text
        assert "\n" not in text
    assert kind().name == name  # pyright: ignore[reportCallIssue]
    assert kind().label == name  # pyright: ignore[reportCallIssue]
    assert kind(preset="mine").label == "mine"  # pyright: ignore[reportCallIssue]


# What is refused


@pytest.mark.parametrize(
    ("options", "override"),
    [
        (LayerNormConfig(unit_offset=True, gain=False), "norm.unit_offset"),
        (BatchNormConfig(unit_offset=True, gain=False), "norm.unit_offset"),
        (RMSNormConfig(unit_offset=True, gain=False), "norm.unit_offset"),
        (RMSNormConfig(rounding="cast_then_scale", gain=False), "norm.rounding"),
        (RMSNormConfig(rounding="cast_then_scale", compute="input"), "norm.rounding"),
        (RMSNormConfig(eps_mode="none"), "norm.eps=1e-06"),
        (RMSNormConfig(eps_mode="inside"), "norm.eps_mode=inside (did you mean 'inside_ms'?): choose one of inside_ms"),
        (RMSNormConfig(eps=-1e-6), "norm.eps=-1e-06: must be at least 0"),
        (LayerNormConfig(eps=float("inf")), "norm.eps=inf"),
        (LayerNormConfig(eps=float("nan")), "norm.eps=nan"),
        (LayerNormConfig(eps_mode="inside_ms"), "norm.eps_mode"),
        (BatchNormConfig(momentum=0.0), "norm.momentum=0.0: must be greater than 0"),
        (BatchNormConfig(momentum=1.5), "norm.momentum=1.5: must be at most 1"),
        (BatchNormConfig(running_var="population"), "norm.running_var"),
    ],
    ids=lambda value: label(value) if isinstance(value, NormConfig) else None,
)
def test_options_without_effect_are_rejected(options: NormConfig, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(options)
    assert str(caught.value).startswith(override)


@pytest.mark.parametrize(
    "options",
    [
        RMSNormConfig(rounding="cast_then_scale", gain=False, bias=True),
        RMSNormConfig(compute="input", unit_offset=True),
        BatchNormConfig(momentum=1.0),
        NO_EPS,
    ],
    ids=label,
)
def test_options_with_effect_are_accepted(options: NormConfig) -> None:
    validate(options)


# The registry


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[NormConfig]]:
    """A copy of the registry, which the test may spoil."""
    monkeypatch.setattr(base, "NORMS", dict(base.NORMS))
    return base.NORMS


def test_second_norm_of_the_same_name_is_rejected(registry: dict[str, type[NormConfig]]) -> None:
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Mine(NormConfig):
        name: str = "rmsnorm"

    with pytest.raises(ConfigError, match="'rmsnorm' is defined twice"):
        register_norm(Mine)
    assert registry["rmsnorm"] is RMSNormConfig


def test_norm_without_a_name_is_rejected(registry: dict[str, type[NormConfig]]) -> None:
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Nameless(NormConfig):
        pass

    before = dict(registry)
    with pytest.raises(ConfigError, match="Nameless: give the field `name` a default"):
        register_norm(Nameless)
    assert registry == before


@pytest.mark.parametrize(
    ("mode", "eps", "finite"),
    [
        *((mode, eps, eps > 2.05e-26) for mode in ("inside_ms", "inside_sum") for eps in (2.1e-26, 2e-26, 1e-30)),
        *((mode, eps, eps > 5e-39) for mode in ("outside_rms", "clamp") for eps in (1e-30, 1e-38, 1e-39)),
    ],
)
def test_the_smallest_eps_at_which_the_gradient_at_zero_is_finite(mode: str, eps: float, finite: bool) -> None:
    x = torch.zeros(2, WIDTH, requires_grad=True)
    RMSNormConfig(eps=eps, eps_mode=mode).build(WIDTH)(x).sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all()) == finite
