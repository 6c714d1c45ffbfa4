"""What the functions of a formula compute (`formula.py`), in float64; `normlab verify` executes formulas with them.

Shapes: t any axes, the last one of channels; of n streams x (..., n, D), y (..., D), a and b (..., n), c (..., n, n).
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from normlab.catalogue.placements.formula import OF_NUMBERS, OF_STATES, OF_STREAMS, OF_TENSORS


def _sinkhorn(scores: Tensor, iterations: int, *, of_sigmoid: bool = False) -> Tensor:
    """Return u_i K_ij v_j, whose rows and columns sum to 1; K: the softmax of each row or the sigmoid, plus 1e-6."""
    kernel = torch.exp(scores - scores.amax(-1, keepdim=True))
    kernel = (1 / (1 + torch.exp(-scores)) if of_sigmoid else kernel / kernel.sum(-1, keepdim=True)) + 1e-6
    # Scaling vectors, while `sinkhorn.py` divides the matrix: `verify` compares two forms of one iteration.
    u, v = torch.ones_like(kernel[..., :1]), torch.ones_like(kernel[..., :1, :])
    # Rows and columns in turn; the rows of a softmax sum to 1 already, so its first step is that of the columns.
    for number in range(2 * iterations - 1 + of_sigmoid):
        if number % 2 != of_sigmoid:
            u = u / (u * (kernel * v).sum(-1, keepdim=True) + 1e-6)
        else:
            v = v / (v * (u * kernel).sum(-2, keepdim=True) + 1e-6)
    return u * kernel * v


def _permutations(scores: Tensor, n: int) -> Tensor:
    """Return the sum of all n x n permutation matrices, in lexicographic order, weighted by the softmax of scores."""
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return _sum_of_permutations(weights / weights.sum(-1, keepdim=True), n)


def _sum_of_permutations(weights: Tensor, n: int) -> Tensor:
    """Return the weighted sum by induction, while `mixing.PermutationSum` has a table of all matrices."""
    if n == 1:
        return weights[..., None]
    # In lexicographic order the permutations that map row 0 to one column stand together. They map the other rows to
    # the other columns.
    by_column = weights.unflatten(-1, (n, -1))
    other_rows = torch.zeros(())
    for column in range(n):
        below = _sum_of_permutations(by_column[..., column, :], n - 1)
        left, right = below[..., :column], below[..., column:]
        other_rows = other_rows + torch.cat([left, torch.zeros_like(below[..., :1]), right], -1)
    return torch.cat([by_column.sum(-1)[..., None, :], other_rows], -2)


def _kronecker(scores: Tensor) -> Tensor:
    """Return the Kronecker product entry by entry, while `mixing.kronecker_product` multiplies matrices."""
    kept = 1 / (1 + torch.exp(scores[..., 1::2] - scores[..., ::2]))
    factors = kept.shape[-1]
    rows: list[Tensor] = []
    for i in range(2**factors):
        row: list[Tensor] = []
        for j in range(2**factors):
            entry = torch.ones_like(kept[..., 0])
            for factor in range(factors):
                # The first factor mixes the two halves of the streams: the highest bit of i and j is the half.
                is_swapped = (i ^ j) >> (factors - 1 - factor) & 1
                entry = entry * (1 - kept[..., factor] if is_swapped else kept[..., factor])
            row.append(entry)
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)


def _recall(query_D: Tensor, states_MBTD: Tensor) -> Tensor:
    """Return the average of some states, weighted by exp(query . state / root mean square)."""
    sizes_MBT1 = (states_MBTD.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    weights_MBT1 = torch.exp((states_MBTD / sizes_MBT1) @ query_D)[..., None]
    return (weights_MBT1 * states_MBTD).sum(0) / weights_MBT1.sum(0)


def _of_numbers_or_tensors(of_numbers: Callable[..., Any], of_tensors: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a function of numbers or, element by element, of tensors, or of tensors and numbers."""

    def function(*values: Any) -> Any:
        if not any(isinstance(value, Tensor) for value in values):
            return of_numbers(*values)
        return of_tensors(*(torch.as_tensor(value, dtype=torch.float64) for value in values))

    return function


# Where a module calls a function of torch, the formula spells it out, so that both hardly have the same mistake.
_COMPUTED: dict[str, Callable[..., Any]] = {
    "sqrt": _of_numbers_or_tensors(math.sqrt, torch.sqrt),
    "ln": _of_numbers_or_tensors(math.log, torch.log),
    "min": _of_numbers_or_tensors(min, lambda *values: reduce(torch.minimum, values)),
    "max": _of_numbers_or_tensors(max, lambda *values: reduce(torch.maximum, values)),
    "abs": torch.Tensor.abs,
    "silu": lambda t: t * torch.sigmoid(t),
    "softplus": lambda t: torch.log(1 + torch.exp(t)),
    "sigmoid": lambda t: 1 / (1 + torch.exp(-t)),
    "tanh": lambda t: 1 - 2 / (torch.exp(2 * t) + 1),
    "stop": torch.Tensor.detach,
    "norm2": lambda t: t.square().sum(-1, keepdim=True).sqrt(),
    "copies": lambda n, x: torch.stack([x] * n, -2),
    "read": lambda a, x: torch.einsum("...n,...nd->...d", a, x),
    "write": lambda b, y: torch.einsum("...n,...d->...nd", b, y),
    "mix": lambda c, x: torch.einsum("...ij,...id->...jd", c, x),
    "ones": lambda n: torch.ones(n, dtype=torch.float64),
    "rms": lambda t, eps=1e-6: t / (t.square().mean(-1, keepdim=True) + eps).sqrt(),
    "rms_eps_outside": lambda t: t / (t.square().mean(-1, keepdim=True).sqrt() + 1e-6),
    "sinkhorn": _sinkhorn,
    "permutations": _permutations,
    "kronecker": _kronecker,
    "states": lambda x: (),
    "store": lambda s, x: (*s, x),
    "recall": lambda q, s, x: _recall(q, torch.stack((*s, x))),
}
FUNCTIONS = {function.name: _COMPUTED[function.name] for function in (*OF_NUMBERS, *OF_TENSORS)}
"""The functions that every formula may call."""
STREAM_FUNCTIONS = {function.name: _COMPUTED[function.name] for function in (*OF_STREAMS, *OF_STATES)}
"""Further functions, of placements with several streams or with stored states."""
