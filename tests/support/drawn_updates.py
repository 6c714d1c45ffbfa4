"""Small tensors and gradients for the same updates by our optimisers and by the public code of a recipe."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

STEPS = 50
SMALL = {768: 8, 3072: 20}
"""Sizes of the small tensors, by those of the model's."""
LARGE = 1e6
"""Size of the gradients: what public code adds to the norm of a matrix, 1e-7, is below rounding then."""


def drawn(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shapes[name], generator=generator, dtype=torch.float64) for name in sorted(shapes)}


def drawn_start(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    return drawn({name: [SMALL.get(n, n) for n in shape] for name, shape in shapes.items()}, 0)


def drawn_gradients(like: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    return {name: LARGE * g for name, g in drawn({n: p.shape for n, p in like.items()}, 1 + step).items()}


def sums_of(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return for each tensor its sum of squares, and its sum with drawn weights."""
    weights = drawn({name: t.shape for name, t in tensors.items()}, 1 + STEPS)
    return {name: [t.square().sum().item(), (weights[name] * t).sum().item()] for name, t in sorted(tensors.items())}
