"""What is seen of the residual stream from inside the step: its mean square, and its gradient's.

Values leave the step as return values: the forward one is returned, the gradient's arrives as the gradient of
a `slot`, an extra input that an identity reads. No hook, no buffer, no host synchronisation; it works eager,
compiled, over micro-batches (slot gradients add) and over a pack (the slot has a leading axis of runs).

Shapes: R runs (absent for a lone run), `*rest` whatever follows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mean_square(x: Tensor, lead: int) -> Tensor:
    """E[x^2] over all axes but the first `lead`, in float32 or better."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.square().mean(tuple(range(lead, x.dim())))


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
        return grad, mean_square(grad, ctx.lead)


def tap(stream: Any, slot: Tensor) -> tuple[Any, Tensor]:
    """The stream unchanged, and its mean square; its gradient's becomes the gradient of `slot`.

    Where a placement keeps several tensors, the first one is the stream that is tapped.
    """
    first = stream if isinstance(stream, Tensor) else stream[0]
    value = mean_square(first.detach(), slot.dim())
    tapped = GradientTap.apply(first, slot)
    return (tapped if isinstance(stream, Tensor) else (tapped, *stream[1:])), value
