"""Models with random weights, and the comparison of their gradients with those of transformers."""

import math

import torch
from torch import Tensor

from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT
from normlab.model.init import build_model
from support.tolerance import assert_equal, rounding

Tensors = dict[str, Tensor]

VOCAB = 61
CONTEXT = 24


def config_of(*overrides: str) -> RunConfig:
    return compose_run(["model.width=32", "model.heads=4", f"model.context={CONTEXT}", *overrides])


def randomised(config: RunConfig, dtype: torch.dtype = torch.float32) -> GPT:
    """A model with weights of every kind away from where they start, and logits of order one."""
    model = build_model(config, VOCAB).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(1.3 * noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(0.3 * noise)
    return model.to(dtype)


def assert_equal_gradients(ours: Tensors, theirs: Tensors, *, terms: int, layers: int) -> None:
    """Compare each gradient relative to its largest entry.

    Some are zero but for rounding, as of biases of keys, or of the queries of a single position: they cancel, and are
    compared relative to the largest gradient of all.
    """
    largest = max(grad.abs().max().item() for grad in theirs.values())
    for name, grad in theirs.items():
        cancels = grad.abs().max() < rounding(grad.dtype, terms, 2 * layers) * largest
        scale = largest if cancels else 0.0
        assert_equal(ours[name], grad, terms=terms, layers=2 * layers, scale=scale, name=name)
    assert sum(grad.abs().max() > 1e-3 for grad in theirs.values()) > len(theirs) / 2
