"""Model FLOPs of a training step, in closed form from the config. Imports torch only for a norm with matrix products.

Shapes: B sequences of a micro-batch, T context, D width of the model, H heads, M width of the MLP, V vocabulary, L
depth.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from normlab.config.schema import RunConfig

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]


def flops_per_token(config: RunConfig, vocab_size: int) -> float:
    """Return the FLOPs per token of the matrix products in a training step, forward and backward.

    6 N + 12 L T D (+ matrix products inside norms), where N is the number of weights that multiply a token:
    L (4 D^2 + 2 D M), or 3 D M for swiglu, those of the wiring (`Placement.matmul_weights`), and V D for the head, tied
    or not. A product costs 2 FLOPs per weight in the forward pass, and twice that in the backward pass.

    The attention scores and the weighted sums of values count all T keys of a query, although half of them are masked:
    this is the convention of MFU, and fused kernels that skip masked keys can therefore seem faster than they are.

    Not counted: embeddings, which are looked up; norms, softmax, RoPE and other elementwise work; the optimiser;
    evaluations; statistics. A norm with matrix products declares them (`NormConfig.matmul_flops`).

    Source: Chowdhery et al. 2022, arXiv:2204.02311 (PaLM), appendix B.
    """
    model, train = config.model, config.train
    assert model.mlp_width is not None  # resolved
    mlp_matrices = 3 if model.mlp == "swiglu" else 2
    block = model.attn_outputs + mlp_matrices * model.mlp_width
    weights = model.width * (model.depth * block + vocab_size)
    value_gates = sum(map(model.has_value_embed, range(model.depth)))
    weights += value_gates * model.heads * model.value_gate_channels
    weights += config.placement.matmul_weights(model.depth, model.width)
    attention = 12 * model.depth * model.context * model.width
    tokens = train.batch_size // train.accumulation * model.context
    return 6 * weights + attention + _norm_flops(config) / tokens


def _norm_flops(config: RunConfig) -> int:
    """Return the FLOPs of the matrix products inside the norms, for one micro-batch."""
    model, train = config.model, config.train
    assert model.mlp_width is not None  # resolved
    tokens = (train.batch_size // train.accumulation, model.context)
    stream, hidden = (*tokens, model.width), (*tokens, model.mlp_width)
    heads = (*tokens, model.heads, model.width // model.heads)
    # Nearly every norm: the number of norms on the stream needs torch, which takes seconds to import.
    if not config.norm.matmul_flops(stream):
        return 0
    inputs: Counter[Shape] = Counter()
    if model.qk_norm == "head":
        inputs[heads] += 2 * model.depth
    elif model.qk_norm == "full":
        inputs[stream] += 2 * model.depth
    inputs[heads] += model.v_norm * model.depth
    for layer in range(model.depth):
        sites = config.placement.inner_sites(layer, model.depth)
        # A Boolean counts as 0 or 1.
        inputs[heads] += len(sites & {"q", "k", "v"})
        inputs[stream] += "attn_inner" in sites
        inputs[hidden] += "mlp_inner" in sites
    inputs[stream] += _norms_on_stream(config)
    return sum(count * config.norm.matmul_flops(shape) for shape, count in inputs.items())


def _norms_on_stream(config: RunConfig) -> int:
    """Return the number of norms outside the sub-layers, all of the stream's width."""
    import torch

    norms: list[nn.Module] = []

    def make_norm(width: int, **site: bool) -> nn.Module:
        norms.append(config.norm.at(**site).build(width))
        return norms[-1]

    placement, model = config.placement, config.model
    with torch.device("meta"):  # without memory, and without random numbers
        placement.input_module(model.width, make_norm)
        placement.output_module(model.width, make_norm)
        for layer in range(model.depth):
            placement.wire(layer, model.depth, model.width, make_norm)
    return len(norms)
