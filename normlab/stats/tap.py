"""The gradient of the stream, without a hook: backward is asked for it as it is for the parameters' gradients.

    x, tapped = tap(x)                  # before each block
    torch.autograd.grad(loss, [*params, tapped])

It works eager, compiled (it is outside of what is compiled), over micro-batches, and over a pack, whose stream has a
leading axis of runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tap(stream: Any) -> tuple[Any, Tensor]:
    """The stream unchanged, and the tensor in it whose gradient is the stream's at this place.

    Where a placement keeps several tensors, the first one is the stream that is tapped. It is a view, so that the
    gradient does not come with that of other places where a placement uses the same tensor.
    """
    tapped = first(stream).view_as(first(stream))
    return (tapped if isinstance(stream, Tensor) else (tapped, *stream[1:])), tapped


def first(stream: Any) -> Tensor:
    """The stream that is called x, where a placement keeps several."""
    return stream if isinstance(stream, Tensor) else stream[0]


def mean_square(x: Tensor, lead: int) -> Tensor:
    """E[x^2] over all axes but the first `lead`, in float32 or better."""
    axes = tuple(range(lead, x.dim()))
    length = torch.linalg.vector_norm(x, dim=axes, dtype=torch.promote_types(x.dtype, torch.float32))
    return length.square() / (x.numel() / max(length.numel(), 1))
