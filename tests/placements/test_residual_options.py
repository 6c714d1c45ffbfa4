"""The options of the residual sum that every row of the algebra has: `branch_factor` and `residual_affine`.

Shapes: B batch, T time, D width.
"""

import copy
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call, vmap

from normlab.base.errors import ConfigError
from normlab.catalogue.norms.base import NORMS
from normlab.catalogue.norms.rmsnorm import RMSNormConfig
from normlab.catalogue.placements.algebra import AlgebraPlacement
from normlab.catalogue.placements.base import PLACEMENTS
from normlab.catalogue.placements.formula import SUB_LAYERS
from normlab.catalogue.placements.table import ROWS
from normlab.catalogue.placements.wiring import Branch
from normlab.config.compose import compose_run
from normlab.model.fingerprint import fingerprint
from normlab.model.groups import groups_of
from normlab.model.init import build_model
from normlab.model.small import build_small, small_config
from normlab.verify.formula_sites import SUB_LAYER_OF
from normlab.verify.placements import factor_check, formula_check, wiring_check
from support.reference_blocks import VOCAB, WIDTH, composed, config_of
from support.tolerance import assert_equal, float32_as_float64

DEPTH = 3
TERMS = tuple(f"{term}_{part}" for term in ("skip", "branch") for part in ("bias", "scale"))


def placement_of(name: str, **options: Any) -> AlgebraPlacement:
    placement = dataclasses.replace(PLACEMENTS[name], **options)
    assert isinstance(placement, AlgebraPlacement)
    return placement


@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_all_options_together_compute_the_formula(name: str) -> None:
    """`normlab verify` checks each of them alone."""
    placement = placement_of(name, branch_factor=0.22, branch_warmup=2, residual_affine=True)
    norm = NORMS["rmsnorm" if placement.has_norms(DEPTH) else "none"]()  # pyright: ignore[reportCallIssue]
    # Both sub-layers have their own vectors in each kind of block.
    for sub_layer in () if "F(" in placement.formula else ("attn_", "mlp_"):
        assert all(f"{sub_layer}{term}" in placement.formula for term in TERMS)
    check = formula_check(build_small(small_config(norm, placement, depth=DEPTH)), name)
    assert check.passed, check.result


@pytest.mark.parametrize("name", ["pre", "rezero", "depth_scaled_sandwich"])
def test_declarations_of_rows_with_the_options_hold(name: str) -> None:
    """Names and initial values of all parameters, and which blocks have a factor."""
    placement = placement_of(name, branch_factor=0.22, residual_affine=True)
    checks = [*wiring_check(placement, name), *factor_check(placement, name)]
    assert [check for check in checks if not check.passed] == []


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (
            "f = F(N(x)); x = x + f",
            "f = F(N(x)); x = (x + skip_bias) * skip_scale + (f + branch_bias) * branch_scale",
        ),
        (
            "x = 2 * x - (-0.5 * F(N(x)))",
            "x = (2 * x + skip_bias) * skip_scale + (-(-0.5 * F(N(x))) + branch_bias) * branch_scale",
        ),
        (
            "x = (4 * x + F(N(x))) / 2",
            "x = (4 * x / 2 + skip_bias) * skip_scale + (F(N(x)) / 2 + branch_bias) * branch_scale",
        ),
        (
            "x = 2 * (x + F(N(x)))",
            "x = (2 * x + skip_bias) * skip_scale + (2 * F(N(x)) + branch_bias) * branch_scale",
        ),
        (
            "y = x; x = y + F(N(x))",
            "y = x; x = (y + skip_bias) * skip_scale + (F(N(x)) + branch_bias) * branch_scale",
        ),
        (
            "f = A(N(x)); x = x + f; f = x; x = f + M(N(f))",
            "f = A(N(x)); x = (x + attn_skip_bias) * attn_skip_scale + (f + attn_branch_bias) * attn_branch_scale; "
            "f = x; x = (f + mlp_skip_bias) * mlp_skip_scale + (M(N(f)) + mlp_branch_bias) * mlp_branch_scale",
        ),
        ("x = x - -F(N(x))", "x = (x + skip_bias) * skip_scale + (--F(N(x)) + branch_bias) * branch_scale"),
        ("x = -(-x - F(N(x)))", "x = (--x + skip_bias) * skip_scale + (--F(N(x)) + branch_bias) * branch_scale"),
        # Formulas without such a sum.
        ("x = N(F(x))", "x = N(F(x))"),
        ("x = tanh(x + F(N(x)))", "x = tanh(x + F(N(x)))"),
        ("F(x)", "F(x)"),
        ("x = +", "x = +"),
    ],
)
def test_affine_is_put_on_both_terms_of_a_sum(formula: str, expected: str) -> None:
    from normlab.catalogue.placements.formula_rewriting import with_affine

    assert with_affine(formula) == expected


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("x = x + F(N(x))", "x = x + F(N(x)) * g"),
        ("x = x + 2 * F(N(x))", "x = x + 2 * F(N(x)) * g"),
        ("f = F(x); x = N(x + f)", "f = F(x) * g; x = N(x + f)"),
        # A number times a sum with a sub-layer, on either side.
        ("x = x / 2 + 0.5 * (x + F(N(x)))", "x = x / 2 + 0.5 * (x + F(N(x)) * g)"),
        ("x = (x - F(N(x))) * 0.5 + x / 2", "x = (x - F(N(x)) * g) * 0.5 + x / 2"),
        ("x = 0.5 * (x + F(N(x)))", "x = 0.5 * (x + F(N(x)) * g)"),
        ("x = x / 2 + (x + F(N(x))) / 2", "x = x / 2 + (x + F(N(x)) * g) / 2"),
        # Other products are terms themselves.
        ("x = x + F(N(x)) * (1 + x)", "x = x + F(N(x)) * (1 + x) * g"),
        ("x = x + (1 + x) * F(N(x))", "x = x + (1 + x) * F(N(x)) * g"),
        ("x = x + (x + F(N(x))) * F(x)", "x = x + (x + F(N(x))) * F(x) * g"),
        ("x = x + F(x) * (x + F(N(x)))", "x = x + F(x) * (x + F(N(x))) * g"),
        ("x = x + 1 / (x + F(N(x)))", "x = x + 1 / (x + F(N(x))) * g"),
        ("x = x + (x + F(N(x))) ** 2", "x = x + (x + F(N(x))) ** 2 * g"),
        ("x = +", "x = +"),
    ],
)
def test_a_factor_is_put_on_what_sub_layers_add(formula: str, expected: str) -> None:
    from normlab.catalogue.placements.formula_rewriting import with_factor

    assert with_factor(formula, "g") == expected


def test_sub_layers_of_formulas_are_those_of_verify() -> None:
    of_verify = {function: SUB_LAYER_OF.get(function, "") for function in SUB_LAYERS}
    assert of_verify == SUB_LAYERS


def test_a_run_without_the_options_keeps_its_id() -> None:
    placement = composed().identity()["placement"]
    assert not {"branch_factor", "residual_affine"} & placement.keys()
    for options in ({"branch_factor": 0.5}, {"residual_affine": True}):
        config = dataclasses.replace(composed(), placement=placement_of("pre", **options))
        assert config.identity()["placement"] == placement | {"name": "pre"} | options


def test_defaults_add_no_tensor() -> None:
    model = build_model(config_of(placement_of("pre")), VOCAB)
    assert not any("wiring" in name for name, _ in model.named_buffers())
    assert not any(name.endswith(TERMS) for name, _ in model.named_parameters())
    same = config_of(placement_of("pre", branch_factor=1.0, residual_affine=False))
    assert fingerprint(same) == fingerprint(config_of(placement_of("pre")))


@pytest.mark.parametrize("options", [{"branch_factor": 0.5}, {"residual_affine": True}, {"branch_warmup": 3}], ids=str)
def test_a_changed_sum_is_neither_plain_nor_free(options: dict[str, Any]) -> None:
    assert placement_of("pre").has_free_branches
    placement = placement_of("pre", **options)
    assert not placement.is_plain_sum
    assert not placement.has_free_branches
    assert placement.has_standard_matrices


def test_options_have_an_effect_without_norms() -> None:
    for option in ("branch_factor=0.5", "residual_affine=true"):
        compose_run(["norm=none", "placement=pre", f"placement.{option}"]).reject_unused_options()
    # The factor does not hide that another option has no effect.
    overrides = ["norm=none", "placement=keel", "placement.first_block=pre", "placement.branch_factor=0.5"]
    with pytest.raises(ConfigError, match=r"placement\.first_block=pre: has no effect with norm=none"):
        compose_run(overrides).reject_unused_options()
    with pytest.raises(ConfigError, match="must be greater than 0"):
        compose_run(["placement=pre", "placement.branch_factor=0"])


def test_vectors_are_scalars_and_biases_of_the_optimiser() -> None:
    model = build_model(config_of(placement_of("rezero", residual_affine=True)), VOCAB)
    groups = {name: group for name, group in groups_of(model).items() if name.endswith(TERMS)}
    assert len(groups) == 8 * len(model.blocks)  # also of the MLP, which shares its factor with attention
    for name, group in groups.items():
        assert group == ("biases" if name.endswith("_bias") else "scalars")
        assert composed().optim.of_group(group).weight_decay == 0


def wiring_of(layer: int = 0) -> nn.Module:
    """Return the wiring of a block with a factor and vectors that differ between blocks."""
    placement = placement_of("pre", branch_factor=0.5, residual_affine=True)
    wiring = placement.wire(layer, DEPTH, WIDTH, lambda width, site: RMSNormConfig(name="rmsnorm").build(width))
    generator = torch.Generator().manual_seed(layer)
    with torch.no_grad():
        for parameter in wiring.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return wiring


def test_vectors_keep_the_dtype_of_the_stream() -> None:
    wiring, x_BTD = wiring_of(), torch.ones(1, 2, WIDTH)
    tanh = partial(Branch, torch.tanh)
    assert wiring(x_BTD.bfloat16(), tanh(), tanh()).dtype == torch.bfloat16
    # Under autocast sub-layers give bfloat16, of 8 digits; the stream and the vectors have 24.
    rounded = [Branch(lambda x: torch.tanh(x).bfloat16()) for _ in range(2)]
    actual = wiring(x_BTD, *rounded)
    expected = wiring(x_BTD, *(Branch(lambda x: torch.tanh(x).bfloat16().float()) for _ in range(2)))
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, actual.bfloat16().float())
    for branch in rounded:
        assert branch.last_update is not None
        assert branch.last_update.dtype == torch.float32


def test_vectors_under_vmap_equal_those_of_each_run() -> None:
    wirings = [wiring_of(layer) for layer in range(DEPTH)]
    x_RBTD = torch.randn(DEPTH, 2, 4, WIDTH, generator=torch.Generator().manual_seed(0))
    states = [wiring.state_dict() for wiring in wirings]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}

    def forward(tensors: dict[str, Tensor], x_BTD: Tensor) -> Tensor:
        return functional_call(wirings[0], tensors, (x_BTD, Branch(torch.tanh), Branch(torch.tanh)))

    y_RBTD = vmap(forward)(stacked, x_RBTD)
    assert y_RBTD.dtype == torch.float32
    for run, wiring in enumerate(wirings):
        assert_equal(y_RBTD[run], wiring(x_RBTD[run], Branch(torch.tanh), Branch(torch.tanh)), terms=WIDTH)


# ZAYA1, with other sub-layers: its attention has convolutions, and its MLP is a mixture of experts.


@pytest.fixture
def _float64() -> Iterator[None]:
    with float32_as_float64():
        yield


class FirstOfTwo(nn.Module):
    """A sub-layer with the arguments and results of ZAYA1's."""

    def __init__(self, sub_layer: nn.Module):
        super().__init__()
        self.sub_layer = sub_layer

    def forward(self, hidden_states: Tensor, *args: object, **options: object) -> tuple[Tensor, None]:
        return self.sub_layer(hidden_states), None


THEIR_NAMES = {
    f"{ours}.{term}": f"{theirs}.{name}"
    for ours, theirs in (("attn", "post_attention_residual_scale"), ("mlp", "post_mlp_residual_scale"))
    for term, name in {
        "skip_bias": "residual_bias",
        "skip_scale": "residual_scale",
        "branch_bias": "hidden_states_bias",
        "branch_scale": "hidden_states_scale",
    }.items()
} | {
    "attn.norms.in.affine.gain": "input_layernorm.weight",
    "mlp.norms.in.affine.gain": "post_attention_layernorm.weight",
}


@pytest.mark.usefixtures("_float64")
@pytest.mark.skipif(not hasattr(transformers, "ZayaForCausalLM"), reason="transformers has no ZAYA")
def test_sums_equal_those_of_the_blocks_of_zaya() -> None:
    """Outputs, and the gradients of each vector, of the norms and of the input, of blocks one after the other."""
    from transformers.models.zaya.modeling_zaya import ZayaDecoderLayer

    size: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = transformers.ZayaConfig(**size, head_dim=WIDTH // 2, rms_norm_eps=1e-5)
    placement = placement_of("pre", residual_affine=True)
    norm = RMSNormConfig(name="rmsnorm", eps=1e-5)
    generator = torch.Generator().manual_seed(1)
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    x_BTD = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    y_BTD = z_BTD = x_BTD
    for layer in range(DEPTH):
        sub_layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(2)]
        wiring = placement.wire(layer, DEPTH, WIDTH, lambda width, site: norm.build(width)).double()
        block: Any = ZayaDecoderLayer(config, layer)
        block.self_attn, block.mlp = map(FirstOfTwo, copy.deepcopy(sub_layers))
        block = block.double()
        values = dict(wiring.named_parameters())
        assert values.keys() == THEIR_NAMES.keys()
        with torch.no_grad():
            for name, value in values.items():
                value.copy_(1 + 0.3 * torch.randn(WIDTH, dtype=torch.float64, generator=generator))
                block.get_parameter(THEIR_NAMES[name]).copy_(value)
        ours += values.values()
        theirs += [block.get_parameter(THEIR_NAMES[name]) for name in values]
        y_BTD = wiring(y_BTD, *map(Branch, sub_layers))
        z_BTD, _ = block(z_BTD)
    assert_equal(y_BTD, z_BTD, terms=WIDTH, layers=DEPTH)
    weights_BTD = torch.randn(y_BTD.shape, dtype=torch.float64, generator=generator)
    actual = torch.autograd.grad((y_BTD * weights_BTD).sum(), [x_BTD, *ours])
    expected = torch.autograd.grad((z_BTD * weights_BTD).sum(), [x_BTD, *theirs])
    for gradient, of_zaya in zip(actual, expected, strict=True):
        assert float(of_zaya.abs().max()) > 1e-3
        assert_equal(gradient, of_zaya, terms=10 * WIDTH, layers=DEPTH)
