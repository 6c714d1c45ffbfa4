"""Norms and presets against the code and formulas of four articles on normalisation, transcribed here.

The transcriptions keep the names and the order of operations of the articles:

- 000: an unsigned article "Normalization" (normalisation before each block of a transformer);
- 001: an unsigned article on normalisation (Z-score, min-max, batch norm and layer norm);
- 003: Nikiema 2025, "Normalization in Transformers" (blog post);
- 004: the article "Layer Normalization: normalizing across features for sequence models and Transformers".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from normlab.config.compose import compose_run
from normlab.norms.base import NormConfig
from normlab.paths import config_dir
from support.tolerance import assert_equal

WIDTH = 12


def assert_same(ours: Tensor, article: Tensor) -> None:
    assert_equal(ours, article, terms=15, layers=2)  # at most 15 tokens; forward and back


@cache
def preset(*overrides: str) -> NormConfig:
    return compose_run(overrides).norm


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Article 000


class RMSNorm000(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x):
        rms = x.pow(2).mean(dim=-1, keepdim=True).sqrt()
        return x / (rms + self.eps) * self.weight


def layer_norm_000(h, gamma, beta, epsilon=1e-5):
    # Its code is nn.LayerNorm, whose epsilon is 1e-5.
    d = h.shape[-1]
    mu = h.sum(-1, keepdim=True) / d
    sigma2 = ((h - mu) ** 2).sum(-1, keepdim=True) / d
    return gamma * ((h - mu) / torch.sqrt(sigma2 + epsilon)) + beta


def batch_norm_000(x, gamma, beta, epsilon=1e-5):
    tokens = x.reshape(-1, x.shape[-1])
    batch = len(tokens)
    mu = tokens.sum(0) / batch
    sigma2 = ((tokens - mu) ** 2).sum(0) / batch
    return gamma * ((x - mu) / torch.sqrt(sigma2 + epsilon)) + beta


# Article 001


class BatchNorm001(nn.Module):
    def __init__(self, num_features, eps=1e-5, momentum=0.1):
        super().__init__()
        self.eps = eps
        self.momentum = momentum
        self.gamma = nn.Parameter(torch.ones(num_features))
        self.beta = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x):
        if self.training:
            mean = x.mean(dim=0)
            var = x.var(dim=0, unbiased=False)
            self.running_mean = (1 - self.momentum) * self.running_mean + self.momentum * mean.detach()
            self.running_var = (1 - self.momentum) * self.running_var + self.momentum * var.detach()
            x_hat = (x - mean[None, :]) / torch.sqrt(var[None, :] + self.eps)
        else:
            x_hat = (x - self.running_mean[None, :]) / torch.sqrt(self.running_var[None, :] + self.eps)
        return self.gamma[None, :] * x_hat + self.beta[None, :]


class LayerNorm001(nn.Module):
    def __init__(self, normalized_shape, eps=1e-5):
        super().__init__()
        if isinstance(normalized_shape, int):
            normalized_shape = (normalized_shape,)
        self.normalized_shape = normalized_shape
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(*normalized_shape))
        self.beta = nn.Parameter(torch.zeros(*normalized_shape))

    def forward(self, x):
        dims = [-i for i in range(1, len(self.normalized_shape) + 1)]
        mean = x.mean(dim=dims, keepdim=True)
        var = x.var(dim=dims, keepdim=True, unbiased=False)
        x_hat = (x - mean) / torch.sqrt(var + self.eps)
        return self.gamma * x_hat + self.beta


# Article 003


class LayerNorm003(nn.Module):
    def __init__(self, layer_shape, eps=1e-6):
        super().__init__()
        self.layer_shape = (layer_shape,) if isinstance(layer_shape, int) else tuple(layer_shape)
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(*self.layer_shape))
        self.beta = nn.Parameter(torch.zeros(*self.layer_shape))

    def forward(self, x):
        start_dim = x.dim() - len(self.layer_shape)
        norm_dim = tuple(range(start_dim, x.dim()))
        variance = x.var(norm_dim, keepdim=True, unbiased=False)
        mean = x.mean(norm_dim, keepdim=True)
        norm_x = (x - mean) / torch.sqrt(variance + self.eps)
        norm_x = self.gamma * norm_x + self.beta
        return norm_x


def layer_norm_003_formula(x, gamma, beta, epsilon=1e-6):
    mu = x.sum(-1, keepdim=True) / x.shape[-1]
    sigma = torch.sqrt(((x - mu) ** 2).sum(-1, keepdim=True) / x.shape[-1])
    return gamma * (x - mu) / (sigma + epsilon) + beta


class RMSNorm003(nn.Module):
    def __init__(self, emb_dim, eps=1e-6, bias=False, qwen3_compatible=True):
        super().__init__()
        self.eps = eps
        self.qwen3_compatible = qwen3_compatible
        self.scale = nn.Parameter(torch.ones(emb_dim))
        self.shift = nn.Parameter(torch.zeros(emb_dim)) if bias else None

    def forward(self, x):
        input_dtype = x.dtype
        if self.qwen3_compatible:
            x = x.to(torch.float32)
        variance = x.pow(2).mean(dim=-1, keepdim=True)
        norm_x = x * torch.rsqrt(variance + self.eps)
        norm_x = norm_x * self.scale
        if self.shift is not None:
            norm_x = norm_x + self.shift
        return norm_x.to(input_dtype)


def rms_norm_003_formula(x, epsilon=1e-6):
    return x / torch.sqrt(epsilon + (x**2).sum(-1, keepdim=True))


# Article 004


def batch_norm_004(x, gamma, beta, epsilon=1e-5):
    n = x[..., 0].numel()
    mu_d = x.flatten(0, -2).sum(0) / n
    sigma2_d = ((x.flatten(0, -2) - mu_d) ** 2).sum(0) / n
    return gamma * (x - mu_d) / torch.sqrt(sigma2_d + epsilon) + beta


def layer_norm_004(x, gamma, beta, epsilon=1e-5):
    mu = torch.einsum("...d->...", x)[..., None] / x.shape[-1]
    sigma2 = torch.einsum("...d,...d->...", x - mu, x - mu)[..., None] / x.shape[-1]
    return gamma * (x - mu) / torch.sqrt(sigma2 + epsilon) + beta


def rms_norm_004(x, gamma, epsilon=1e-6):
    return x / torch.sqrt((x**2).sum(-1, keepdim=True) / x.shape[-1] + epsilon) * gamma


# The articles as functions of the input, the gain and the bias


def with_parameters(build: Callable[[], nn.Module]) -> Callable[..., Tensor]:
    """An article's module as a function of the input and its parameters, in their order."""

    def call(x: Tensor, *values: Tensor) -> Tensor:
        module = build().to(x.dtype)
        names = [name for name, _ in module.named_parameters()]
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))

    return call


def over_tokens(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Article 001's batch norm takes (N, D) alone: the tokens of a batch are its N."""
    return lambda x, *values: function(x.reshape(-1, x.shape[-1]), *values).view_as(x)


def wide_003(x: Tensor, scale: Tensor) -> Tensor:
    """Article 003's RMSNorm; in float64 without its upcast, which would narrow."""
    module = RMSNorm003(WIDTH, qwen3_compatible=x.dtype != torch.float64).to(x.dtype)
    return torch.func.functional_call(module, {"scale": scale}, (x,))


ARTICLES: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "000, batch norm": ("batchnorm", batch_norm_000),
    "000, layer norm": ("layernorm", layer_norm_000),
    "000, RMS norm": ("rmsnorm_eps_outside", with_parameters(lambda: RMSNorm000(WIDTH))),
    "001, batch norm": ("batchnorm_biased_var", over_tokens(with_parameters(lambda: BatchNorm001(WIDTH)))),
    "001, layer norm": ("layernorm", with_parameters(lambda: LayerNorm001(WIDTH))),
    "003, layer norm, code": ("layernorm_eps_1e-6", with_parameters(lambda: LayerNorm003(WIDTH))),
    "003, layer norm, formula": ("layernorm_eps_outside", layer_norm_003_formula),
    "003, RMS norm, code": ("rmsnorm", wide_003),
    "003, RMS norm, formula": ("rmsnorm_sum_of_squares", rms_norm_003_formula),
    "004, batch norm": ("batchnorm", batch_norm_004),
    "004, layer norm": ("layernorm", layer_norm_004),
    "004, RMS norm": ("rmsnorm", rms_norm_004),
}
"""The norm or preset that each article's function equals, and that function."""


def parameters_of(norm: nn.Module) -> list[Tensor]:
    """The gain and the bias that a norm has, moved from where they start."""
    named = [norm.affine.gain, norm.affine.bias]  # pyright: ignore[reportAttributeAccessIssue]
    present = [parameter for parameter in named if parameter is not None]
    with torch.no_grad():
        for seed, parameter in enumerate(present):
            parameter.add_(0.3 * draw(WIDTH, seed=20 + seed, dtype=parameter.dtype))
    return present


def value_and_gradients(call: Callable[..., Tensor], x: Tensor, params: list[Tensor]) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    y = call(x)
    grads = torch.autograd.grad((y * draw(*y.shape, seed=9, dtype=y.dtype)).sum(), [x, *params])
    return [y.detach(), *grads]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2e-3], ids=["large", "beside_eps"])
@pytest.mark.parametrize("article", ARTICLES)
def test_norm_equals_the_function_of_the_article(article: str, dtype: torch.dtype, scale: float) -> None:
    name, function = ARTICLES[article]
    norm = preset(f"norm={name}").build(WIDTH).to(dtype)
    params = parameters_of(norm)
    x = scale * (0.5 + draw(3, 5, WIDTH, dtype=dtype))
    ours = value_and_gradients(norm, x, params)
    expected = value_and_gradients(lambda x: function(x, *params), x, params)
    for mine, theirs in zip(ours, expected, strict=True):
        assert_same(mine, theirs)


# Properties beyond one forward pass


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_batchnorm_001_over_training_and_evaluation(dtype: torch.dtype) -> None:
    norm, article = preset("norm=batchnorm_biased_var").build(WIDTH).to(dtype), BatchNorm001(WIDTH).to(dtype)
    for seed in range(5):
        # (N, D) is the one shape that the article's code takes; at a small N the two variances differ.
        x = 1 + draw(4, WIDTH, seed=seed, dtype=dtype)
        assert_same(norm(x), article(x))
    assert_same(norm.running_mean, article.running_mean)
    assert_same(norm.running_var, article.running_var)
    x = draw(4, WIDTH, seed=9, dtype=dtype)
    assert_same(norm.eval()(x), article.eval()(x))


def test_rmsnorm_003_upcasts_and_rounds_once_at_the_end() -> None:
    norm, article = preset("norm=rmsnorm").build(256), RMSNorm003(256)
    scale = 1 + 0.3 * draw(256, seed=1, dtype=torch.float32)
    with torch.no_grad():
        norm.affine.gain.copy_(scale)
        article.scale.copy_(scale)
    x = draw(64, 256, dtype=torch.bfloat16)
    torch.testing.assert_close(norm(x), article(x), rtol=0, atol=0)
    narrow = RMSNorm003(256, qwen3_compatible=False)
    narrow.load_state_dict(article.state_dict())
    assert (norm(x) != narrow(x)).float().mean() > 0.05


def test_rmsnorm_000_has_a_finite_gradient_at_zero_unlike_the_article() -> None:
    # The article's code has no gradient at x = 0: sqrt'(0) is infinite. Ours takes the root's subgradient 0.
    for build, finite in ((lambda: RMSNorm000(WIDTH), False), (preset("norm=rmsnorm_eps_outside").build, True)):
        norm = build(WIDTH) if finite else build()
        x = torch.zeros(2, WIDTH, requires_grad=True)
        norm(x).sum().backward()
        assert x.grad is not None
        assert bool(x.grad.isfinite().all()) == finite


# The files

FILES = sorted((config_dir() / "norm").glob("*.yaml"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_preset_composes_and_carries_its_name(path: Path) -> None:
    norm = preset(f"norm={path.stem}")
    assert norm.preset == path.stem
    assert norm.label == path.stem
    assert path.stem.startswith(norm.name + "_")
    x = draw(2, 3, WIDTH, dtype=torch.float32)
    assert norm.build(WIDTH)(x).shape == x.shape
    comments = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert f"# normlab train norm={path.stem}" in comments
