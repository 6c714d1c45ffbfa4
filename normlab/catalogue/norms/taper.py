"""TaperNorm: a norm that becomes a linear map during training.

Shapes: `*batch` any leading axes, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from normlab.base.errors import no_effect
from normlab.base.options import option
from normlab.base.plugins import COUNTER
from normlab.catalogue.norms.affine import Affine
from normlab.catalogue.norms.base import AffineNormConfig
from normlab.catalogue.parameters import parameter
from normlab.system.ranks import mean_over_ranks

MEMORY = 0.99
"""The weight of the past in the averages from which c is computed, for each forward pass in training."""
UPDATES = f"taper{COUNTER}"
WARMUP = 100
PITFALL = (
    "After norm.taper_steps, gain_rms, gain_min and gain_absmax are of a gain that is no longer used; the statistics "
    "of tokens are still computed, with the weight 0, so that nothing is faster."
)


class Taper(nn.Module):
    """g n(x) gain + (1 - g) c L(x) gain' + bias, where n(x) is L(x) divided by a number for each token.

    L(x) is x in rmsnorm and x - mean(x) in layernorm. After t updates g is 1 for t <= W, and then
    (1 + cos(pi min(1, (t - W) / S))) / 2, with W = `taper_warmup` and S = `taper_steps`.

    While t <= W, each forward pass in training updates the averages of gain^2 n(x) L(x) and of gain^2 L(x)^2 over
    tokens and channels, `moments`. Their ratio is c, with which the maps differ least in the mean square. It also keeps
    the gain in `start_gain`; gain' is that plus the parameter `gain`, which starts at 0, so that weight decay draws
    gain' to the gain at the start.
    """

    taper_updates: Tensor
    moments: Tensor
    start_gain: Tensor

    def __init__(self, width: int, options: TaperedNormConfig):
        super().__init__()
        assert options.taper_steps is not None
        self.warmup, self.steps = options.taper_warmup, options.taper_steps
        self.gain = parameter(torch.zeros(width), role="gain") if options.gain else None
        self.register_buffer(UPDATES, torch.zeros((), dtype=torch.float64))
        # Averages that start at 0 are too small at first, both by the same factor, which cancels in their ratio.
        self.register_buffer("moments", torch.zeros(2))
        self.register_buffer("start_gain", torch.ones(width))

    def forward(self, normed_D: Tensor, linear_D: Tensor, affine: Affine, dtype: torch.dtype) -> Tensor:
        """Return the output.

        Args:
            normed_D: n(x), (*batch, D).
            linear_D: L(x), (*batch, D).
            affine: The gain, and the bias of both maps.
            dtype: That of the gains and the output.
        """
        if self.training:
            self._measure(normed_D, linear_D, affine.effective_gain(self.moments.dtype))
        # In float64, so that each of the factors that all tokens and channels share is rounded once.
        products, squares = self.moments.double()
        # A model that is evaluated before its first step has measured nothing, and its c is 1.
        ratio = torch.where(squares > 0, products / squares, 1.0)
        # The gate is a number in a buffer and not a branch, so that one compiled graph serves the whole run.
        progress = ((self.taper_updates.double() - self.warmup) / self.steps).clamp(0, 1)
        gate = (1 + torch.cos(math.pi * progress)) / 2
        y_D, linear_D = (gate * normed_D).to(dtype), ((1 - gate) * ratio * linear_D).to(dtype)
        gain_D = affine.effective_gain(dtype)
        if gain_D is not None and self.gain is not None:
            y_D, linear_D = y_D * gain_D, linear_D * (self.start_gain + self.gain).to(dtype)
        y_D = y_D + linear_D
        return y_D if affine.bias is None else y_D + affine.bias.to(dtype)

    @torch.no_grad()
    def _measure(self, normed_D: Tensor, linear_D: Tensor, gain_D: Tensor | None) -> None:
        gain_D = self.start_gain if gain_D is None else gain_D
        normed_D, linear_D = normed_D.to(gain_D.dtype) * gain_D, linear_D.to(gain_D.dtype) * gain_D
        new = mean_over_ranks(torch.stack([(normed_D * linear_D).mean(), linear_D.square().mean()]))
        # After the warm-up c and the start of gain' stay as they are, so that the map that remains is linear.
        is_measured = self.taper_updates <= self.warmup
        # vmap and the training step need a reassignment, not a write in place.
        self.moments = torch.where(is_measured, torch.lerp(new, self.moments, MEMORY), self.moments)
        self.start_gain = torch.where(is_measured, gain_D, self.start_gain)


@dataclass(kw_only=True, slots=True)
class TaperedNormConfig(AffineNormConfig):
    """Options of a norm n(x) = L(x) / (a number for each token) that can become linear (`Taper`).

    Kanavalau, Amo Alonso & Lall 2026, arXiv:2602.10408, section 3.
    """

    initial_values: ClassVar[Mapping[str, str]] = {
        "taper.gain": "[0] * D", f"taper.{UPDATES}": "0", "taper.moments": "[0, 0]", "taper.start_gain": "[1] * D",
    }  # fmt: skip

    taper_steps: int | None = option(
        None, at_least=1,
        help="TaperNorm: after norm.taper_warmup updates, replace the norm by c * gain * x with a constant c (in "
        "layernorm, x minus its mean), over this many updates; the norm before the output matrix stays.",
    )  # fmt: skip
    taper_warmup: int = option(WARMUP, "Updates before the taper, from which c is measured.", at_least=0)

    @property
    def changing(self) -> tuple[int, int]:
        return (0, 0) if self.taper_steps is None else (self.taper_warmup, self.taper_warmup + self.taper_steps)

    @property
    def invariances(self) -> tuple[str, ...]:
        if self.taper_steps is None:
            return self.invariant_to
        # The linear map that remains has the scale of x.
        return tuple(change for change in self.invariant_to if change != "scale")

    def validate(self) -> None:
        AffineNormConfig.validate(self)  # zero-argument super() does not work in a dataclass with slots
        if self.taper_steps is None and self.taper_warmup != WARMUP:
            raise no_effect(f"norm.taper_warmup={self.taper_warmup}", "norm.taper_steps=null")

    def reference_taper(self, normed_D: Tensor, linear_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the norm with its gain and bias, during or after the taper if there is one.

        Args:
            normed_D: n(x), (*batch, D).
            linear_D: L(x), (*batch, D).
            weights: As for `reference`.
        """
        if self.taper_steps is None:
            return self.reference_affine(normed_D, weights)
        done = min(1.0, max(0.0, float(weights[f"taper.{UPDATES}"]) - self.taper_warmup) / self.taper_steps)
        gate = math.cos(math.pi * done / 2) ** 2
        product, square = weights["taper.moments"].tolist()
        linear_D = linear_D * (product / square if square else 1.0)
        if self.gain:
            linear_D = linear_D * (weights["taper.start_gain"] + weights["taper.gain"])
        gained_D = self.reference_affine(normed_D, weights)
        bias_D = weights["affine.bias"] if self.bias else 0.0
        return gate * gained_D + (1 - gate) * (linear_D + bias_D)
