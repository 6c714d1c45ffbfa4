"""The start of the placements with two streams.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from torch import Tensor, nn

Streams = tuple[Tensor, Tensor]
"""Two streams, (B, T, D) each. Statistics are those of the first."""


def duplicate_stream(x_BTD: Tensor) -> Streams:
    """Return (x, copy of x); with one shared tensor the first block would need its own compiled graph."""
    return x_BTD, x_BTD.clone()


class DuplicateStream(nn.Module):
    """(x, x): both streams start at the embeddings."""

    def forward(self, x_BTD: Tensor) -> Streams:
        """Return the two streams that enter the first block."""
        return duplicate_stream(x_BTD)
