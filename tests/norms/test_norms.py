"""The contract of `norms.base`, as far as `normlab verify` does not check it, over every norm and its choices."""

import copy
import dataclasses
import itertools

import pytest
import torch
from torch import Tensor, nn

from normlab.base.errors import ConfigError
from normlab.base.options import check
from normlab.catalogue.norms import base
from normlab.catalogue.norms.base import NormConfig, load_all, register_norm
from normlab.catalogue.norms.batchnorm import BatchNormConfig
from normlab.catalogue.norms.layernorm import LayerNormConfig
from normlab.catalogue.norms.rmsnorm import RMSNormConfig
from normlab.verify.variants import label_of, variants

DEFAULTS = [kind() for kind in load_all().values()]  # pyright: ignore[reportCallIssue]

each_norm = pytest.mark.parametrize("options", DEFAULTS, ids=label_of)
WIDTH = 8
NO_EPS = RMSNormConfig(eps_mode="none", eps=0.0)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def build(options: NormConfig, *, training: bool = True) -> nn.Module:
    """The norm with parameters that are not where they start, and running statistics that have moved."""
    norm = options.build(WIDTH)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))
        for _ in range(3):
            norm.train()(2 + 3 * torch.randn(4, 5, WIDTH, generator=generator))
    return norm.train(training)


def outcome(norm: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The output, the gradients of a fixed sum of it, and the buffers afterwards."""
    x = x.detach().clone().requires_grad_()
    y = norm(x)
    named = {"x": x} | dict(norm.named_parameters())
    grads = torch.autograd.grad((y * draw(*y.shape, seed=99, dtype=y.dtype)).sum(), list(named.values()))
    return y.detach(), dict(zip(named, grads, strict=True)), dict(norm.named_buffers())


def assert_same(actual: tuple, expected: tuple, *, rtol: float, atol: float) -> None:
    for part, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(part, other, rtol=rtol, atol=atol)


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


@pytest.mark.few(2)
@pytest.mark.parametrize("options", [each for each in DEFAULTS if each.name != "none"], ids=label_of)
def test_one_graph_equals_eager(options: NormConfig) -> None:
    """Traced as a compiled run would be, but not lowered to C++."""
    torch.compiler.reset()
    norm, x = build(options), draw(2, 3, WIDTH, dtype=torch.float32)
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
@pytest.mark.parametrize(
    "options",
    # With eps=0 a norm divides 0 by 0 at a zero or a constant input.
    [each for options in DEFAULTS for each in variants(options, WIDTH) if getattr(each, "eps", 1) > 0] + [NO_EPS],
    ids=label_of,
)
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


def validate(options: NormConfig) -> None:
    """As a run does it."""
    check(options, "norm.")
    options.validate()


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
    ids=lambda value: label_of(value) if isinstance(value, NormConfig) else None,
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
    ids=label_of,
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
    class Mine(RMSNormConfig):
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
