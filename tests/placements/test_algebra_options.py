"""Rows of the residual algebra: factors, options, initial values and the errors of wrong rows."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from normlab.base.errors import ConfigError
from normlab.catalogue.norms.base import load_all as load_norms
from normlab.catalogue.norms.layernorm import LayerNormConfig
from normlab.catalogue.placements.algebra import (
    AlgebraPlacement,
    DepthScaledPlacement,
    EarlyBlocks,
    EarlyPlacement,
    Row,
    SubLayer,
    register_row,
)
from normlab.catalogue.placements.table import ROWS, quarter
from normlab.catalogue.placements.wiring import Branch, Residual
from normlab.config.compose import compose_run
from normlab.model.groups import groups_of
from normlab.model.init import build_model
from support.reference_blocks import (
    DEPTH,
    VOCAB,
    WIDTH,
    composed,
    config_of,
    row_of,
)
from support.tolerance import assert_equal

pytestmark = pytest.mark.usefixtures("registries")


@pytest.mark.parametrize(
    ("asked", "depth", "reduced"),
    [
        (AlgebraPlacement(name="pre", final_norm=True), 4, AlgebraPlacement(name="pre")),
        (AlgebraPlacement(name="post", final_norm=True), 4, AlgebraPlacement(name="post", final_norm=True)),
        (
            AlgebraPlacement(name="post", embedding_norm=False, final_norm=True),
            4,
            AlgebraPlacement(name="post", final_norm=True),
        ),
        (EarlyPlacement(name="mix_ln", early_blocks=2, final_norm=True), 8, EarlyPlacement(name="mix_ln")),
        (EarlyPlacement(name="mix_ln", early_blocks=2), 4, EarlyPlacement(name="mix_ln", early_blocks=2)),
        (EarlyPlacement(name="mix_ln", early_blocks=0), 3, EarlyPlacement(name="mix_ln")),
        (EarlyPlacement(name="hybridnorm_star", early_blocks=1), 9, EarlyPlacement(name="hybridnorm_star")),
    ],
)
def test_override_that_repeats_the_default_keeps_the_identity(
    asked: AlgebraPlacement, depth: int, reduced: AlgebraPlacement
) -> None:
    assert asked.without_defaults(depth, WIDTH) == reduced
    model = dataclasses.replace(composed().model, depth=depth)
    ids = [dataclasses.replace(composed(), placement=one, model=model).config_hash for one in (asked, reduced)]
    bare = dataclasses.replace(composed(), placement=type(asked)(name=asked.name), model=model)
    assert ids[0] == ids[1]
    assert (ids[0] == bare.config_hash) == (reduced == bare.placement)


def make_norm(width: int, site: str) -> nn.Module:
    return LayerNormConfig().build(width)


def residual(layer: int = 1, depth: int = 3) -> Residual:
    schedules = SubLayer(
        norms=("input",),
        skip=lambda layer, depth: 1 + layer / 3,
        branch=lambda layer, depth: layer / 7,
        shrink=lambda layer, depth: math.sqrt(layer + 2),
    )
    return Residual(schedules, "mlp", layer, depth, WIDTH, make_norm)


def test_factors_under_vmap_equal_those_of_each_run() -> None:
    # Stacked, a factor has an axis of runs; under vmap it is a scalar again, and must not widen the stream.
    joins = [residual(layer) for layer in (1, 2, 3)]
    x = torch.randn(3, 2, 4, WIDTH, generator=torch.Generator().manual_seed(0))
    states = [join.state_dict() for join in joins]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    y = vmap(lambda tensors, x: functional_call(joins[0], tensors, (x, Branch(torch.tanh))))(stacked, x)
    assert y.dtype == torch.float32
    for run, join in enumerate(joins):
        assert_equal(y[run], join(x[run], Branch(torch.tanh)), terms=2)
    assert (y[0] - joins[1](x[0], Branch(torch.tanh))).abs().max() > 1e-2


def test_first_block_without_effect_is_rejected_with_norm_none() -> None:
    overrides = ["norm=none", "placement=keel"]
    with pytest.raises(ConfigError, match=r"placement\.first_block=pre: has no effect with norm=none"):
        compose_run([*overrides, "placement.first_block=pre"]).reject_unused_options()
    compose_run([*overrides, "placement.first_block=same"]).reject_unused_options()  # it has the factor 2L
    compose_run(overrides).reject_unused_options()


@pytest.mark.parametrize("placement", ["pre", "rezero"])
def test_branches_may_grow_without_norms(placement: str) -> None:
    compose_run(["norm=none", f"placement={placement}", "placement.branch_warmup=10"]).reject_unused_options()


def test_unknown_site_in_early_blocks_is_rejected() -> None:
    with pytest.raises(ConfigError, match="unknown site 'rse'"):
        register_row(row_of(early=EarlyBlocks(blocks=quarter, condition="", mlp=SubLayer(norms=("rse",)))))


@pytest.mark.parametrize(
    ("part", "norms", "said"),
    [
        ("mlp", ("input", "inner_attn"), "unknown site 'inner_attn' of mlp"),
        ("mlp", ("q",), "unknown site 'q' of mlp"),
        ("attn", ("inner_mlp",), "unknown site 'inner_mlp' of attn"),
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_site_of_the_other_sub_layer_is_rejected(part: str, norms: tuple[str, ...], said: str, early: bool) -> None:
    subs: dict[str, Any] = {part: SubLayer(norms=norms)}
    row = row_of(early=EarlyBlocks(blocks=quarter, condition="", **subs)) if early else row_of(**subs)
    with pytest.raises(ConfigError, match=said) as error:
        register_row(row)
    sites = "attn has input, output, residual, q, k, v, inner_attn; mlp has input, output, residual, inner_mlp"
    assert str(error.value).endswith(f": {sites}")


def test_learned_factor_is_not_decayed() -> None:
    for name in ("skipinit", "rezero", "layerscale"):
        model = build_model(config_of(AlgebraPlacement(name=name)), VOCAB)
        groups = {group for path, group in groups_of(model).items() if path.endswith(".scale")}
        assert groups == {"scalars"}
        assert composed().optim.of_group("scalars").weight_decay == 0


def test_learned_factor_keeps_the_dtype_of_the_stream() -> None:
    sub = SubLayer(scale=lambda layer, depth: 1 + 2**-12, scale_per_channel=True)
    join = Residual(sub, "mlp", 1, 1, WIDTH, make_norm)
    x = torch.ones(1, 1, WIDTH)
    # Under autocast a sub-layer gives bfloat16, of 8 digits; the stream and the factor have 24.
    assert torch.equal(join(x, Branch(lambda x: x.bfloat16())), torch.full_like(x, 2 + 2**-12))
    assert join(x.bfloat16(), Branch(lambda x: x)).dtype == torch.bfloat16


NORM_KINDS = {name: kind() for name, kind in load_norms().items()}  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("name", NORM_KINDS)
def test_depth_scaled_sandwich_accepts_only_norms_with_a_gain(name: str) -> None:
    placement, norm = DepthScaledPlacement(name="depth_scaled_sandwich"), NORM_KINDS[name]
    assert norm.has_gain is getattr(norm, "gain", False)
    if norm.has_gain:
        placement.check_norm("output_attn", norm)
        model = build_model(dataclasses.replace(config_of(placement), norm=norm), VOCAB)
        gain = model.get_parameter("blocks.0.wiring.mlp.norms.out.affine.gain")
        torch.testing.assert_close(gain, torch.full((WIDTH,), 0.432 / math.sqrt(DEPTH)))
    else:
        with pytest.raises(ConfigError, match=f"norm={name}: has no gain per channel"):
            placement.check_norm("output_attn", norm)


def test_out_gain_without_out_norm_is_rejected() -> None:
    with pytest.raises(ConfigError, match="out_gain has no effect without a norm at site 'output'"):
        register_row(row_of(mlp=SubLayer(norms=("input",), out_gain=lambda layer, depth: 0.5)))


def test_config_without_the_gain_that_the_placement_sets_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"norm=rmsnorm: has no gain .* or placement=peri"):
        compose_run(["placement=depth_scaled_sandwich", "norm.gain=false"])


def test_row_with_an_unknown_site_or_a_taken_name_is_rejected() -> None:
    overrides: dict[str, Any] = {"formula": "x = x + F(N(x))", "source": "", "init": "gpt2"}
    with pytest.raises(ConfigError, match=r"unknown site 'inut'.*did you mean 'input'"):
        register_row(Row(name="mistyped", attn=SubLayer(norms=("inut",)), **overrides))
    with pytest.raises(ConfigError, match="'pre' is defined twice"):
        register_row(Row(name="pre", attn=SubLayer(norms=("output",)), **overrides))
    assert AlgebraPlacement(name="pre").row in ROWS
