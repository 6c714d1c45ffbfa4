"""Model FLOPs of a training step, in closed form from the config. Imports no torch.

Shapes: B sequences of a micro-batch, T context, D width of the model, H heads, M width of the MLP, V vocabulary, L
depth.
"""

from __future__ import annotations

from normlab.config.schema import RunConfig


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
    weights = model.block_weights + model.width * vocab_size
    value_gates = sum(map(model.has_value_embed, range(model.depth)))
    weights += value_gates * model.heads * model.value_gate_channels
    weights += config.placement.matmul_weights(model.depth, model.width)
    attention = 12 * model.depth * model.context * model.width
    tokens = train.batch_size // train.accumulation * model.context
    return 6 * weights + attention + _norm_flops(config) / tokens


def _norm_flops(config: RunConfig) -> int:
    """Return the FLOPs of the matrix products inside the norms, for one micro-batch."""
    train = config.train
    tokens = (train.batch_size // train.accumulation, config.model.context)
    flops = 0
    for placed in config.placed_norms:
        flops += placed.norm.matmul_flops((*tokens, *placed.shape))
    return flops
