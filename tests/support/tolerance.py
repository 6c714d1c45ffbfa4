"""Bounds on the difference between two correct computations of the same function.

Float64 decides whether two implementations compute the same function: there a wrong eps or a missing factor is a
million times larger than rounding. The bound for float32 follows from its rounding.

The bound. One operation rounds by at most u = eps / 2, relative. A sum of n terms rounds n times; the errors are
independent with random signs, so that they add up to about sqrt(n) u times the size of the terms
(Higham and Mary 2019, SIAM J. Sci. Comput. 41, A2815). A block has eight such sums in sequence: two norms,
queries or keys, scores, values, attention's output, and the MLP's two matrices. Two implementations make sixteen, whose
errors are independent again: sqrt(16) sqrt(n) u = 2 eps sqrt(n). Each block passes its input's error on and
adds its own, since norms and the residual stream keep the scale: the bound grows with the number of layers.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor


def rounding(dtype: torch.dtype, terms: int, layers: int = 1) -> float:
    """Return the largest allowed difference of two results, relative to the largest number in them.

    Args:
        dtype: The dtype of the computation. In float64 the bound is 1e-12 at every size.
        terms: The number of terms of the longest sum.
        layers: The number of blocks, norms or steps in sequence; a backward pass doubles it.
    """
    return 1e-12 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps * math.sqrt(terms) * layers


def assert_equal(
    result: Tensor, reference: Tensor, *, terms: int, layers: int = 1, scale: float = 0.0, name: str = ""
) -> None:
    """Fail unless two tensors are equal up to rounding.

    Args:
        result: The tensor to test.
        reference: The reference, of the same dtype.
        terms: See `rounding`.
        layers: See `rounding`.
        scale: The size of summed numbers that cancel; by default the largest entry of `reference`.
        name: A name for the message.
    """
    assert result.dtype == reference.dtype
    atol = rounding(reference.dtype, terms, layers) * max(scale, reference.abs().max().item())
    torch.testing.assert_close(
        result, reference, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}" if name else text
    )


@contextmanager
def float32_as_float64() -> Iterator[None]:
    """Replace float32 by float64, so that models with their own casts compare in float64.

    Decoders compute norms, softmax and rotations in float32 for every dtype of weights. Build and call models inside
    the block.
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
