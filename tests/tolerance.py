"""How far apart two correct computations of the same function may be: the bounds that comparisons use.

Float64 decides whether two implementations compute the same function; there a wrong eps or a missing factor is a
million times larger than rounding. Float32 is held to a bound that follows from its rounding.

The bound. One operation rounds by at most u = eps / 2, relative. A sum of n terms rounds n times; the errors are
independent of each other and have no sign of their own, so that they add up to about sqrt(n) u of the terms' size
(Higham and Mary 2019, SIAM J. Sci. Comput. 41, A2815). A block has eight such sums one behind the other: two norms,
queries or keys, scores, values, attention's output, and the MLP's two matrices. Two implementations make sixteen, whose
errors are independent again: sqrt(16) sqrt(n) u = 2 eps sqrt(n). Each block passes on the error that it gets and
adds its own, since norms and the residual stream keep the scale: times the number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor


def rounding(dtype: torch.dtype, terms: int, layers: int = 1) -> float:
    """Return how far apart two results may be, relative to the largest number among them.

    Args:
        dtype: Of the computation. Float64 has room for any order of operations: 1e-12, whatever the size.
        terms: Of the longest sum.
        layers: How many blocks, norms or steps follow each other; a backward pass doubles them.
    """
    return 1e-12 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps * math.sqrt(terms) * layers


def assert_equal(
    ours: Tensor, theirs: Tensor, *, terms: int, layers: int = 1, scale: float = 0.0, name: str = ""
) -> None:
    """Fail unless two tensors are equal up to rounding.

    Args:
        ours: The tensor to test.
        theirs: The reference, of the same dtype.
        terms: As `rounding`.
        layers: As `rounding`.
        scale: The size of the numbers that were summed, where they cancel; at least the largest entry of `theirs`.
        name: What is compared, for the message.
    """
    assert ours.dtype == theirs.dtype
    atol = rounding(theirs.dtype, terms, layers) * max(scale, theirs.abs().max().item())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}" if name else text)


@contextmanager
def float32_as_float64() -> Iterator[None]:
    """Have code that asks for float32 get float64, so that models with casts of their own compare in float64.

    Decoders compute their norms, softmax and rotations in float32 whatever the dtype of their weights is. Models must
    be built and called inside.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
