"""The dynamic loss scale of training in float16, whose smallest numbers are larger than many gradients.

Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; rule and numbers of `torch.amp.GradScaler`.
"""

from __future__ import annotations

import torch
from torch import Tensor

INITIAL = 2.0**16
GROWTH_INTERVAL = 2000
"""Updates in succession after which the scale doubles; a gradient that is not finite halves it."""
SMALLEST = 1.0
"""With a smaller scale, the run counts as diverged: its gradients overflow without any scale."""


class LossScale:
    """A factor of the loss, in place on the device; the host never reads it.

    `torch.amp.GradScaler` reads on the host whether to call the optimiser, so a CUDA graph could not replay it.

    Args:
        device: The device of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL, device=device)
        """Shape (), a power of two: multiplying by it rounds nothing."""
        self._updates = torch.zeros((), dtype=torch.int32, device=device)
        """Updates since the scale last changed."""
        self._overflow = torch.zeros((), device=device)
        """1 if a gradient of this step is not finite, else 0."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by name."""
        return {"loss_scale": self.scale, "loss_scale_updates": self._updates}

    @torch.no_grad()
    def unscale_(self, gradients: list[Tensor]) -> None:
        """Divide the gradients of all parameters by the scale, in place, and note whether all are finite."""
        self._overflow.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._overflow, self.scale.reciprocal())

    @torch.no_grad()
    def update(self) -> Tensor:
        """Change the scale after the gradients of a step are known; return whether they are finite, shape ()."""
        torch._amp_update_scale_(self.scale, self._updates, self._overflow, 2.0, 0.5, GROWTH_INTERVAL)
        return self._overflow == 0
