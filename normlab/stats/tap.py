"""The gradient's statistics, without a hook: an identity whose backward returns them as the gradient of a `slot`.

A slot is an extra input that nothing else reads. It works eager, compiled, over micro-batches (slot gradients
add) and over a pack (the slot has a leading axis of runs).

Shapes: R runs (absent for a lone run), `*rest` whatever follows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class GradientTap(torch.autograd.Function):
    """The identity on x. Its backward returns E[(dL/dx)^2] as the gradient of `slot`.

    Used outside vmap, on the stacked stream: a custom function under vmap does not compile.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return x itself, as a view."""
        ctx.lead = slot.dim()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Hand the gradient on, and its mean square to the slot."""
        return grad, _mean_square(grad, ctx.lead)


def tap(stream: Any, slot: Tensor) -> Any:
    """The stream unchanged; its gradient's mean square becomes the gradient of `slot`.

    Where a placement keeps several tensors, the first one is the stream that is tapped.
    """
    tapped = GradientTap.apply(first(stream), slot)
    return tapped if isinstance(stream, Tensor) else (tapped, *stream[1:])


def first(stream: Any) -> Tensor:
    """The stream that is called x, where a placement keeps several."""
    return stream if isinstance(stream, Tensor) else stream[0]


def _mean_square(x: Tensor, lead: int) -> Tensor:
    """E[x^2] over all axes but the first `lead`, in float32 or better."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.linalg.vector_norm(x, dim=tuple(range(lead, x.dim()))).square() / math.prod(x.shape[lead:])
