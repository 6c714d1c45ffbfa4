"""What the schemes that keep two streams share: how both begin.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from torch import Tensor, nn

Streams = tuple[Tensor, Tensor]
"""Two streams, (B, T, D) each. Statistics of the stream are those of the first."""


def twice(x_BTD: Tensor) -> Streams:
    """(x, x), in two places: two names of one tensor would need a compiled graph of their own for the first block."""
    return x_BTD, x_BTD.clone()


class Twice(nn.Module):
    """(x, x): both streams begin at the embeddings."""

    def forward(self, x_BTD: Tensor) -> Streams:
        """The two streams that enter the first block."""
        return twice(x_BTD)
