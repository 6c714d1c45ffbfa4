"""RMSNorm by one kernel. A CPU runs the same code, where torch computes the function by separate operations."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from normlab.catalogue.kernels.rms_norm import rms_norm
from normlab.catalogue.norms import rmsnorm
from normlab.catalogue.norms.rmsnorm import RMSNormConfig
from normlab.verify import selection


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the norm take its kernel on this device; return a list that gets the eps of each call."""
    found: list[float] = []

    def counted(x_D: Tensor, gain_D: Tensor | None, eps: float) -> Tensor:
        found.append(eps)
        return rms_norm(x_D, gain_D, eps)

    monkeypatch.setattr(rmsnorm, "has_kernel", lambda x: True)
    monkeypatch.setattr(rmsnorm, "rms_norm", counted)
    return found


def test_every_check_of_verify_holds(calls: list[float]) -> None:
    failed = [check for check in selection.checks_of_default_norm("rmsnorm") if not check.passed]
    assert failed == []
    assert calls


@pytest.mark.parametrize(
    ("options", "is_fused"),
    [
        ({}, True),
        ({"unit_offset": True}, True),
        ({"gain": False, "bias": True}, True),
        ({"eps_mode": "inside_sum"}, False),
        ({"eps_mode": "clamp"}, False),
        ({"taper_steps": 2}, False),
        ({"rounding": "cast_then_scale"}, False),
        ({"compute": "input"}, False),
    ],
    ids=str,
)
def test_forms_that_the_kernel_computes(options: dict[str, Any], is_fused: bool, calls: list[float]) -> None:
    module = RMSNormConfig(eps=0.25, **options).build(8)
    assert module(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert calls == [0.25] * is_fused


def test_a_cpu_computes_by_separate_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are faster there than the operations that torch has in place of the kernel."""
    monkeypatch.delattr(rmsnorm, "rms_norm")
    assert RMSNormConfig().build(8)(torch.ones(2, 8)).shape == (2, 8)


@pytest.mark.few(2)
@pytest.mark.parametrize("has_gain", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_of_stacked_runs_is_differentiated_twice(axis: int, has_gain: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 3, 3, 5, dtype=torch.float64, generator=generator).requires_grad_()
    gain = torch.randn(3, 5, dtype=torch.float64, generator=generator).requires_grad_()

    def stacked(x: Tensor, gain: Tensor) -> Tensor:
        if has_gain:
            return vmap(lambda x, gain: rms_norm(x, gain, 0.1), in_dims=(axis, 0))(x, gain)
        return vmap(lambda x: rms_norm(x, None, 0.1), in_dims=axis)(x) * gain[:, None, None]

    def separate(x: Tensor, gain: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1)
        return normed.movedim(axis, 0) * gain[:, None, None]

    torch.testing.assert_close(stacked(x, gain), separate(x, gain), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(stacked, (x, gain))
    assert torch.autograd.gradgradcheck(stacked, (x, gain))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("width", [96, 768])
def test_kernel_of_a_gpu_is_as_close_to_float64_as_the_operations(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exact_module: Any = RMSNormConfig().build(width).double()
    torch.nn.init.uniform_(exact_module.affine.gain, 0.5, 1.5, generator=torch.Generator().manual_seed(1))
    module = copy.deepcopy(exact_module).float().cuda()
    x = torch.randn(64, 33, width, generator=torch.Generator().manual_seed(0)) * 3 + 1

    def results(module: torch.nn.Module, x: Tensor) -> list[Tensor]:
        x = x.requires_grad_()
        inputs = [x, *module.parameters()]
        output = module(x)
        first = torch.autograd.grad((output * output.detach().sin()).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), x)
        return [each.detach().cpu().double() for each in (output, *first, *second)]

    exact = results(exact_module, x.double())
    by_kernel = results(module, x.cuda())
    monkeypatch.setattr(rmsnorm, "has_kernel", lambda x: False)
    by_operations = results(module, x.cuda())
    for ours, separate, target in zip(by_kernel, by_operations, exact, strict=True):
        # Both round differently, so that either may be a little closer.
        assert (ours - target).norm() <= 2 * (separate - target).norm()
