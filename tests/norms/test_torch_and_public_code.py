"""Presets of norms against what others wrote: modules of torch and transformers, and public code, transcribed here."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normlab.base.paths import config_dir
from normlab.catalogue.norms.base import NormConfig
from normlab.catalogue.norms.batchnorm import BatchNorm
from normlab.catalogue.norms.layernorm import LayerNorm, LayerNormConfig
from normlab.catalogue.norms.rmsnorm import RMSNorm, RMSNormConfig
from normlab.config.compose import compose_run
from support.tolerance import assert_equal, float32_as_float64

WIDTH = 12
BFLOAT16 = torch.bfloat16
TERMS = 24
"""The longest sum: a gain's gradient over the tokens of a batch, WIDTH channels, or their outputs."""
EXACTLY: dict[str, Any] = {"rtol": 0.0, "atol": 0.0}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@torch.no_grad()
def fill(norm: LayerNorm | RMSNorm | BatchNorm, reference: nn.Module | None = None) -> None:
    """Give the norm, and the reference, a gain and a bias other than the initial ones."""
    for seed, (own, name) in enumerate([(norm.affine.gain, "weight"), (norm.affine.bias, "bias")]):
        if own is not None:
            own.add_(0.3 * draw(*own.shape, seed=20 + seed, dtype=own.dtype))
            if reference is not None:
                getattr(reference, name).copy_(own)


def outcome(norm: nn.Module, x: Tensor, params: list[Tensor | None]) -> list[Tensor]:
    """The output, and the gradients of a fixed sum of it with respect to the input and the parameters."""
    x = x.detach().clone().requires_grad_()
    y = norm(x)
    inputs = [x, *(parameter for parameter in params if parameter is not None)]
    weight = draw(*y.shape, seed=9, dtype=y.dtype)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), inputs)]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert_equal(ours, theirs, terms=TERMS, layers=2)  # forward and back


# bfloat16: where it is rounded


def in_bfloat16(norm: Any, reference: Any, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Both outputs for one bfloat16 input; the reference's weight is in bfloat16, as a checkpoint's is."""
    with torch.no_grad():
        norm.affine.gain.copy_(gain)
        reference.weight.copy_(gain)
    x = draw(64, 256, dtype=BFLOAT16)
    return norm(x), reference.to(BFLOAT16)(x)


def test_compute_input_rounds_at_every_operation() -> None:
    x, gain = draw(64, 256, dtype=BFLOAT16), 1 + 0.3 * draw(256, seed=1, dtype=torch.float32)
    norm: Any = RMSNormConfig(compute="input").build(256)
    wide: Any = RMSNormConfig().build(256)
    with torch.no_grad():
        norm.affine.gain.copy_(gain)
        wide.affine.gain.copy_(gain)
    squares = (x * x).mean(-1, keepdim=True)
    assert squares.dtype == BFLOAT16
    expected = (x * torch.rsqrt(squares + 1e-6)) * gain.to(BFLOAT16)
    torch.testing.assert_close(norm(x), expected, **EXACTLY)
    assert (norm(x) != wide(x)).float().mean() > 0.05


# Presets that are named after a model


@cache
def preset(name: str) -> NormConfig:
    return compose_run([f"norm={name}"]).norm


def llama(width: int) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return LlamaRMSNorm(width)


def gemma(width: int) -> nn.Module:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    return GemmaRMSNorm(width)


def gpt2(width: int) -> nn.Module:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    return GPT2Block(GPT2Config(n_embd=width, n_head=1)).ln_1


def olmo1(width: int) -> nn.Module:
    from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

    return OlmoLayerNorm(width)


class Paper(nn.Module):
    """bzhangGo/rmsnorm, rmsnorm_torch.py."""

    def __init__(self, d: int, eps: float = 1e-8):
        super().__init__()
        self.d, self.eps = d, eps
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        norm_x = x.norm(2, dim=-1, keepdim=True)
        rms_x = norm_x * self.d ** (-1.0 / 2)
        return self.weight * (x / (rms_x + self.eps))


class Simple(nn.Module):
    """TransNormerLLM's SimpleRMSNorm, which learns nothing."""

    def __init__(self, width: int):
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Annotated(nn.Module):
    """The Annotated Transformer's LayerNorm, its a_2 and b_2 called weight and bias."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return self.weight * centred / (x.std(-1, keepdim=True) + 1e-6) + self.bias


class Dynamic(nn.Module):
    """jiachenzhu/DyT's DynamicTanh for LLaMA, and zlab-princeton/Derf's Dynamic_erf for GPT-2."""

    def __init__(self, width: int, function: Callable[[Tensor], Tensor], *, bias: bool):
        super().__init__()
        self.function = function
        self.alpha, self.weight = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * self.function(self.alpha * x)
        return y if self.bias is None else y + self.bias


class MeanSquare(nn.Module):
    """x.pow(2) in the root's place for eps: outside it, or with a sum inside it instead of the mean."""

    def __init__(self, width: int, *, outside: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if outside else None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return x / torch.sqrt(1e-6 + (x**2).sum(-1, keepdim=True))
        return x / (x.pow(2).mean(dim=-1, keepdim=True).sqrt() + 1e-6) * self.weight


class OutsideSigma(Annotated):
    """The standard deviation over n, and eps outside the root."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        sigma = torch.sqrt((centred**2).mean(-1, keepdim=True))
        return self.weight * centred / (sigma + 1e-6) + self.bias


class BiasedBatchNorm(nn.Module):
    """Batch norm whose running variance is the biased one."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.running_mean, self.running_var = torch.zeros(width), torch.ones(width)

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        if self.training:
            tokens = x.reshape(-1, x.shape[-1])
            mean, var = tokens.mean(dim=0), tokens.var(dim=0, unbiased=False)
            self.running_mean = 0.9 * self.running_mean + 0.1 * mean.detach()
            self.running_var = 0.9 * self.running_var + 0.1 * var.detach()
        return self.weight * (x - mean) / torch.sqrt(var + 1e-5) + self.bias


def qwen3(width: int) -> nn.Module:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    return Qwen3RMSNorm(width, eps=Qwen3Config().rms_norm_eps)


def qwen3_next(width: int) -> nn.Module:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    return Qwen3NextRMSNorm(width, eps=Qwen3NextConfig().rms_norm_eps)


def olmo2(width: int) -> nn.Module:
    from transformers import Olmo2Config
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    return Olmo2RMSNorm(width, eps=Olmo2Config().rms_norm_eps)


def cohere(width: int) -> nn.Module:
    from transformers import CohereConfig
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm

    eps = CohereConfig().layer_norm_eps
    assert eps is not None
    return CohereLayerNorm(width, eps=eps)


def bert(width: int) -> nn.Module:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertSelfOutput

    return BertSelfOutput(BertConfig(hidden_size=width, num_attention_heads=1)).LayerNorm


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "batchnorm_biased_var": BiasedBatchNorm,
    "derf_gpt2": lambda width: Dynamic(width, torch.erf, bias=True),
    "dyt_llama": lambda width: Dynamic(width, torch.tanh, bias=False),
    "layernorm_bert": bert,
    "layernorm_eps_1e-6": lambda width: nn.LayerNorm(width, eps=1e-6),
    "layernorm_eps_outside": OutsideSigma,
    "layernorm_gpt2": gpt2,
    "layernorm_nobias": cohere,
    "layernorm_olmo1": olmo1,
    "rmsnorm_eps_outside": lambda width: MeanSquare(width, outside=True),
    "rmsnorm_gemma": gemma,
    "rmsnorm_llama": llama,
    "rmsnorm_nanochat": lambda width: nn.RMSNorm(width, eps=None, elementwise_affine=False),
    "rmsnorm_olmo2": olmo2,
    "rmsnorm_paper": Paper,
    "rmsnorm_qwen3": qwen3,
    "rmsnorm_qwen3_next": qwen3_next,
    "rmsnorm_simple": Simple,
    "rmsnorm_sum_of_squares": lambda width: MeanSquare(width, outside=False),
    "rmsnorm_torch": lambda width: nn.RMSNorm(width, eps=None),
    "zscore_annotated": Annotated,
}


def test_every_preset_has_its_oracle() -> None:
    shipped = {path.stem for path in (config_dir() / "norm").glob("*.yaml")}
    assert shipped == set(MODELS)


@pytest.mark.few(7)
@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["large", "beside_eps"])
@pytest.mark.parametrize("name", MODELS)
def test_preset_equals_the_norm_of_the_model(name: str, scale: float) -> None:
    assert preset(name).label == name
    norm: Any = preset(name).build(WIDTH)
    reference = MODELS[name](WIDTH)
    theirs = [getattr(reference, name, None) for name in ("weight", "bias")]
    ours = [norm.affine.gain, norm.affine.bias]
    assert [p is None for p in ours] == [p is None for p in theirs]
    x = scale * draw(4, 5, WIDTH, dtype=torch.float32)
    # As they start, and with a gain and a bias.
    assert_same([norm(x)], [reference(x)])
    fill(norm, reference)
    assert_same(outcome(norm, x, ours), outcome(reference, x, theirs))


def test_running_variance_may_be_the_biased_one() -> None:
    norm: Any = preset("batchnorm_biased_var").build(WIDTH)
    reference = BiasedBatchNorm(WIDTH)
    # At a small number of tokens the two variances differ.
    batches = [1 + draw(4, WIDTH, seed=seed, dtype=torch.float32) for seed in range(5)]
    for x in batches:
        assert_same([norm(x)], [reference(x)])
    assert_same([norm.running_mean, norm.running_var], [reference.running_mean, reference.running_var])
    assert_same([norm.eval()(batches[-1])], [reference.eval()(batches[-1])])


@pytest.mark.parametrize(
    "name", ["rmsnorm_llama", "rmsnorm_qwen3", "rmsnorm_olmo2", "rmsnorm_gemma", "rmsnorm_qwen3_next"]
)
def test_preset_equals_the_norm_of_the_model_in_bfloat16(name: str) -> None:
    norm: Any = preset(name).build(256)
    reference: Any = MODELS[name](256)
    gain = (reference.weight.detach() + 0.3 * draw(256, seed=1)).to(BFLOAT16).float()
    torch.testing.assert_close(*in_bfloat16(norm, reference, gain), **EXACTLY)


def test_torchs_default_eps_is_that_of_float32_also_in_bfloat16() -> None:
    x = 1e-3 * draw(64, 256, dtype=BFLOAT16)
    reference = nn.RMSNorm(256, eps=None, elementwise_affine=False)
    norm = preset("rmsnorm_torch").build(256)
    # At this size the old default, bfloat16's own epsilon, would shrink the output a hundredfold.
    assert norm(x).float().square().mean() > 0.8
    # To one bfloat16 rounding: torch's own order of operations is not fixed between its versions.
    torch.testing.assert_close(norm(x), reference(x), rtol=2**-7, atol=0)


def test_gatednorm_is_that_of_axk2() -> None:
    axk2 = pytest.importorskip("transformers.models.axk2.modeling_axk2", reason="transformers has no A.X-K2")
    with float32_as_float64():
        theirs = axk2.AXK2GatedRMSNorm(axk2.AXK2Config(hidden_size=WIDTH))
        ours = preset("gatednorm").build(WIDTH).double()
        own = dict(ours.named_parameters())
        pairs = [
            (own["affine.gain"], theirs.norm.weight),
            (own["down"], theirs.mlp.fc1.weight),
            (own["up"], theirs.mlp.fc2.weight),
        ]
        assert len(own) == len(pairs) == len(list(theirs.parameters()))
        with torch.no_grad():
            for seed, (parameter, reference) in enumerate(pairs):
                # Small matrices, as at the start, would leave every gate near 1/2.
                parameter.copy_(draw(*parameter.shape, seed=30 + seed))
                reference.copy_(parameter)
        x = draw(5, WIDTH)
        ours_now = outcome(ours, x, [parameter for parameter, _ in pairs])
        assert_same(ours_now, outcome(theirs, x, [reference for _, reference in pairs]))


def test_layernorm_keeps_its_input_only() -> None:
    """Of tensors as large as the input, for the backward pass; the memory estimate knows it from `keeps_normalised`."""
    config, x_D, kept = LayerNormConfig(), torch.randn(3, WIDTH, requires_grad=True), list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        config.build(WIDTH)(x_D)
    assert sum(tensor.shape == x_D.shape for tensor in kept) == 1 + config.keeps_normalised
