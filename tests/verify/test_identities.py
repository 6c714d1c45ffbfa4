"""Equalities between entries of the catalogue that follow from the formulas which `normlab verify` checks.

The equalities of single norms are in tests/norms/test_zoo.py, those of single placements in tests/placements.

Shapes: D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normlab.model.small import build_small, small_config, tokens
from normlab.norms.layernorm import LayerNormConfig
from normlab.norms.rmsnorm import RMSNormConfig
from normlab.placements.base import PLACEMENTS, load_all
from normlab.verify.norms import input_of, module_of

WIDTH = 16


def centred(x_D: Tensor) -> Tensor:
    """Return x minus its mean over the channels."""
    return x_D - x_D.mean(-1, keepdim=True)


def test_layernorm_is_rmsnorm_of_the_centred_input() -> None:
    layer = module_of(LayerNormConfig(eps=0.3, bias=False), WIDTH)
    rms = module_of(RMSNormConfig(eps=0.3), WIDTH)
    torch.testing.assert_close(layer(input_of(WIDTH)), rms(centred(input_of(WIDTH))), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_pre_ln_model_becomes_a_pre_rmsnorm_model_with_equal_logits() -> None:
    """Jiang, Gu, Zhu & Pan 2023, arXiv:2305.14858, section 3.

    The mean over the channels is removed from every weight that writes to the stream, and each norm's bias is moved
    into the linear layers that read it.
    """
    load_all()
    layer = LayerNormConfig()
    layer_model, rms_model = (
        build_small(small_config(norm, PLACEMENTS["pre"], tie_embeddings=False)).gpt.train()
        for norm in (layer, RMSNormConfig(eps=layer.eps))
    )
    weights = {name: value for name, value in layer_model.state_dict().items() if not name.endswith("affine.bias")}
    rms_model.load_state_dict(weights)
    for name, parameter in rms_model.named_parameters():
        if name.startswith("embed.") or name.endswith(("attn.out.bias", "mlp.down.bias")):
            parameter.copy_(centred(parameter))
        elif name.endswith(("attn.out.weight", "mlp.down.weight")):
            parameter.copy_(centred(parameter.T).T)
    for before, after in zip(layer_model.blocks, rms_model.blocks, strict=True):
        for part, readers in (("attn", ("q", "k", "v")), ("mlp", ("up",))):
            bias = before.get_parameter(f"wiring.{part}.norms.in.affine.bias")
            for reader in readers:
                weight = before.get_parameter(f"{part}.{reader}.weight")
                after.get_parameter(f"{part}.{reader}.bias").add_(weight @ bias)
    head_bias = layer_model.head.weight @ layer_model.get_parameter("head.close.affine.bias")
    torch.testing.assert_close(layer_model(tokens()), rms_model(tokens()) + head_bias, rtol=1e-10, atol=1e-10)
