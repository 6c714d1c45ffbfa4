"""The gradient of the stream, without a hook: backward is asked for it as it is for the parameters' gradients.

    x, tapped = tap(x)                  # before each block
    torch.autograd.grad(loss, [*params, tapped])

It works eager, compiled (it is outside of what is compiled), over micro-batches, and over a pack, whose stream has a
leading axis of runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def mean_squares(gradients: Sequence[Tensor], lead: int) -> Tensor:
    """E[g^2] of each over all axes but the first `lead`, in float32 or better: (P, ...R), P how many there are."""
    g = gradients[0]
    axes, dtype = tuple(range(lead, g.dim())), torch.promote_types(g.dtype, torch.float32)
    lengths = torch.stack([torch.linalg.vector_norm(one, dim=axes, dtype=dtype) for one in gradients])
    return lengths.square() / math.prod(g.shape[lead:])
