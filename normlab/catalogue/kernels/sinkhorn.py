"""The kernels of `placements/sinkhorn.py`, in Triton: each program has the matrices of some tokens in its registers.

Shapes: n rows and columns, N tokens. An axis of n numbers is padded to SIZE, a power of 2, with zeros, which change no
sum. TOKENS tokens are in one program.
"""

# Triton comes with builds of torch for GPUs, and turns a function into one that is started by `kernel[grid](...)`.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_NUMBERS = 2048
"""The numbers of the matrices of one program, at most, unless one matrix has more: 16 in each of 128 threads."""


@triton.jit
def _offsets(n, tokens, SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """Return the offsets of a program's numbers in a tensor (n, n, N), their row, column and token, and which exist."""
    i = tl.arange(0, SIZE)[:, None, None].to(tl.int64)
    j = tl.arange(0, SIZE)[None, :, None].to(tl.int64)
    token = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[None, None, :]
    return (i * n + j) * tokens + token, i, j, token, (i < n) & (j < n) & (token < tokens)


@triton.jit
def _initial_matrix(scores, is_inside, OF_SIGMOID: tl.constexpr):
    """Return the sigmoid of each number, or the softmax of each row, and zeros outside."""
    if OF_SIGMOID:
        return tl.where(is_inside, 1 / (1 + tl.exp(-scores)), 0.0)
    # A row that is padding has no finite maximum, so its differences are replaced before anything is computed of them.
    largest = tl.max(tl.where(is_inside, scores, -float("inf")), axis=1, keep_dims=True)
    powers = tl.where(is_inside, tl.exp(tl.where(is_inside, scores - largest, 0.0)), 0.0)
    sums = tl.sum(powers, axis=1, keep_dims=True)
    return powers / tl.where(sums > 0, sums, 1.0)


@triton.jit
def _forward(
    scores_nnN, matrix_nnN, n, tokens, iterations, EPS: tl.constexpr, OF_SIGMOID: tl.constexpr, SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    at, _, _, _, is_inside = _offsets(n, tokens, SIZE, TOKENS)
    matrix = _initial_matrix(tl.load(scores_nnN + at, mask=is_inside, other=0.0), is_inside, OF_SIGMOID)
    matrix = tl.where(is_inside, matrix + EPS, 0.0)
    for number in range(iterations):
        # The rows of a softmax sum to 1 already.
        if OF_SIGMOID or number > 0:
            matrix = matrix / (tl.sum(matrix, axis=1, keep_dims=True) + EPS)
        matrix = matrix / (tl.sum(matrix, axis=0, keep_dims=True) + EPS)
    tl.store(matrix_nnN + at, matrix, mask=is_inside)


@triton.jit
def _backward(
    grad_nnN, scores_nnN, of_scores_nnN, rows_KnN, columns_KnN, n, tokens, iterations, EPS: tl.constexpr,
    OF_SIGMOID: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    at, i, j, token, is_inside = _offsets(n, tokens, SIZE, TOKENS)
    is_row, is_column = (i < n) & (token < tokens), (j < n) & (token < tokens)
    first = _initial_matrix(tl.load(scores_nnN + at, mask=is_inside, other=0.0), is_inside, OF_SIGMOID)
    matrix = tl.where(is_inside, first + EPS, 0.0)
    # The iterations again. What they divide by is kept in memory: a kernel cannot index registers by a loop variable.
    for number in range(iterations):
        row_at, column_at = (number * n + i) * tokens + token, (number * n + j) * tokens + token
        if OF_SIGMOID or number > 0:
            row_sums = tl.sum(matrix, axis=1, keep_dims=True) + EPS
            tl.store(rows_KnN + row_at, row_sums, mask=is_row)
            matrix = matrix / row_sums
        column_sums = tl.sum(matrix, axis=0, keep_dims=True) + EPS
        tl.store(columns_KnN + column_at, column_sums, mask=is_column)
        matrix = matrix / column_sums
    tl.debug_barrier()  # all threads of the program have written their sums
    # y = m / s with s = sum(m) + EPS, so that dm = (dy - sum(dy y)) / s, and m = y s.
    grad = tl.load(grad_nnN + at, mask=is_inside, other=0.0)
    for number in range(iterations - 1, -1, -1):
        row_at, column_at = (number * n + i) * tokens + token, (number * n + j) * tokens + token
        column_sums = tl.load(columns_KnN + column_at, mask=is_column, other=1.0)
        grad = tl.where(is_inside, (grad - tl.sum(grad * matrix, axis=0, keep_dims=True)) / column_sums, 0.0)
        matrix = matrix * column_sums
        if OF_SIGMOID or number > 0:
            row_sums = tl.load(rows_KnN + row_at, mask=is_row, other=1.0)
            grad = tl.where(is_inside, (grad - tl.sum(grad * matrix, axis=1, keep_dims=True)) / row_sums, 0.0)
            matrix = matrix * row_sums
    if OF_SIGMOID:
        of_scores = grad * first * (1 - first)
    else:
        of_scores = (grad - tl.sum(grad * first, axis=1, keep_dims=True)) * first
    tl.store(of_scores_nnN + at, of_scores, mask=is_inside)


def forward(scores_nn: Tensor, iterations: int, of_sigmoid: bool, eps: float) -> Tensor:
    """Return what `placements.sinkhorn.forward` returns."""
    n, tokens, grid, blocks = _launch_options(scores_nn)
    matrix_nn = torch.empty_like(scores_nn)
    with torch.cuda.device_of(scores_nn):
        _forward[grid](scores_nn, matrix_nn, n, tokens, iterations, EPS=eps, OF_SIGMOID=of_sigmoid, **blocks)
    return matrix_nn


def backward(grad_nn: Tensor, scores_nn: Tensor, iterations: int, of_sigmoid: bool, eps: float) -> Tensor:
    """Return what `placements.sinkhorn.backward` returns."""
    assert grad_nn.is_contiguous()
    n, tokens, grid, blocks = _launch_options(scores_nn)
    of_scores_nn = torch.empty_like(scores_nn)
    rows_KnN, columns_KnN = (scores_nn.new_empty(iterations, n, tokens) for _ in range(2))
    with torch.cuda.device_of(scores_nn):
        _backward[grid](
            grad_nn, scores_nn, of_scores_nn, rows_KnN, columns_KnN, n, tokens, iterations,
            EPS=eps, OF_SIGMOID=of_sigmoid, **blocks,
        )  # fmt: skip
    return of_scores_nn


def _launch_options(scores_nn: Tensor) -> tuple[int, int, tuple[int], dict[str, int]]:
    """Return n, N, the number of programs and the sizes of their blocks, for scores (n, n, ...)."""
    assert scores_nn.is_contiguous(), "the kernels compute offsets from the shape"
    n = scores_nn.shape[0]
    tokens = scores_nn[0, 0].numel()
    size = triton.next_power_of_2(n)
    block = max(1, MOST_NUMBERS // size**2)
    return n, tokens, (triton.cdiv(tokens, block),), {"SIZE": size, "TOKENS": block}
