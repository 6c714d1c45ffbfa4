"""FLOPs per token against torch's own counter, for shapes of models and for every norm and placement."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from normlab.base.errors import ConfigError
from normlab.catalogue.norms import base as norms
from normlab.catalogue.norms.rmsnorm import RMSNormConfig
from normlab.catalogue.placements import base as placements
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.model.attention import attend
from normlab.model.flops import flops_per_token
from normlab.model.gpt import GPT
from normlab.model.runner import attention_by
from normlab.model.small import small_config

SHAPES = {
    "gpt2_124m": ("model=gpt2_124m", 50257),
    "llama_124m": ("model=llama_124m", 32000),
    "untied": ("model=gpt2_mini model.tie_embeddings=false model.bias=false", 257),
    "one layer and one head": ("model=gpt2_nano model.depth=1 model.heads=1", 11),
    "value embeddings": ("model=gpt2_nano model.value_embed=true model.value_residual=learned model.depth=3", 257),
    "odd sizes": (
        "model=gpt2_nano model.width=33 model.heads=3 model.mlp_width=71 model.context=37 model.depth=3",
        101,
    ),
    "swiglu with learned positions": ("model=gpt2_nano model.mlp=swiglu model.mlp_width=50 model.qk_norm=full", 257),
    "products in norms": ("model=gpt2_nano norm=gatednorm placement=sandwich model.qk_norm=head", 257),
    "accumulation": ("model=gpt2_nano norm=batchnorm_past train.batch_size=6 train.accumulation=3", 257),
}


def counted(config: RunConfig, vocab_size: int) -> float:
    """FLOPs per token of one micro-batch by torch's counter; of a large model on tensors without data."""
    no_data = FakeTensorMode() if config.model.width > 256 else nullcontext()
    with no_data, FlopCounterMode(display=False) as counter:
        model = GPT(
            config.model,
            config.placement,
            lambda width, site, layer=None: config.norm_at(site, layer).build(width),
            vocab_size,
        )
        tokens = torch.zeros(
            config.train.batch_size // config.train.accumulation, config.model.context, dtype=torch.long
        )
        with attention_by(model, attend):  # the counter does not know every fused kernel
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return counter.get_total_flops() / tokens.numel()


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_flops_of_model_shapes(shape):
    overrides, vocab_size = SHAPES[shape]
    config = compose_run(overrides.split())
    assert flops_per_token(config, vocab_size) == counted(config, vocab_size)


def pairs():
    """Every norm in `pre`, and every placement with a norm whose products depend on the shape of its input."""
    all_norms, all_placements = norms.load_all(), placements.load_all()
    for name in all_norms:
        yield name, "pre", "head"
    for placement in all_placements:
        yield "batchnorm_past", placement, "full"
    yield "gatednorm", "hyper_connections", "head"


@pytest.mark.few(10)
@pytest.mark.parametrize(("norm", "placement", "qk_norm"), sorted(set(pairs())))
def test_flops_of_norms_and_placements(norm, placement, qk_norm):
    # Exact, because the products inside a norm are a small part of a model's.
    kind: Any = norms.NORMS[norm]
    try:
        config = small_config(kind(), placements.PLACEMENTS[placement], depth=2, qk_norm=qk_norm)
    except ConfigError as error:
        pytest.skip(str(error))
    assert flops_per_token(config, 11) == counted(config, 11), "declare its products in `NormConfig.matmul_flops`"


@pytest.mark.parametrize("mixing", ["permutations", "kronecker"])
def test_flops_of_mixing_streams(mixing):
    placement = dataclasses.replace(placements.load_all()["mhc"], mixing=mixing)
    config = small_config(RMSNormConfig(), placement, depth=2)
    assert flops_per_token(config, 11) == counted(config, 11), "declare its products in `Mixing.matmul_weights`"


def test_flops_follow_the_formula_of_palm():
    config = compose_run(["model=gpt2_124m"])
    weights, attention = 12 * 12 * 768**2 + 50257 * 768, 12 * 12 * 768 * 1024
    assert flops_per_token(config, 50257) == 6 * weights + attention
