"""The wiring modules of the residual algebra, and modules shared by other wirings.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from normlab.base.plugins import COUNTER
from normlab.catalogue.parameters import parameter
from normlab.catalogue.placements.base import MakeNorm
from normlab.catalogue.sites import of_sub_layer

if TYPE_CHECKING:
    from normlab.catalogue.placements.algebra import SubLayer


UPDATES = f"branch{COUNTER}"
MODULES = {"input": "in", "output": "out", "residual": "res"}
"""The name of the module of a norm by its site; initial values and checkpoints have this name."""


class Branch:
    """A sub-layer times a factor, (B, T, D) to (B, T, D), that records the tensor added to the stream.

    Statistics of a branch are computed on this tensor. It is the sub-layer's output, unless the wiring calls
    `mark_update` with another tensor.
    """

    def __init__(self, sublayer: Callable[[Tensor], Tensor], factor: float = 1.0):
        self.sublayer = sublayer
        self.factor = factor
        self.last_update: Tensor | None = None

    def __call__(self, x_BTD: Tensor) -> Tensor:
        """Return the output of the sub-layer, marked as the update of the stream."""
        branch_BTD = self.sublayer(x_BTD)
        return self.mark_update(branch_BTD if self.factor == 1 else branch_BTD * self.factor)

    def mark_update(self, branch_BTD: Tensor) -> Tensor:
        """Record the tensor that is added to the stream, and return it unchanged."""
        self.last_update = branch_BTD
        return branch_BTD


@lru_cache(maxsize=64)  # each layer asks again, which would be quadratic in the depth
def _is_needed(schedule: Callable[[int, int], float], depth: int) -> bool:
    """Return whether the factor of any layer is not 1."""
    return any(schedule(layer, depth) != 1.0 for layer in range(1, depth + 1))


class Residual(nn.Module):
    """x <- C(a x + r g b B(F(A(x) / s))) for one sub-layer F, without absent norms and factors.

    With `warmup` r grows with the number of updates, which the training step writes into `branch_updates`. With
    `affine` each of the two terms t of the sum is (t + bias) scale, both vectors (D,), as in ZAYA1 (`Zyphra/ZAYA1-8B`).
    """

    skip: Tensor | None
    branch: Tensor | None
    shrink: Tensor | None
    branch_updates: Tensor
    rate: Tensor
    skip_bias: nn.Parameter
    skip_scale: nn.Parameter
    branch_bias: nn.Parameter
    branch_scale: nn.Parameter

    def __init__(
        self,
        sub: SubLayer,
        sub_layer: str,
        layer: int,
        depth: int,
        width: int,
        make_norm: MakeNorm,
        warmup: int | None = None,
        affine: bool = False,
    ):
        """Make the norms and factors of a sub-layer, `attn` or `mlp`, of block `layer` (from 1)."""
        super().__init__()
        self.grows, self.has_affine = warmup is not None, affine
        if warmup is not None:
            self.register_buffer(UPDATES, torch.zeros((), dtype=torch.float64))
            # Block l has its whole branch after W l / L updates, the first block first (ProRes, arXiv:2603.05369).
            self.register_buffer("rate", torch.tensor(depth / (warmup * layer), dtype=torch.float64))
        self.norms = nn.ModuleDict()
        for site, name in MODULES.items():
            if site in sub.norms:
                self.norms[name] = make_norm(width, of_sub_layer(site, sub_layer))
        for name in ("skip", "branch", "shrink"):
            schedule = getattr(sub, name)
            needed = _is_needed(schedule, depth)
            # A buffer in every layer if any layer needs the factor, so that all layers share one compiled graph. A
            # float64 scalar multiplies a float32 tensor as a float32 number, and a float64 tensor without loss.
            self.register_buffer(name, torch.tensor(schedule(layer, depth), dtype=torch.float64) if needed else None)
        if sub.out_gain is not None:
            of_output: Any = self.norms["out"].get_submodule("affine")
            of_output.set_initial_gain(sub.out_gain(layer, depth))
        self.scale: nn.Parameter | None = None
        if sub.scale is not None:
            shape = (width,) if sub.scale_per_channel else ()
            self.scale = parameter(torch.full(shape, float(sub.scale(layer, depth))), role="scalar")
        if affine:
            for term in ("skip", "branch"):
                self.register_parameter(f"{term}_bias", parameter(torch.zeros(width), role="bias"))
                self.register_parameter(f"{term}_scale", parameter(torch.ones(width), role="scalar"))

    def forward(self, x_BTD: Tensor, sublayer: Branch) -> Tensor:
        branch_BTD = self.norms["in"](x_BTD) if "in" in self.norms else x_BTD
        # After the `in` norm: a norm that is invariant to scale would cancel a factor on its input.
        if self.shrink is not None:
            branch_BTD = branch_BTD / self.shrink
        branch_BTD = sublayer(branch_BTD)
        if "out" in self.norms:
            branch_BTD = self.norms["out"](branch_BTD)
        # The factors come after the `out` norm for the same reason: it would cancel them.
        if self.branch is not None:
            branch_BTD = branch_BTD * self.branch
        if self.scale is not None:
            # The vector is float32; the stream keeps its own dtype.
            branch_BTD = (branch_BTD * self.scale).to(x_BTD.dtype)
        if self.grows:
            # A limit instead of a branch on the number of updates, so that one graph serves the whole run.
            branch_BTD = branch_BTD * (self.branch_updates * self.rate).clamp(max=1)
        if self.has_affine:
            # These vectors are float32, too.
            branch_BTD = ((branch_BTD + self.branch_bias) * self.branch_scale).to(x_BTD.dtype)
        # Marked with all factors and norms: statistics of a branch are of what the stream receives.
        branch_BTD = sublayer.mark_update(branch_BTD)
        skip_BTD = x_BTD if self.skip is None else x_BTD * self.skip
        if self.has_affine:
            skip_BTD = ((skip_BTD + self.skip_bias) * self.skip_scale).to(x_BTD.dtype)
        sum_BTD = skip_BTD + branch_BTD
        return self.norms["res"](sum_BTD) if "res" in self.norms else sum_BTD


class Sequential(nn.Module):
    """Attention, then the MLP, each added to the stream by its own module."""

    def __init__(self, attn: nn.Module, mlp: nn.Module):
        super().__init__()
        self.attn = attn
        self.mlp = mlp

    def forward(self, x_BTD: Tensor, attn: Branch, mlp: Branch) -> Tensor:
        return self.mlp(self.attn(x_BTD, attn), mlp)


class TwoNorms(nn.Module):
    """The base class of a wiring with one norm for attention and one for the MLP, both at the same `site`."""

    site: ClassVar[str] = "input"

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.attn_norm = make_norm(width, of_sub_layer(self.site, "attn"))
        self.mlp_norm = make_norm(width, of_sub_layer(self.site, "mlp"))
