"""RMSNorm by the kernel that torch has for GPUs, in single and in stacked runs.

Shapes: `*batch` any axes, D width, R runs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_batchedtensor


def has_kernel(x: Tensor) -> bool:
    """Return whether there is one kernel for this tensor; a compiler fuses the separate operations itself."""
    return x.is_cuda and not torch.compiler.is_compiling()


def rms_norm(x_D: Tensor, gain_D: Tensor | None, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * gain over the last axis, in the dtype of x; None for no gain."""
    if is_batchedtensor(x_D):
        return _StackedRMSNorm.apply(x_D, gain_D, eps)
    return F.rms_norm(x_D, (x_D.shape[-1],), gain_D, eps)


class _StackedRMSNorm(torch.autograd.Function):
    """RMSNorm under vmap, which would take torch's function apart: all runs are rows of one input.

    Each run has its own gain, which the kernel does not take, so it is multiplied afterwards. Torch calls `vmap` with
    tensors that have the axis of runs, so that autograd records its operations and can differentiate them repeatedly.
    """

    @staticmethod
    def forward(x_D: Tensor, gain_D: Tensor | None, eps: float) -> Tensor:
        raise NotImplementedError("rms_norm applies it under vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep nothing; torch demands this function of a class with `vmap`."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        x_D, gain_D, eps = args
        assert in_dims[0] is not None
        x_RD = x_D.movedim(in_dims[0], 0)
        y_RD = rms_norm(x_RD, None, eps)
        if gain_D is None:
            return y_RD, 0
        if in_dims[1] is not None:
            gain_D = gain_D.movedim(in_dims[1], 0)
            gain_D = gain_D.reshape(len(gain_D), *(1,) * (y_RD.dim() - 2), -1)
        return y_RD * gain_D, 0
