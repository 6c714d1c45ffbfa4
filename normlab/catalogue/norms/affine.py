"""The base class of the norms' modules, the learned gain and bias, and the working dtype.

Shapes: `*batch` any leading axes, D width.
"""

import torch
from torch import Tensor, nn

from normlab.catalogue.norms.base import AffineNormConfig, NormConfig
from normlab.catalogue.parameters import parameter


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that norms compute in by default: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class Affine(nn.Module):
    """y = x * gain + bias, each optional; with `unit_offset` y = x * (1 + gain) + bias and gain starts at 0.

    Maps (*batch, D) to (*batch, D), in the dtype of x: parameters are first rounded to that dtype.
    """

    def __init__(self, width: int, *, gain: bool = True, bias: bool = False, unit_offset: bool = False):
        super().__init__()
        self.unit_offset = unit_offset
        start = torch.zeros(width) if unit_offset else torch.ones(width)
        self.gain = parameter(start, role="gain") if gain else None
        self.bias = parameter(torch.zeros(width), role="bias") if bias else None

    @torch.no_grad()
    def set_initial_gain(self, value: float) -> None:
        """Set the initial factor of every channel, in place."""
        assert self.gain is not None, "Placement.check_norm rejects norms without a gain"
        self.gain.fill_(value - self.unit_offset)

    def effective_gain(self, dtype: torch.dtype) -> Tensor | None:
        """Return the factor on each channel, (D,): `gain`, or 1 + `gain` with a unit offset."""
        if self.gain is None:
            return None
        if not self.unit_offset:
            return self.gain.to(dtype)
        # Add in the wider dtype: in a narrow dtype, 1 + gain is exactly 1 for a small gain.
        return (1 + self.gain.to(torch.promote_types(self.gain.dtype, dtype))).to(dtype)

    def forward(self, x_D: Tensor) -> Tensor:
        # In the dtype of x: with a float32 gain the product would be float32, although the caller has chosen another.
        gain_D = self.effective_gain(x_D.dtype)
        if gain_D is not None:
            x_D = x_D * gain_D
        return self.add_bias(x_D)

    def add_bias(self, x_D: Tensor) -> Tensor:
        """Return x + bias, in the dtype of x."""
        if self.bias is None:
            return x_D
        return x_D + self.bias.to(x_D.dtype)


class NormModule(nn.Module):
    """A norm: `normalise`, then the gain and the bias. Maps (*batch, D) to the same shape and dtype.

    It computes in float32, or float64 for float64, and rounds once, at the end.
    """

    def __init__(self, width: int, options: NormConfig):
        super().__init__()
        # Bounded functions, such as DyT, have no eps.
        self.eps = getattr(options, "eps", 0.0)
        if isinstance(options, AffineNormConfig):
            self.affine = Affine(width, gain=options.gain, bias=options.bias, unit_offset=options.unit_offset)
        else:
            self.affine = Affine(width, gain=False)

    def normalise(self, x_D: Tensor) -> Tensor:
        """Return the normalised input, in the dtype of x."""
        raise NotImplementedError

    def forward(self, x_D: Tensor) -> Tensor:
        # In a narrow dtype the statistics would lose digits or overflow: bfloat16 has 8 bits of them, and in float16
        # the square of 256 is infinite.
        return self.affine(self.normalise(x_D.to(working_dtype(x_D.dtype)))).to(x_D.dtype)
