"""The learned gain and bias that follow a normalisation, and the two precisions a norm works in.

Shapes: `*batch` any leading axes, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64: what a norm computes in unless told otherwise."""
    return torch.promote_types(dtype, torch.float32)


class Affine(nn.Module):
    """y = x * gain + bias, each optional; with `unit_offset` y = x * (1 + gain) + bias and gain starts at 0.

    Maps (*batch, D) to (*batch, D), in the dtype of x: the parameters are rounded to it first.
    """

    def __init__(self, width: int, *, gain: bool = True, bias: bool = False, unit_offset: bool = False):
        super().__init__()
        self.unit_offset = unit_offset
        start = torch.zeros(width) if unit_offset else torch.ones(width)
        self.gain = nn.Parameter(start) if gain else None
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    @torch.no_grad()
    def set_initial_gain(self, value: float) -> None:
        """Let every channel be multiplied by `value` at first."""
        assert self.gain is not None, "a placement that starts gains refuses norms without one"
        self.gain.fill_(value - self.unit_offset)

    def effective_gain(self, dtype: torch.dtype) -> Tensor | None:
        """The factor on each channel, shape (D,), in `dtype`: `gain`, or 1 + `gain` with a unit offset."""
        if self.gain is None:
            return None
        if not self.unit_offset:
            return self.gain.to(dtype)
        # Added in the wider of the two, for a narrow one loses a small gain beside 1.
        return (1 + self.gain.to(torch.promote_types(self.gain.dtype, dtype))).to(dtype)

    def forward(self, x_D: Tensor) -> Tensor:
        """Scale and shift; the identity where there is neither gain nor bias."""
        gain_D = self.effective_gain(x_D.dtype)
        if gain_D is not None:
            x_D = x_D * gain_D
        if self.bias is not None:
            x_D = x_D + self.bias.to(x_D.dtype)
        return x_D
