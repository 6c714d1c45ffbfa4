"""Sinkhorn's iterations as one operation: derivatives, stacked and compiled, and the kernels of a GPU."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from normlab.catalogue.placements import sinkhorn as module
from normlab.catalogue.placements.formula_functions import STREAM_FUNCTIONS
from normlab.catalogue.placements.sinkhorn import sinkhorn

ITERATIONS = [1, 2, 20]


def random_scores(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).mul_(2).requires_grad_()


def result_and_gradient(matrix: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.linspace(-1, 1, matrix.numel(), dtype=matrix.dtype, device=matrix.device).view_as(matrix)
    return matrix.detach(), torch.autograd.grad((matrix * weights).sum(), scores)[0]


@pytest.mark.parametrize("iterations", ITERATIONS)
@pytest.mark.parametrize("of_sigmoid", [False, True])
@pytest.mark.parametrize("n", [2, 4, 7])
def test_equals_the_scaling_vectors(n: int, of_sigmoid: bool, iterations: int) -> None:
    scores = random_scores(3, 2, 5, n, n)
    expected = STREAM_FUNCTIONS["sinkhorn"](scores, iterations, of_sigmoid=of_sigmoid)
    found = sinkhorn(scores, iterations, of_sigmoid=of_sigmoid)
    for ours, theirs in zip(result_and_gradient(found, scores), result_and_gradient(expected, scores), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("of_sigmoid", [False, True])
def test_both_derivatives_are_those_of_differences(of_sigmoid: bool) -> None:
    def matrix(scores: Tensor) -> Tensor:
        return sinkhorn(scores, 3, of_sigmoid=of_sigmoid)

    assert torch.autograd.gradcheck(matrix, random_scores(2, 3, 3))
    assert torch.autograd.gradgradcheck(matrix, random_scores(2, 3, 3))


def test_is_a_well_formed_operation() -> None:
    """Torch's own check of the schema, the shapes for its compiler, and the gradients in compiled code."""
    for operation in (module.forward, module.backward):
        tensors = [random_scores(4, 4, 6) for _ in range(1 + (operation is module.backward))]
        results = torch.library.opcheck(operation, (*tensors, 3, False))
        assert {*results.values()} == {"SUCCESS"}


def test_of_stacked_runs_is_that_of_each() -> None:
    scores = random_scores(3, 2, 5, 4, 4)
    for axis in (0, 1):
        stacked = torch.vmap(lambda scores: sinkhorn(scores, 4), in_dims=axis)(scores)
        each = torch.stack([sinkhorn(scores, 4) for scores in scores.unbind(axis)])
        for ours, theirs in zip(result_and_gradient(stacked, scores), result_and_gradient(each, scores), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_of_stacked_runs_is_compiled() -> None:
    """As a block of a pack: traced as one graph, forward and backward."""
    scores = random_scores(3, 2, 5, 4, 4)

    def stacked(scores: Tensor) -> Tensor:
        return torch.vmap(lambda scores: sinkhorn(scores, 4))(scores)

    compiled = torch.compile(stacked, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(
        result_and_gradient(compiled(scores), scores), result_and_gradient(stacked(scores), scores), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_second_derivative_leaves_its_inputs_as_they_are() -> None:
    grad, scores = random_scores(4, 4, 6), random_scores(4, 4, 6).detach()
    torch.autograd.grad(module.backward(grad, scores, 3, False).sum(), grad)
    assert not scores.requires_grad


# The kernels of a GPU.


@pytest.mark.parametrize("is_stacked", [False, True])
def test_a_gpu_computes_each_way_by_one_kernel(is_stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins of the kernels check what they are given, and compute by the operations of torch."""

    def matrix(scores: Tensor) -> Tensor:
        if is_stacked:
            return torch.vmap(lambda scores: sinkhorn(scores, 4), in_dims=1)(scores)
        return sinkhorn(scores, 4)

    scores = random_scores(3, 2, 5, 4, 4)
    expected = result_and_gradient(matrix(scores), scores)
    on_gpu, calls = [True], list[str]()

    def by_torch(operation: Callable[..., Tensor], *arguments: Any) -> Tensor:
        *tensors, iterations, of_sigmoid, eps = arguments
        assert (iterations, of_sigmoid, eps) == (4, False, module.EPS)
        # A kernel reads the numbers of neighbouring tokens as neighbours.
        for tensor in tensors:
            assert tensor.shape[:2] == (4, 4)
            assert tensor.is_contiguous()
        on_gpu[0] = False
        result = operation(*tensors, iterations, of_sigmoid)
        on_gpu[0] = True
        return result

    def forward(*arguments: Any) -> Tensor:
        calls.append("forward")
        return by_torch(module.forward, *arguments)

    def backward(*arguments: Any) -> Tensor:
        calls.append("backward")
        return by_torch(module.backward, *arguments)

    kernels = SimpleNamespace(forward=forward, backward=backward)
    monkeypatch.setitem(sys.modules, "normlab.catalogue.kernels.sinkhorn", kernels)
    monkeypatch.setattr("normlab.catalogue.kernels.sinkhorn", kernels, raising=False)
    monkeypatch.setattr(module, "has_kernels", lambda scores: on_gpu[0])
    found = result_and_gradient(matrix(scores), scores)
    assert calls == ["forward", "backward"]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("tensor", "capability", "missing", "expected"),
    [
        ({}, (7, 0), "", True),
        ({"dtype": torch.float64}, (9, 0), "", True),
        ({"dtype": torch.bfloat16}, (9, 0), "", False),
        ({"is_cuda": False}, (9, 0), "", False),
        ({}, (6, 1), "", False),
        ({}, (9, 0), "triton is not installed; install it", False),
    ],
)
def test_kernels_are_for_dtypes_and_gpus_that_triton_has(
    tensor: dict[str, Any], capability: tuple[int, int], missing: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores: Any = SimpleNamespace(**{"is_cuda": True, "dtype": torch.float32, "device": "this GPU"} | tensor)
    monkeypatch.setattr(module, "missing_compiler", {"cuda": missing}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", {"this GPU": capability}.__getitem__)
    module.can_compile.cache_clear()
    assert module.has_kernels(scores) is expected
    module.can_compile.cache_clear()


def compare_kernels(device: str) -> None:
    """Compare the kernels with the operations of torch, where tokens fill a part of one program, or several.

    The numbers are in float64, and in float32, in which models are trained.
    """
    from normlab.catalogue.kernels import sinkhorn as kernels

    shapes = [(2, False, 1), (4, False, 20), (4, True, 20), (7, True, 2), (16, False, 3), (64, False, 2)]
    tolerances = {torch.float64: 1e-12, torch.float32: 1e-5}
    for (n, of_sigmoid, iterations), tokens, dtype in product(shapes, [(1,), (3, 131)], tolerances):
        scores = random_scores(n, n, *tokens).detach().to(device, dtype)
        grad = scores.flip(0).contiguous()
        expected = module.by_autograd(scores.requires_grad_(), iterations, of_sigmoid)
        (gradient,) = torch.autograd.grad(expected, scores, grad)
        with torch.no_grad():
            matrix = kernels.forward(scores, iterations, of_sigmoid, module.EPS)
            of_scores = kernels.backward(grad, scores, iterations, of_sigmoid, module.EPS)
        near: dict[str, Any] = {"rtol": tolerances[dtype], "atol": tolerances[dtype]}
        torch.testing.assert_close(matrix, expected.detach(), **near)
        torch.testing.assert_close(of_scores, gradient, **near)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_kernels_equal_the_operations_of_torch() -> None:
    assert module.has_kernels(torch.zeros(1, device="cuda"))
    compare_kernels("cuda")
    scores = random_scores(3, 2, 5, 4, 4)
    on_gpu = scores.detach().cuda().requires_grad_()
    found = result_and_gradient(torch.vmap(lambda scores: sinkhorn(scores, 4))(on_gpu), on_gpu)
    for ours, theirs in zip(found, result_and_gradient(sinkhorn(scores, 4), scores), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_narrow_dtypes_take_the_operations_of_torch() -> None:
    scores = torch.zeros(2, 4, 4, dtype=torch.bfloat16, device="cuda")
    assert not module.has_kernels(scores)
    assert sinkhorn(scores, 2).dtype == torch.bfloat16


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.process
def test_interpreted_kernels_equal_the_operations_of_torch() -> None:
    """Triton's interpreter runs the kernels without a GPU."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, Path(__file__)], env=environment, check=True)


if __name__ == "__main__":
    compare_kernels("cpu")
