"""Sinkhorn's iterations as one operation each way; the backward pass computes them again from the scores.

On a GPU each way is one kernel (`catalogue/kernels/sinkhorn.py`), where 20 iterations of separate operations launch
hundreds. Elsewhere the operations are those of torch. Autograd through separate operations would keep the matrices of
all iterations.

Shapes: n rows and columns, `*batch` any other axes. Tokens are the last axis in memory, because a CPU is slow at sums
over 4 neighbours, and a GPU reads neighbours at once.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from normlab.catalogue.placements.streams import EPS
from normlab.system.compilers import missing_compiler


def sinkhorn(scores: Tensor, iterations: int, *, of_sigmoid: bool = False) -> Tensor:
    """Return a positive matrix whose rows and columns sum to 1, nearly, from scores (*batch, n, n).

    It starts as the softmax of each row, or as the sigmoid of each number, plus EPS; then its rows, unless the softmax
    has done so, and its columns are divided by their sums plus EPS, several times. It can be differentiated twice.

    Source: Sinkhorn & Knopp 1967; with these eps DeepSeek-V4 of transformers.
    """
    scores_nn = scores.movedim((-2, -1), (0, 1)).contiguous()
    return forward(scores_nn, iterations, of_sigmoid).movedim((0, 1), (-2, -1))


def steps(iterations: int, of_sigmoid: bool) -> list[int]:
    """Return the axes whose sums the matrix is divided by, in order: 1 for the sums of rows, 0 for those of columns."""
    axes = [1, 0] * iterations
    # The rows of a softmax sum to 1 already.
    return axes if of_sigmoid else axes[1:]


def start(scores_nn: Tensor, of_sigmoid: bool) -> Tensor:
    """Return the positive matrix (n, n, *batch) before the iterations, without EPS."""
    return torch.sigmoid(scores_nn) if of_sigmoid else scores_nn.softmax(1)


def by_autograd(scores_nn: Tensor, iterations: int, of_sigmoid: bool) -> Tensor:
    """Return the matrix by operations that autograd records, for the second derivative."""
    matrix_nn = start(scores_nn, of_sigmoid) + EPS
    for axis in steps(iterations, of_sigmoid):
        matrix_nn = matrix_nn / (matrix_nn.sum(axis, keepdim=True) + EPS)
    return matrix_nn


def has_kernels(scores: Tensor) -> bool:
    """Return whether kernels of a GPU compute this tensor; otherwise the operations of torch do."""
    # Triton has the exponential function of these dtypes only.
    return scores.is_cuda and scores.dtype in (torch.float32, torch.float64) and can_compile(scores.device)


@cache
def can_compile(device: torch.device) -> bool:
    """Return whether Triton can compile kernels for a GPU; it needs one of compute capability 7.0."""
    return not missing_compiler("cuda") and torch.cuda.get_device_capability(device) >= (7, 0)


@torch.library.custom_op("normlab::sinkhorn", mutates_args=())
def forward(scores_nn: Tensor, iterations: int, of_sigmoid: bool) -> Tensor:
    """Return the matrix (n, n, *batch), contiguous, of contiguous scores of the same shape."""
    if has_kernels(scores_nn):
        from normlab.catalogue.kernels import sinkhorn as kernels

        return kernels.forward(scores_nn, iterations, of_sigmoid, EPS)
    return by_autograd(scores_nn, iterations, of_sigmoid)


@torch.library.custom_op("normlab::sinkhorn_backward", mutates_args=())
def backward(grad_nn: Tensor, scores_nn: Tensor, iterations: int, of_sigmoid: bool) -> Tensor:
    """Return the gradient of the scores, given that of the matrix; all are contiguous."""
    if has_kernels(scores_nn):
        from normlab.catalogue.kernels import sinkhorn as kernels

        return kernels.backward(grad_nn, scores_nn, iterations, of_sigmoid, EPS)
    first_nn = start(scores_nn, of_sigmoid)
    matrices, sums = [first_nn + EPS], list[Tensor]()
    for axis in steps(iterations, of_sigmoid):
        sums.append(matrices[-1].sum(axis, keepdim=True).add_(EPS))
        matrices.append(matrices[-1] / sums[-1])
    grad_nn = grad_nn.clone()
    for axis in reversed(steps(iterations, of_sigmoid)):
        # y = m / (sum(m) + EPS), so that dm = (dy - sum(dy y)) / (sum(m) + EPS).
        grad_nn.sub_((grad_nn * matrices.pop()).sum(axis, keepdim=True)).div_(sums.pop())
    if of_sigmoid:
        return grad_nn.mul_(first_nn).mul_(1 - first_nn)
    return grad_nn.sub_((grad_nn * first_nn).sum(1, keepdim=True)).mul_(first_nn)


def _empty_like_scores(*args: Any) -> Tensor:
    """Return what the compiler needs to know of a result: it has the shape and the dtype of the first argument."""
    return torch.empty_like(args[0])


def _keep_scores(ctx: Any, inputs: tuple[Tensor, int, bool], output: Tensor) -> None:
    scores_nn, ctx.iterations, ctx.of_sigmoid = inputs
    ctx.save_for_backward(scores_nn)


def _gradients(ctx: Any, grad_nn: Tensor) -> tuple[Tensor, None, None]:
    (scores_nn,) = ctx.saved_tensors
    return backward(grad_nn.contiguous(), scores_nn, ctx.iterations, ctx.of_sigmoid), None, None


def _keep_both(ctx: Any, inputs: tuple[Tensor, Tensor, int, bool], output: Tensor) -> None:
    grad_nn, scores_nn, ctx.iterations, ctx.of_sigmoid = inputs
    ctx.save_for_backward(grad_nn, scores_nn)


def _second_gradients(ctx: Any, seed_nn: Tensor) -> tuple[Tensor, Tensor, None, None]:
    """Differentiate the gradient once more, by autograd: only statistics that are seldom computed need it.

    The result cannot be differentiated again.
    """
    with torch.enable_grad():
        grad_nn, scores_nn = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        matrix_nn = by_autograd(scores_nn, ctx.iterations, ctx.of_sigmoid)
        (first_nn,) = torch.autograd.grad(matrix_nn, scores_nn, grad_nn, create_graph=True)
        of_grad_nn, of_scores_nn = torch.autograd.grad(first_nn, (grad_nn, scores_nn), seed_nn)
    return of_grad_nn, of_scores_nn, None, None


def _batched(info: Any, in_dims: tuple[int | None, ...], scores_nn: Tensor, *options: Any) -> tuple[Tensor, int]:
    assert in_dims[0] is not None
    return forward(scores_nn.movedim(in_dims[0], 2).contiguous(), *options), 2


forward.register_fake(_empty_like_scores)
forward.register_autograd(_gradients, setup_context=_keep_scores)
forward.register_vmap(_batched)
backward.register_fake(_empty_like_scores)
backward.register_autograd(_second_gradients, setup_context=_keep_both)
