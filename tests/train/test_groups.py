"""The group of every parameter, and what is printed of it against what the update uses."""

import re

import pytest

from normlab.base.errors import ConfigError
from normlab.catalogue.norms.base import load_all as load_norms
from normlab.catalogue.optimizers.options import GROUPS, OPTIMIZERS
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.model.groups import groups_of, parameter_rows
from normlab.model.init import build_model
from normlab.training.machine import check_run
from normlab.training.optim import families

NANO = ("model=gpt2_nano", "model.depth=3")


def composed(*overrides: str) -> RunConfig:
    try:
        return compose_run([*NANO, *overrides])
    except ConfigError:  # placements without norms
        return compose_run([*NANO, *overrides, "norm=none"])


CASES = [
    *(f"norm={name}" for name in load_norms()),
    *(f"placement={name}" for name in load_placements()),
    *(f"optim={name}" for name in OPTIMIZERS),
    "model.qk_norm=head", "model.tie_embeddings=false", "model=llama_nano",
    "model.scaling=mup", "model.scaling=completep",
]  # fmt: skip


@pytest.mark.few(12)
@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_in_one_group_and_in_one_family(case: str) -> None:
    config = composed(case, "optim.groups.matrices.lr=0.3", "optim.groups.embed.decay=0.2")
    groups = groups_of(model := build_model(config, 20))
    assert list(groups) == [name for name, _ in model.named_parameters()]
    assert set(groups.values()) <= set(GROUPS)
    made = families([config.optim], groups, config.model.factors_of)
    names = [name for family in made for name in family.names]
    assert sorted(names) == sorted(groups)
    # What is printed is what the update uses.
    printed = {}
    for row in parameter_rows(config, model):
        first, _, last = row.parameter.partition(".")[2].partition(".")[0].partition("-")
        blocks = range(int(first), int(last) + 1) if last else ()
        for name in [row.parameter.replace(f"{first}-{last}", str(block)) for block in blocks] or [row.parameter]:
            printed[name] = row.update, row.lr, row.decay, row.eps
    used = {}
    for family in made:
        (options,) = family.options
        constants = options.adam_constants
        eps = None if constants is None else constants[-1]
        used |= dict.fromkeys(family.decayed, (options.name, options.lr, options.weight_decay, eps))
        used |= dict.fromkeys(family.undecayed, (options.name, options.lr, 0.0, eps))
    assert printed == used


EXPECTED = {
    "placement=pre": {"wiring.attn.norms.in.affine.gain": "gains.input", "attn.q.bias": "biases"},
    "placement=post": {"wiring.mlp.norms.res.affine.gain": "gains.output", "mlp.down.weight": "matrices"},
    "placement=peri": {"wiring.attn.norms.out.affine.gain": "gains.output"},
    "placement=b2t": {"wiring.attn_norm.affine.gain": "gains.output"},
    "placement=parallel": {"wiring.norm.affine.gain": "gains.input"},
    "placement=resi_dual": {"wiring.mlp.norm.affine.gain": "gains.output"},
    "placement=hybridnorm": {"attn.norms.v.affine.gain": "gains.qk"},
    "placement=layerscale": {"wiring.attn.scale": "scalars"},
    "placement=normformer": {"attn.head_scale": "scalars", "mlp.norm.affine.gain": "gains.input"},
    "model.value_embed=true": {"attn.value_embed.weight": "embed", "attn.value_gate.weight": "matrices"},
    "model.value_residual=learned": {"attn.value_mix": "scalars"},
    "placement=x0_lambdas": {"wiring.r": "scalars"},
    "model.qk_norm=head": {"attn.qk_norms.k.affine.gain": "gains.qk"},
    "norm=dyt": {"wiring.attn.norms.in.alpha": "scalars", "wiring.attn.norms.in.affine.bias": "biases"},
    "norm=gatednorm": {"wiring.attn.norms.in.down": "norm_matrices"},
    "norm=scalenorm": {"wiring.attn.norms.in.radius": "gains.input"},
    "norm=ssnorm": {"wiring.attn.norms.in.scale": "gains.input"},
    "placement=hyper_connections": {"wiring.attn.mixing": "scalars", "wiring.attn.fn": "matrices"},
    "placement=mhc": {"wiring.attn.base": "scalars", "wiring.attn.fn.weight": "matrices"},
}


@pytest.mark.parametrize("case", EXPECTED)
def test_groups_of_named_parameters(case: str) -> None:
    groups = groups_of(build_model(composed(case), 20))
    found = {name: groups[f"blocks.2.{name}"] for name in EXPECTED[case]}
    assert found == EXPECTED[case]
    assert groups["embed.tokens.weight"] == groups["embed.positions.weight"] == "embed"
    assert {group for name, group in groups.items() if name.startswith("head.close") and name.endswith("gain")} <= {
        "gains.final"
    }


@pytest.mark.parametrize("group", ["head.lr=2", "gains.output.decay=0", "norm_matrices.lr=0"])
def test_options_of_a_group_without_parameters_are_rejected(group: str) -> None:
    config = compose_run([*NANO, f"optim.groups.{group}"])
    with pytest.raises(ConfigError, match=rf"^optim\.groups\.{group.rpartition('.')[0]}: the model has no ") as caught:
        check_run(config)
    check_run(compose_run([*NANO, f"optim.groups.{group}", str(caught.value).rpartition("; set ")[2]]))


def test_a_recipe_has_options_of_groups_that_a_model_may_lack() -> None:
    """The parameters of another placement have the learning rate that the recipe gives to all that are no matrices."""
    recipe = ["recipe=modded_track3", "model=llama_nano", "model.rope_fraction=0.5"]
    check_run(compose_run([*recipe, "norm=rmsnorm_nanochat"]))
    config = compose_run([*recipe, "norm=dyt", "placement=peri"])
    check_run(config)
    for group in ("gains.input", "gains.output", "gains.final", "biases", "scalars"):
        assert config.optim.of_group(group).lr == pytest.approx(0.015)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optim=hyperball", "init=nanochat"], "starts at 0"),
        (["optim=hyperball", "model.value_embed=true"], "value_gate.weight starts at 0"),
        (["optim=hyperball", "optim.qk_clip=1"], "contradicts optim=hyperball"),
        (
            ["model=llama_nano", "placement.embedding_norm=true", "model.embed_scale=4"],
            "embed_scale=4.0: has no effect",
        ),
        (["optim=sgd", "optim.weight_decay=0.1", "optim.decay_mode=cautious"], "decay_mode=cautious: optim=sgd adds"),
        (["optim.weight_decay=0", "optim.decay_mode=cautious"], "optim.decay_mode=cautious: has no effect"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_have_an_effect_is_rejected(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_run(compose_run([*NANO, *overrides]))


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.weight_decay=0", "optim.groups.embed.decay=0.1", "optim.decay_mode=cautious"],
        ["model=llama_nano", "model.width=100", "model.heads=2", "model.rope_fraction=0.28"],
        ["placement.embedding_norm=true", "model.embed_scale=4"],  # learned positions are added to the embeddings
    ],
    ids=" ".join,
)
def test_what_has_an_effect_is_accepted(overrides: list[str]) -> None:
    check_run(compose_run([*NANO, *overrides]))
