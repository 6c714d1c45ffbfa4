"""Identities between norms, and formulas in numpy of the norms whose `reference` follows from no external code.

The gradients of the numpy formulas are taken by a complex step, f'(x) = Im f(x + ih) / h, which is exact to rounding
and shares nothing with autograd. `min` and `max` are those of the real part.
"""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from normlab.catalogue.norms.base import NormConfig, load_all
from normlab.catalogue.norms.batchnorm_by_position import BatchNormPastConfig
from normlab.catalogue.norms.bhyt import BHyTConfig
from normlab.catalogue.norms.gatednorm import GatedNormConfig
from normlab.catalogue.norms.l2norm import L2NormConfig
from normlab.catalogue.norms.minmax import MinMaxConfig
from normlab.catalogue.norms.pointwise import FUNCTIONS
from normlab.catalogue.norms.rmsnorm import RMSNormConfig
from normlab.catalogue.norms.seednorm import SeeDNormConfig
from normlab.catalogue.norms.zscore import ZScoreConfig
from normlab.config.compose import compose_run
from normlab.model.groups import groups_of
from normlab.model.init import build_model

WIDTH = 12
Array = NDArray[np.complex128]
Params = Mapping[str, NDArray[np.float64]]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(options: NormConfig) -> nn.Module:
    """The norm in float64, its parameters not where they start."""
    norm = options.build(WIDTH).double()
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            parameter.add_(0.3 * draw(*parameter.shape, seed=20 + seed))
    return norm


def slopes_of(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of a fixed sum of it."""
    x = x.detach().clone().requires_grad_()
    y = norm(x)
    return y.detach(), torch.autograd.grad((y * draw(*y.shape, seed=9)).sum(), x)[0]


# Formulas in numpy, of one token


def affine(y: Array, params: Params, unit_offset: bool = False) -> Array:
    if "affine.gain" in params:
        y = y * (params["affine.gain"] + unit_offset)
    return y + params.get("affine.bias", 0.0)


def minmax(x: Array, options: MinMaxConfig, params: Params) -> Array:
    low, high = x[x.real.argmin()], x[x.real.argmax()]
    return affine((x - low) / (high - low + options.eps), params)


def rms(x: Array, eps: float) -> np.complex128:
    return np.sqrt((x * x).sum() / len(x) + eps)


def seednorm(x: Array, options: SeeDNormConfig, params: Params) -> Array:
    gain = np.tanh((x * params["beta"]).sum()) * params["alpha"] + params["gamma"] + options.unit_offset
    return gain * x / rms(x, options.eps)


def gatednorm(x: Array, options: GatedNormConfig, params: Params) -> Array:
    y = affine(x / rms(x, options.eps), params, options.unit_offset)
    hidden = params["down"] @ y
    hidden = hidden / (1 + np.exp(-hidden))
    return options.gate_scale * y / (1 + np.exp(-params["up"] @ hidden))


def bhyt(x: Array, options: BHyTConfig, params: Params) -> Array:
    return affine(np.tanh(params.get("lam", options.lam) / options.kappa * x / rms(x, options.eps)), params)


CASES: list[tuple[Callable[..., Array], NormConfig]] = [
    (minmax, MinMaxConfig(eps=0.3, gain=True, bias=True)),
    (minmax, MinMaxConfig(eps=0.0)),
    (seednorm, SeeDNormConfig(eps=0.3)),
    (seednorm, SeeDNormConfig(eps=0.3, alpha=0.4, unit_offset=True)),
    (gatednorm, GatedNormConfig(eps=0.3)),
    (gatednorm, GatedNormConfig(eps=0.3, rank=3, std=0.5, gate_scale=2.0, unit_offset=True, bias=True)),
    (bhyt, BHyTConfig(eps=0.3, bias=True)),
    (bhyt, BHyTConfig(eps=0.3, lam=3.0, kappa=2.0, learn_lam=False)),
]


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
@pytest.mark.parametrize(
    ("formula", "options"), CASES, ids=[f"{options.name}{i}" for i, (_, options) in enumerate(CASES)]
)
def test_norm_equals_its_formula(formula: Callable[..., Array], options: NormConfig, scale: float) -> None:
    norm = built(options)
    params = {name: parameter.detach().numpy() for name, parameter in norm.named_parameters()}
    x = scale * (draw(3, WIDTH) + 0.5)
    y, grad = slopes_of(norm, x)
    weight, step = draw(3, WIDTH, seed=9).numpy(), 1e-30 * scale
    for token in range(3):
        row = x[token].numpy().astype(np.complex128)
        np.testing.assert_allclose(y[token], formula(row, options, params).real, rtol=1e-12, atol=1e-12)
        slopes = [
            (weight[token] * formula(row + 1j * step * unit, options, params).imag).sum() / step
            for unit in np.eye(WIDTH)
        ]
        np.testing.assert_allclose(grad[token], slopes, rtol=1e-10, atol=1e-12 / scale)


def test_every_norm_without_an_independent_oracle_has_a_formula() -> None:
    shipped = [kind for kind in load_all().values() if kind.__module__.startswith("normlab.catalogue.norms.")]
    alone = {kind().name for kind in shipped if kind.reference_kind == "self"}  # pyright: ignore[reportCallIssue]
    assert {options.name for _, options in CASES} == alone


# Identities


def assert_same(norm: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Equal values and gradients, to float64's rounding."""
    for ours, theirs in zip(slopes_of(norm, x), slopes_of(other, x), strict=True):  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


X = draw(2, 5, WIDTH, seed=3) + 0.5


@pytest.mark.parametrize("name", FUNCTIONS)
def test_pointwise_function_is_odd_and_bounded(name: str) -> None:
    function, x = FUNCTIONS[name], torch.linspace(0, 50, 2001, dtype=torch.float64)
    torch.testing.assert_close(function(-x), -function(x), rtol=0, atol=0)
    assert function(x).max() <= 1
    assert function(torch.tensor([1e4, 1e6, 1e12], dtype=torch.float64)).min() > 0.9
    assert (function(x).diff() >= 0).all()


def test_zscore_has_the_standard_deviation_of_a_sample() -> None:
    y = ZScoreConfig(eps=0.0, sigma="sample").build(WIDTH).double()(X)
    np.testing.assert_allclose(y.numpy().std(-1, ddof=1), 1)
    np.testing.assert_allclose(y.numpy().mean(-1), 0, atol=1e-12)


def test_l2norm_at_the_root_of_the_width_is_rmsnorm() -> None:
    rms = RMSNormConfig(eps=0.0, eps_mode="none", gain=False).build(WIDTH).double()
    assert_same(L2NormConfig(eps=0.0, radius=None).build(WIDTH).double(), rms, X)


def test_gate_is_drawn_with_std_under_every_init_rule() -> None:
    overrides = ["norm=gatednorm", "norm.std=0.5", "norm.rank=64", "init=xavier", "model.depth=1", "model.width=64"]
    config = compose_run(overrides)
    model = build_model(config, 50)
    drawn = {name: p for name, p in model.named_parameters() if name.endswith((".down", ".up"))}
    assert len(drawn) == 6  # two norms of the block and the last one
    for name, parameter in drawn.items():
        assert parameter.std().item() == pytest.approx(0.5, rel=0.05)
        assert config.optim.of_group(groups_of(model)[name]).weight_decay > 0
    # Each norm draws its own.
    assert len({parameter[0, 0].item() for parameter in drawn.values()}) == 6


def test_batchnorm_past_is_accurate_far_from_zero() -> None:
    # A difference of running sums would have lost them: in float32 the square of 1e4 has steps of 8.
    x = draw(4, 32, WIDTH)
    norm = BatchNormPastConfig(eps=0.0).build(WIDTH)
    exact = BatchNormPastConfig(eps=0.0).build(WIDTH).double()((x + 1e4).float().double())
    torch.testing.assert_close(norm((x + 1e4).float()).double(), exact, rtol=1e-2, atol=1e-2)
