"""The contract of `norms.base`, over every norm that is registered and every choice that it offers."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re

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

# Importing inductor for the first time reads a deprecated part of torch itself.
IMPORTS_INDUCTOR = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")


def rounds_once(options: NormConfig) -> bool:
    """Whether the options choose neither to compute in a narrow dtype nor to round before its gain."""
    chosen = (getattr(options, "compute", "fp32"), getattr(options, "rounding", "scale_then_cast"))
    return chosen == ("fp32", "scale_then_cast")


DEFAULTS = [kind() for kind in load_all().values()]  # pyright: ignore[reportCallIssue]

each_norm = pytest.mark.parametrize("options", DEFAULTS, ids=label)
each_variant = pytest.mark.parametrize("options", ALL, ids=label)
# Where a variant takes long: all but the defaults are slow; test_references.py holds each to its formula in any case.
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


@pytest.mark.exhaustive
@each_variant
@pytest.mark.parametrize("shape", [(5, WIDTH), (2, 3, WIDTH), (2, 3, 4, WIDTH), (2, 3, 1)], ids=str)
def test_shape_and_dtype_are_kept_and_the_input_is_unchanged(options: NormConfig, shape: tuple[int, ...]) -> None:
    try:
        options.check_width(shape[-1])
    except ConfigError as refused:
        with pytest.raises(ConfigError, match=re.escape(str(refused))):
            options.build(shape[-1])
        return
    for training, dtype in itertools.product((True, False), (torch.float32, torch.float64, torch.bfloat16)):
        norm = build(options, width=shape[-1], training=training)
        x = draw(*shape, dtype=dtype)
        before = x.clone()
        y = norm(x)
        assert (y.shape, y.dtype) == (x.shape, dtype)
        assert y.isfinite().all()
        torch.testing.assert_close(x, before, rtol=0, atol=0)


@each_variant
@both_modes
def test_float64_is_computed_in_float64(options: NormConfig, training: bool) -> None:
    norm = build(options, training=training)
    x = draw(2, 3, WIDTH)
    torch.testing.assert_close(norm(x), copy.deepcopy(norm).double()(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [options for options in ALL if rounds_once(options)], ids=label)
@both_modes
def test_narrow_input_is_computed_in_float32_and_rounded_once(options: NormConfig, training: bool) -> None:
    norm = build(options, training=training)
    x = draw(2, 3, WIDTH, dtype=torch.bfloat16)
    torch.testing.assert_close(norm(x), copy.deepcopy(norm)(x.float()).bfloat16(), rtol=0, atol=0)


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


@each_variant
def test_initial_parameters_are_equal_at_every_construction(options: NormConfig) -> None:
    states = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            torch.manual_seed(3)
            states.append(options.build(WIDTH).state_dict())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [BatchNormConfig, LayerNormConfig, RMSNormConfig])
def test_unit_offset_is_initially_the_identity(kind: type[NormConfig]) -> None:
    x = draw(2, 3, WIDTH, dtype=torch.float32)
    offset = kind(unit_offset=True).build(WIDTH)  # pyright: ignore[reportCallIssue]
    assert torch.equal(offset.affine.gain, torch.zeros(WIDTH))  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(offset(x), kind().build(WIDTH)(x))  # pyright: ignore[reportCallIssue]


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


@pytest.mark.exhaustive
@IMPORTS_INDUCTOR
def test_compiled_norm_is_as_accurate_as_eager() -> None:
    # Where a gradient is a small difference of large terms, neither is near the other.
    torch.compiler.reset()
    norms = NormStack([build(options) for options in DEFAULTS])
    x = draw(2, 3, WIDTH, dtype=torch.float32).expand(len(DEFAULTS), 2, 3, WIDTH)
    exact = outcome(copy.deepcopy(norms).double(), x.double())
    eager = outcome(copy.deepcopy(norms), x)
    norms.compile(fullgraph=True, dynamic=False)
    compiled = outcome(norms, x)
    per_norm = [
        (label(norm), *(run[part][key][number] if key else run[part][number] for run in (compiled, eager, exact)))
        for number, norm in enumerate(DEFAULTS)
        for part, key in ((0, ""), (1, "x"))
    ]
    whole = [
        (name, *(run[part][name] for run in (compiled, eager, exact)))
        for part in (1, 2)
        for name in exact[part]
        if name != "x"
    ]
    for name, ours, theirs, true in per_norm + whole:
        error, allowed = (float((found - true).abs().max()) for found in (ours, theirs))
        assert error <= 3 * allowed + 4e-7 * max(1.0, float(true.abs().max())), name


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


@mainly_defaults
@both_modes
def test_gradcheck(options: NormConfig, training: bool) -> None:
    norm = build(options, training=training).double()
    names = [name for name, _ in norm.named_parameters()]
    buffers = dict(norm.named_buffers())

    def call(x: Tensor, *params: Tensor) -> Tensor:
        # A fresh dict for each call: every difference quotient starts from the same running statistics.
        return functional_call(norm, dict(zip(names, params, strict=True)) | buffers, (x,))

    x = draw(2, 2, WIDTH).requires_grad_()
    params = [parameter.detach().clone().requires_grad_() for parameter in norm.parameters()]
    assert torch.autograd.gradcheck(call, (x, *params))


# What it declares


def later_tokens_are_seen(norm: nn.Module) -> bool:
    """Whether any output at a position up to t moves when the tokens after t are other ones."""
    x = draw(2, 5, WIDTH, dtype=torch.float32)
    y = copy.deepcopy(norm)(x)
    for t in range(4):
        other = x.clone()
        other[0, t + 1 :] += draw(4 - t, WIDTH, seed=1, dtype=torch.float32)
        if not torch.equal(copy.deepcopy(norm)(other)[:, : t + 1], y[:, : t + 1]):
            return True
    return False


@each_variant
def test_causality_equals_the_declaration(options: NormConfig) -> None:
    assert later_tokens_are_seen(build(options, training=True)) == (not options.causal)
    assert not later_tokens_are_seen(build(options, training=False))


@each_variant
def test_batch_statistics_equal_the_declaration(options: NormConfig) -> None:
    norm, x = build(options), draw(2, 3, WIDTH, dtype=torch.float32)
    evaluated = copy.deepcopy(norm).eval()(x)
    assert torch.equal(norm.train()(x), evaluated) == (not options.batch_statistics)


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
    for text in (kind.formula, kind.source, kind.verified_by):
        assert text == text.strip()
        assert text
        assert "\n" not in text
    assert kind().name == name  # pyright: ignore[reportCallIssue]
    assert kind().label == name  # pyright: ignore[reportCallIssue]
    assert kind(preset="mine").label == "mine"  # pyright: ignore[reportCallIssue]


def test_variants_cover_the_options() -> None:
    labels = {label(options) for options in ALL}
    assert {
        "rmsnorm",
        "rmsnorm,eps_mode=clamp",
        "rmsnorm,unit_offset=True",
        "rmsnorm,compute=input",
    } <= labels
    assert {
        "layernorm,eps_mode=outside",
        "batchnorm,running_var=biased",
        "batchnorm,gain=False",
        "none",
    } <= labels


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
