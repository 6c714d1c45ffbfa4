"""Initial weights: drawn from (seed, name) and nothing else, with the standard deviation that the rule gives."""

import dataclasses
import hashlib
import math
import random
from functools import cache
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from normlab.catalogue.norms.base import NormConfig
from normlab.catalogue.parameters import parameter
from normlab.catalogue.placements.init_rules import ROLES
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT, Block
from normlab.model.init import build_model, drawn_weights, initialise

VOCAB = 50
SMALL = ("model=gpt2_nano", "model.depth=2", "model.width=16", "model.heads=2", "model.context=8")


def config_of(*overrides: str) -> RunConfig:
    return compose_run([*SMALL, *overrides])


@cache
def model_of(*overrides: str) -> GPT:
    return build_model(config_of(*overrides), VOCAB)


def weights(*overrides: str) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model_of(*overrides).named_parameters()}


def drawn(*overrides: str) -> dict[str, Tensor]:
    """Those that an init rule drew."""
    tensors = weights(*overrides)
    return {name: tensors[name] for name in drawn_weights(model_of(*overrides))}


def assert_shared(one: dict[str, Tensor], other: dict[str, Tensor], names: set[str]) -> None:
    assert names
    for name in names:
        assert torch.equal(one[name], other[name]), name


# From (seed, name) alone


@pytest.mark.parametrize(
    "overrides",
    [
        ("norm=layernorm", "placement=post"),
        ("norm=batchnorm", "placement=pre"),
        ("norm=none", "placement=post"),
        ("norm=rmsnorm_gemma", "model.qk_norm=head"),
        ("norm=rmsnorm", "model.qk_norm=full"),
        ("model.tie_embeddings=false",),
        ("model.bias=false",),
        ("data.seed=7", "optim=sgd", "train.steps=9"),
    ],
    ids=" ".join,
)
def test_shared_weights_are_equal_when_other_options_differ(overrides: tuple[str, ...]) -> None:
    plain, other = drawn("init=gpt2"), drawn("init=gpt2", *overrides)
    names = set(plain)
    assert names <= set(other)
    assert len(names) == 2 + 2 * 6
    assert_shared(plain, other, names)


def test_deeper_model_contains_the_weights_of_the_shallower_one() -> None:
    shallow, deep = weights("init=gpt2"), weights("init=gpt2", "model.depth=4")
    assert_shared(shallow, deep, set(shallow))
    for name in drawn("init=gpt2", "model.depth=4"):
        if name.startswith("blocks.2."):
            assert not torch.equal(deep[name], deep[name.replace("blocks.2.", "blocks.0.")])


def test_another_seed_is_another_model() -> None:
    one, other = drawn(), drawn("seed=1")
    for name, tensor in one.items():
        # Not merely other bits: no more alike than two draws are.
        correlation = torch.corrcoef(torch.stack([tensor.flatten(), other[name].flatten()]))[0, 1]
        assert correlation.abs() < 5 / math.sqrt(tensor.numel())


def test_draw_follows_the_documentation() -> None:
    # Spelled out again: a run's weights must not change with a refactoring.
    key = int.from_bytes(hashlib.sha256(b"3/blocks.1.mlp.up.weight").digest()[:8], "little")
    values = np.random.Generator(np.random.Philox(key=key)).standard_normal(64 * 16, dtype=np.float32)
    expected = torch.from_numpy(values).view(64, 16) * 0.02
    torch.testing.assert_close(weights("seed=3", "init=gpt2")["blocks.1.mlp.up.weight"], expected, rtol=0, atol=0)


# Global generators


def test_global_generators_are_unchanged() -> None:
    config = config_of("norm=batchnorm")
    with torch.random.fork_rng(devices=[]):
        # A state that no earlier building of a model can have left.
        torch.manual_seed(12345)
        before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].copy(), random.getstate()
        build_model(config, VOCAB)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], before[1])
        assert random.getstate() == before[2]


@dataclasses.dataclass(kw_only=True, slots=True)
class Drawing(NormConfig):
    """A norm that draws its parameters, as a user's may; it is not registered."""

    formula: ClassVar[str] = "x * gain"
    source: ClassVar[str] = "this test"
    verified_by: ClassVar[str] = "none"

    name: str = "drawing"

    def build(self, width: int) -> nn.Module:
        return DrawnGain(width)


class DrawnGain(nn.Module):
    """Its gain has the name of torch's, which is also that of the weights that an init rule draws."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = parameter(torch.randn(width), role="gain")

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_weights_do_not_depend_on_torchs_generator() -> None:
    def built(generator_seed: int, run_seed: int = 0) -> dict[str, Tensor]:
        config = config_of("model.qk_norm=head", "placement=sub_ln", f"seed={run_seed}")
        config = dataclasses.replace(config, norm=Drawing())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_seed)
            torch.rand(generator_seed)
            return {name: p.detach() for name, p in build_model(config, VOCAB).named_parameters()}

    one, other, reseeded = built(1), built(2), built(1, run_seed=1)
    assert_shared(one, other, set(one))
    gains = [name for name, tensor in one.items() if name.endswith(".weight") and tensor.dim() == 1]
    assert len(gains) == 2 * 6 + 1
    for i, name in enumerate(gains):
        assert not torch.equal(one[name], reseeded[name])
        for another in gains[i + 1 :]:
            count = min(one[name].numel(), one[another].numel())
            assert not torch.equal(one[name][:count], one[another][:count])


# The rules


def test_every_drawn_weight_has_a_role_that_the_rules_know() -> None:
    model = model_of("model.mlp=swiglu", "model.tie_embeddings=false", "model.attn_gate=head")
    assert {weight.role for weight in drawn_weights(model).values()} == set(ROLES)


def test_a_weight_knows_its_block_and_its_fans() -> None:
    found = drawn_weights(model_of("model.value_embed=true"))
    assert (found["embed.tokens.weight"].layer, found["blocks.1.mlp.up.weight"].layer) == (0, 2)
    up, values = found["blocks.1.mlp.up.weight"], found["blocks.1.attn.value_embed.weight"]
    assert (up.fan_in, up.fan_out) == (16, 64)
    # The embedding of a token's value has the vocabulary as its rows, and the fans of W_v.
    assert (values.role, values.fan_in, values.fan_out) == ("attn.v", 16, 16)


class Halves(nn.Module):
    """A placement's transform of the MLP's hidden numbers; its parameter has the name of torch's weights."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = parameter(torch.full((width, 1), 0.5), role="scalar")


def test_a_parameter_of_a_placement_is_not_drawn_for_its_name() -> None:
    config = config_of("placement=pre")
    model = GPT(config.model, config.placement, lambda width, site, layer=None: nn.LayerNorm(width), VOCAB)
    block, halves = model.blocks[0], Halves(64)
    assert isinstance(block, Block)
    block.mlp.of_up = halves
    initialise(model, "gpt2", seed=0)
    assert halves.weight.eq(0.5).all()


def test_init_auto_selects_the_rule_of_the_placement() -> None:
    for placement, rule in (("pre", "gpt2_scaled"), ("post", "xavier")):
        auto, named = weights(f"placement={placement}"), weights(f"placement={placement}", f"init={rule}")
        assert_shared(auto, named, set(auto))
    pre, post = weights("placement=pre"), weights("placement=post")
    assert not torch.equal(pre["blocks.0.mlp.up.weight"], post["blocks.0.mlp.up.weight"])


@pytest.mark.parametrize("overrides", [("norm=layernorm",), ("norm=batchnorm", "placement=post")], ids=" ".join)
def test_biases_are_zero_and_norms_start_as_they_were_built(overrides: tuple[str, ...]) -> None:
    tensors = weights(*overrides)
    rest = {name: tensors[name] for name in tensors.keys() - drawn(*overrides).keys()}
    biases = {name for name in rest if name.endswith(".bias")}
    gains = set(rest) - biases
    assert len({name for name in biases if "affine" not in name}) == 2 * 6
    assert gains
    assert all(name.endswith("affine.gain") for name in gains)
    for name, tensor in rest.items():
        assert torch.equal(tensor, torch.full_like(tensor, float(name in gains))), name


def test_tied_embeddings_are_one_tensor_and_untied_ones_two() -> None:
    tied = build_model(config_of(), VOCAB)
    assert tied.head.weight is tied.embed.tokens.weight
    untied = build_model(config_of("model.tie_embeddings=false"), VOCAB)
    assert not torch.equal(untied.head.weight, untied.embed.tokens.weight)
    assert torch.equal(untied.embed.tokens.weight, tied.embed.tokens.weight)
