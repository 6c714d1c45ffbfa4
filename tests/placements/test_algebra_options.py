"""Rows of the residual algebra: factors, options, initial values and the errors of wrong rows."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from normlab.config.compose import compose_run
from normlab.errors import ConfigError
from normlab.model.gpt import GPT, Block
from normlab.model.init import build_model
from normlab.norms.base import load_all as load_norms
from normlab.norms.layernorm import LayerNormConfig
from normlab.norms.rmsnorm import RMSNormConfig
from normlab.placements import base
from normlab.placements.algebra import (
    AlgebraPlacement,
    DepthScaledPlacement,
    EarlyBlocks,
    EarlyPlacement,
    Row,
    SubLayer,
    register_row,
)
from normlab.placements.base import PLACEMENTS
from normlab.placements.table import ROWS, quarter
from normlab.placements.wiring import Branch, Residual
from normlab.training.optim import is_decayed
from support.reference_blocks import (
    CONTEXT,
    DEPTH,
    VOCAB,
    WIDTH,
    composed,
    config_of,
    register_placement_of,
    row_of,
)
from support.tolerance import assert_equal

pytestmark = pytest.mark.usefixtures("registries")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row_has_formula_source_and_init(row: Row) -> None:
    assert row.formula
    assert row.source
    assert isinstance(PLACEMENTS[row.name], AlgebraPlacement)
    assert PLACEMENTS[row.name].init == row.init


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
    assert asked.without_defaults(depth) == reduced
    model = dataclasses.replace(composed().model, depth=depth)
    ids = [dataclasses.replace(composed(), placement=one, model=model).config_hash for one in (asked, reduced)]
    bare = dataclasses.replace(composed(), placement=type(asked)(name=asked.name), model=model)
    assert ids[0] == ids[1]
    assert (ids[0] == bare.config_hash) == (reduced == bare.placement)


@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_factors_of_one_add_no_buffers(name: str) -> None:
    placement = PLACEMENTS[name]
    assert isinstance(placement, AlgebraPlacement)
    model = build_model(config_of(placement), VOCAB)
    used = {
        factor
        for sub in (placement.row.attn, placement.row.mlp)
        for factor in ("skip", "branch", "shrink")
        if any(getattr(sub, factor)(layer, DEPTH) != 1 for layer in range(1, DEPTH + 1))
    }
    assert {buffer.rpartition(".")[2] for buffer, _ in model.named_buffers()} == used
    assert bool(used) == (name in ("deepnorm", "keel", "lns"))


def test_factor_is_a_buffer_in_all_layers_or_none() -> None:
    # Of one graph for every layer: a factor that is one in some of them is a tensor there too.
    placement = register_placement_of(row_of(attn=SubLayer(skip=lambda layer, depth: 1.0 if layer < depth else 2.0)))
    model = build_model(config_of(placement), VOCAB)
    found = {name: buffer.item() for name, buffer in model.named_buffers()}
    assert found == {f"blocks.{layer}.wiring.attn.skip": 1.0 + (layer == DEPTH - 1) for layer in range(DEPTH)}


def residual(layer: int = 1, depth: int = 3) -> Residual:
    schedules = SubLayer(
        norms=("in",),
        skip=lambda layer, depth: 1 + layer / 3,
        branch=lambda layer, depth: layer / 7,
        shrink=lambda layer, depth: math.sqrt(layer + 2),
    )
    return Residual(schedules, layer, depth, WIDTH, LayerNormConfig().build)


def test_factor_keeps_the_dtype_of_the_stream() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert residual()(x, Branch(lambda x: x)).dtype == dtype
    join = residual().double()
    assert join.skip.item() == 1 + 1 / 3
    assert join.branch.item() == 1 / 7
    assert join.shrink.item() == math.sqrt(3)


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


def test_row_of_an_unknown_kind_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"test_row.*EarlyPlacment.*did you mean 'EarlyPlacement'"):
        register_row(row_of(kind="EarlyPlacment"))


def wired(placement: AlgebraPlacement, depth: int) -> str:
    """By block: o for post-norm, e for pre-norm."""
    letters = {("res",): "o", ("in",): "e"}
    return "".join(letters[placement.sub_layers(layer, depth)[0].norms] for layer in range(1, depth + 1))


@pytest.mark.parametrize(
    ("depth", "asked", "expected"),
    [
        (12, None, "oooeeeeeeeee"),
        (7, None, "oeeeeee"),
        (3, None, "eee"),
        (4, 0, "eeee"),
        (4, 3, "oooe"),
        (4, 4, "oooo"),
        (4, 9, "oooo"),
    ],
)
def test_mix_ln_is_post_in_its_early_blocks(depth: int, asked: int | None, expected: str) -> None:
    assert wired(EarlyPlacement(name="mix_ln", early_blocks=asked), depth) == expected


def test_only_rows_with_early_blocks_have_the_option() -> None:
    early = {row.name for row in ROWS if row.early is not None and not row.variants}
    assert early == {row.name for row in ROWS if hasattr(PLACEMENTS[row.name], "early_blocks")}
    assert early == {"mix_ln", "hybridnorm_star"}


def test_formula_shows_the_number_of_early_blocks() -> None:
    row = AlgebraPlacement(name="mix_ln").row
    assert EarlyPlacement(name="mix_ln").formula == row.formula
    assert EarlyPlacement(name="mix_ln", early_blocks=3).formula == "x = N(x + F(x)) if l <= 3 else x + F(N(x))"
    star = EarlyPlacement(name="hybridnorm_star", early_blocks=0).formula
    assert star.count("l <= 0") == 2
    assert "l == 1" not in star


def test_unknown_site_in_early_blocks_is_rejected() -> None:
    with pytest.raises(ConfigError, match="unknown site 'rse'"):
        register_row(row_of(early=EarlyBlocks(blocks=quarter, condition="", mlp=SubLayer(norms=("rse",)))))


@pytest.mark.parametrize(
    ("part", "norms", "said"),
    [
        ("mlp", ("in", "attn_inner"), "unknown site 'attn_inner' of mlp"),
        ("mlp", ("q",), "unknown site 'q' of mlp"),
        ("attn", ("mlp_inner",), "unknown site 'mlp_inner' of attn"),
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_site_of_the_other_sub_layer_is_rejected(part: str, norms: tuple[str, ...], said: str, early: bool) -> None:
    subs = {part: SubLayer(norms=norms)}
    row = row_of(early=EarlyBlocks(blocks=quarter, condition="", **subs)) if early else row_of(**subs)
    with pytest.raises(ConfigError, match=said) as error:
        register_row(row)
    assert str(error.value).endswith(": attn has in, out, res, q, k, v, attn_inner; mlp has in, out, res, mlp_inner")


def test_repeated_site_is_rejected() -> None:
    with pytest.raises(ConfigError, match="attn has the site 'in' twice"):
        register_row(row_of(attn=SubLayer(norms=("in", "in"))))


def test_head_scale_is_initially_one_and_not_decayed() -> None:
    model = at_depth("normformer", 2)
    scales = [model.get_submodule(f"blocks.{layer}.attn").head_scale for layer in range(2)]
    for scale in scales:
        assert isinstance(scale, nn.Parameter)
        assert torch.equal(scale, torch.ones(2))
        assert not is_decayed(composed().optim, scale)


def learned(model: GPT) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if name.endswith(".scale")}


def at_depth(name: str, depth: int) -> GPT:
    config = dataclasses.replace(composed(), placement=AlgebraPlacement(name=name))
    config.model = dataclasses.replace(config.model, depth=depth)
    return build_model(config, VOCAB)


@pytest.mark.parametrize(("name", "each"), [("skipinit", 2), ("rezero", 1)])
def test_rows_without_norms_are_initially_the_identity(name: str, each: int) -> None:
    model = at_depth(name, DEPTH)
    assert len(learned(model)) == each * DEPTH
    assert all(scale.shape == () and scale == 0 for scale in learned(model).values())
    tokens = torch.arange(CONTEXT)[None]
    torch.testing.assert_close(model(tokens), model.embed.tokens(tokens) @ model.head.weight.T)


@pytest.mark.parametrize(("depth", "start"), [(1, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)])
def test_layerscale_has_a_smaller_initial_factor_in_deeper_models(depth: int, start: float) -> None:
    scales = learned(at_depth("layerscale", depth))
    assert len(scales) == 2 * depth
    for scale in scales.values():
        assert torch.equal(scale, torch.full((WIDTH,), start))


def test_learned_factor_is_not_decayed() -> None:
    for name in ("skipinit", "rezero", "layerscale"):
        for scale in learned(at_depth(name, 1)).values():
            assert not is_decayed(composed().optim, scale)


def test_learned_factor_keeps_the_dtype_of_the_stream() -> None:
    sub = SubLayer(scale=lambda layer, depth: 1 + 2**-12, scale_per_channel=True)
    join = Residual(sub, 1, 1, WIDTH, LayerNormConfig().build)
    x = torch.ones(1, 1, WIDTH)
    # Under autocast a sub-layer gives bfloat16, of 8 digits; the stream and the factor have 24.
    assert torch.equal(join(x, Branch(lambda x: x.bfloat16())), torch.full_like(x, 2 + 2**-12))
    assert join(x.bfloat16(), Branch(lambda x: x)).dtype == torch.bfloat16


PANGU, TRINITY = {"attn": 0.283, "mlp": 0.432}, {"attn": 1.0, "mlp": 1.0}


@pytest.mark.parametrize(("options", "c"), [({}, PANGU), ({"c_attn": 1.0, "c_mlp": 1.0}, TRINITY)])
@pytest.mark.parametrize("unit_offset", [False, True], ids=["", "unit_offset"])
def test_depth_scaled_sandwich_has_the_initial_gain_c_over_sqrt_depth(
    options: dict[str, float], c: dict[str, float], unit_offset: bool
) -> None:
    config = config_of(DepthScaledPlacement(name="depth_scaled_sandwich", **options))
    config = dataclasses.replace(config, norm=RMSNormConfig(unit_offset=unit_offset))
    model = build_model(config, VOCAB)
    gains = {name: gain + unit_offset for name, gain in model.named_parameters() if name.endswith("affine.gain")}
    out = {name: gain for name, gain in gains.items() if ".norms.out." in name}
    assert len(out) == 2 * DEPTH
    assert len(gains) == 4 * DEPTH + 1
    for name, gain in gains.items():
        start = c[name.split(".")[3]] / math.sqrt(DEPTH) if name in out else 1.0
        torch.testing.assert_close(gain, torch.full((WIDTH,), start))


NORM_KINDS = {name: kind() for name, kind in load_norms().items()}  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("name", NORM_KINDS)
def test_depth_scaled_sandwich_accepts_only_norms_with_a_gain(name: str) -> None:
    placement, norm = DepthScaledPlacement(name="depth_scaled_sandwich"), NORM_KINDS[name]
    assert norm.has_gain is getattr(norm, "gain", False)
    if norm.has_gain:
        placement.check_norm(norm)
        model = build_model(dataclasses.replace(config_of(placement), norm=norm), VOCAB)
        gain = model.get_parameter("blocks.0.wiring.mlp.norms.out.affine.gain")
        torch.testing.assert_close(gain, torch.full((WIDTH,), 0.432 / math.sqrt(DEPTH)))
    else:
        with pytest.raises(ConfigError, match=f"norm={name}: has no gain per channel"):
            placement.check_norm(norm)


def test_out_gain_without_out_norm_is_rejected() -> None:
    with pytest.raises(ConfigError, match="out_gain has no effect without a norm at site 'out'"):
        register_row(row_of(mlp=SubLayer(norms=("in",), out_gain=lambda layer, depth: 0.5)))


def test_config_without_the_gain_that_the_placement_sets_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"norm=rmsnorm: has no gain .* or placement=peri"):
        compose_run(["placement=depth_scaled_sandwich", "norm.gain=false"])


def test_each_inner_site_can_be_used_alone() -> None:
    for site in base.INNER_SITES:
        subs = {"mlp" if site == "mlp_inner" else "attn": SubLayer(norms=(site,))}
        model = build_model(config_of(register_placement_of(row_of(name=f"test_{site}", **subs))), VOCAB)
        for block in model.blocks:
            assert isinstance(block, Block)
            present = set(block.attn.norms) | ({"mlp_inner"} if block.mlp.norm is not None else set())
            assert present == {site}


def test_row_with_an_unknown_site_or_a_taken_name_is_rejected() -> None:
    overrides = {"formula": "", "source": "", "init": "gpt2"}
    with pytest.raises(ConfigError, match=r"unknown site 'inn'.*did you mean 'in'"):
        register_row(Row(name="mistyped", attn=SubLayer(norms=("inn",)), **overrides))
    with pytest.raises(ConfigError, match="'pre' is defined twice"):
        register_row(Row(name="pre", attn=SubLayer(norms=("out",)), **overrides))
    assert AlgebraPlacement(name="pre").row in ROWS
