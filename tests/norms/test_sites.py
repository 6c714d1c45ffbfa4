"""Norms by site: which norm `norm.at` puts where, and that it changes nothing else."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from normlab.analysis.settings import setting
from normlab.base.errors import ConfigError
from normlab.catalogue.placements.base import load_all
from normlab.catalogue.sites import SITES, parts_of
from normlab.config.compose import UserConfigs, compose_run
from normlab.config.recorded import config_from_record, parse_config
from normlab.config.schema import RunConfig
from normlab.model.fingerprint import fingerprint
from normlab.model.groups import groups_of
from normlab.model.init import build_model
from normlab.model.small import VOCAB, build_small, shrink, tokens
from normlab.verify.norms_by_site import norms_by_site

NANO = ("model=gpt2_nano", "train.steps=0")


def config_with(*overrides: str) -> RunConfig:
    return compose_run([*NANO, *overrides])


def norms_of(*overrides: str) -> dict[tuple[str, str], str]:
    """Return the norm of each site by its site and its blocks."""
    rows = norms_by_site(config_with(*overrides))
    return {(row["site"], row["blocks"]): row["norm"] for row in rows}


def test_the_narrower_site_wins_and_another_norm_has_its_own_defaults() -> None:
    options = ("norm.at.input.eps=1e-3", "norm.at.input_mlp.eps=1e-4", "norm.at.final=layernorm")
    assert norms_of("norm=rmsnorm", "norm.bias=true", "placement=peri", *options) == {
        ("input_attn", "all blocks"): "rmsnorm bias=true eps=0.001",
        ("input_mlp", "all blocks"): "rmsnorm bias=true eps=0.0001",
        ("output_attn", "all blocks"): "rmsnorm bias=true",
        ("output_mlp", "all blocks"): "rmsnorm bias=true",
        ("final", ""): "layernorm",
    }


def test_a_norm_of_a_narrower_site_takes_no_options_of_the_wider_one() -> None:
    norms = norms_of("norm=rmsnorm", "norm.at.input.eps=1e-3", "norm.at.input_attn=layernorm")
    assert norms[("input_attn", "all blocks")] == "layernorm"
    assert norms[("input_mlp", "all blocks")] == "rmsnorm eps=0.001"


def test_the_name_of_the_runs_norm_means_that_norm_with_its_options() -> None:
    norms = norms_of(
        "norm=rmsnorm", "norm.eps=1e-3", "norm.at.input=none", "norm.at.input_mlp=rmsnorm", "norm.at.final=rmsnorm",
        "norm.at.final.gain=false",
    )  # fmt: skip
    assert norms == {
        ("input_attn", "all blocks"): "none",
        ("input_mlp", "all blocks"): "rmsnorm eps=0.001",
        ("final", ""): "rmsnorm gain=false eps=0.001",
    }


@pytest.mark.parametrize(
    ("layers", "blocks"),
    [("1:", "blocks 1, 2, 3"), ("::2", "blocks 0, 2"), ("3", "block 3"), ("-1", "block 3"), (":1", "block 0")],
)
def test_layers_select_blocks(layers: str, blocks: str) -> None:
    norms = norms_of("norm=rmsnorm", "model.depth=4", "norm.at.input_mlp=none", f"norm.at.input_mlp.layers='{layers}'")
    assert norms[("input_mlp", blocks)] == "none"
    assert {norm for (site, _), norm in norms.items() if site == "input_attn"} == {"rmsnorm"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("norm.at.fnal=none", "norm.at.fnal: unknown site 'fnal' (did you mean 'final'?): choose one of "),
        (
            "norm.at.q=none",
            "norm.at.q=none: the model has no norm at q, and norm.at adds none; it has norms at input, ",
        ),
        ("norm.at.input=none placement=parallel norm.at.input_mlp.eps=1", "the model has no norm at input_mlp"),
        ("norm.at.final=none placement=post", "no norm at final, and norm.at adds none; it has norms at residual, "),
        ("norm.at.final.epz=1", "norm.at.final.epz=1: of norm=rmsnorm there: unknown option 'epz' (did you mean 'eps'"),
        ("norm.at.final=none norm.at.final.eps=1", "norm.at.final.eps=1: of norm=none there: it has no options"),
        ("norm.at.final.eps=x", "norm.at.final.eps=x: must be a number"),
        ("norm.at.final.eps=-1", "norm.at.final.eps=-1.0: must be at least 0"),
        ("norm.at.final.eps_mode=insde_ms", "norm.at.final.eps_mode=insde_ms (did you mean 'inside_ms'?): choose one "),
        (
            "norm.at.final=rmsnorm_gemma",
            "is a preset, and a site has a norm; write norm.at.final=rmsnorm norm.at.final.",
        ),
        ("norm.at.final=rmsnrm", "norm.at.final=rmsnrm: unknown norm 'rmsnrm' (did you mean 'rmsnorm'?)"),
        ("norm.at.final=[1]", "norm.at.final=[1]: unknown norm '[1]'"),
        ("norm.at.input.layers='1:'", "norm.at.input.layers='1:': selects blocks for no setting; add norm"),
        ("norm.at.input=none norm.at.input.layers=2", "layers='2': no block or slice of model.depth=2 blocks"),
        ("norm.at.input=none norm.at.input.layers='2:'", "layers='2:': selects none of model.depth=2 blocks"),
        ("norm.at.input=none norm.at.input.layers=x", "layers='x': no block or slice of model.depth=2 blocks"),
        ("norm.at.final=none norm.at.final.layers=1", "norm.at.final.layers='1': final is not in the blocks"),
        (
            "norm.at.final.unit_offset=true norm.at.final.gain=false",
            "norm.at.final.unit_offset=true: has no effect with",
        ),
        ("norm.at=none", "norm.at is a section; set norm.at.final=NORM, for example"),
        ("norm.at.output=none placement=depth_scaled_sandwich", "norm.at.output_attn=none: has no gain per channel, b"),
        ("norm.at.final=groupnorm model.width=30 model.heads=2", "norm.at.final.groups=4: does not divide"),
        ("norm.at.final.gain=null", "norm.at.final.gain=null: must be true or false"),
        ("norm.at.final=true", "norm.at.final=true: unknown norm 'true'"),
        ("norm.at.q.gain=false", "norm.at.q.gain=false: the model has no norm at q"),
    ],
)
def test_settings_that_change_nothing_are_errors(overrides: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_with("norm=rmsnorm", *overrides.split())
    assert said in str(error.value)


def test_no_norm_at_the_end_is_the_placement_without_it() -> None:
    left_out, none = config_with("placement.final_norm=false"), config_with("norm.at.final=none")
    logits = [build_small(shrink(config)).gpt(tokens()) for config in (left_out, none)]
    assert torch.equal(*logits)
    assert fingerprint(left_out) == fingerprint(none)


def test_one_norm_at_each_site_is_one_norm_for_the_run() -> None:
    """Whatever the run's norm is; and a run's parameters are drawn as before."""
    overrides = [f"norm.at.{site}=gatednorm" for site in ("input", "output", "final")]
    by_site = build_model(config_with("norm=none", "placement=peri", *overrides), VOCAB)
    at_once = build_model(config_with("norm=gatednorm", "placement=peri"), VOCAB)
    assert groups_of(by_site) == groups_of(at_once)
    for (name, ours), (other, theirs) in zip(by_site.named_parameters(), at_once.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs)


def test_the_identity_knows_what_differs_and_nothing_else() -> None:
    plain = config_with("norm=rmsnorm")
    same = config_with("norm=rmsnorm", "norm.at.final=rmsnorm", "norm.at.input.eps=1e-6")
    assert "at" not in plain.identity()["norm"]
    assert same.config_hash == plain.config_hash
    changed = config_with("norm=rmsnorm", "norm.at.final.eps=1e-8", "norm.at.input.eps=1e-6")
    assert changed.identity()["norm"]["at"] == {"final.eps": 1e-8}
    assert changed.config_hash != plain.config_hash
    # One order, whatever the command has.
    pair = ("norm.at.final.eps=1e-8", "norm.at.input.eps=1e-8")
    hashes = {config_with("norm=rmsnorm", *order).config_hash for order in (pair, pair[::-1])}
    assert len(hashes) == 1


def test_an_option_that_only_the_norm_of_the_site_has_is_part_of_the_identity() -> None:
    ids = {
        config_with("norm=rmsnorm", "norm.at.input=groupnorm", f"norm.at.input.groups={groups}").config_hash
        for groups in (2, 4)
    }
    default = config_with("norm=rmsnorm", "norm.at.input=groupnorm").config_hash
    assert len(ids) == 2
    assert default in ids


def test_a_reader_takes_what_is_not_set_for_a_site_from_the_run() -> None:
    """So that a run without `norm.at` is in one cell with a run that names its norm for a site."""
    options = {
        "norm.name": "rmsnorm", "norm.preset": "rmsnorm_llama", "norm.eps": 1e-5, "norm.at.input.eps": 1e-3,
        "norm.at.output": "layernorm", "norm.at.final": "rmsnorm", "norm.at.q": "none",
    }  # fmt: skip
    run: Any = SimpleNamespace(options=options)
    expected = {
        "norm.at.final": "rmsnorm", "norm.at.residual": "rmsnorm", "norm.at.output_mlp": "layernorm",
        "norm.at.q": "none", "norm.at.k": "rmsnorm", "norm.at.input_attn.eps": 1e-3, "norm.at.final.eps": 1e-5,
        "norm.at.output.eps": None, "norm.at.q.eps": None, "norm.at.input.layers": None,
    }  # fmt: skip
    assert {option: setting(run, option) for option in expected} == expected


def test_a_record_has_the_settings() -> None:
    config = config_with("norm=rmsnorm", "norm.at.final.eps=1e-8", "norm.at.input_attn=none")
    tree = config.recorded()
    assert tree["norm"]["at"] == {"final.eps": 1e-8, "input_attn": "none"}
    assert config_from_record(tree | {"results_dir": "results"}).norm == config.norm
    assert parse_config(tree | {"results_dir": "results"}).norm.at == config.norm.at
    assert config_with("norm=rmsnorm").recorded()["norm"]["at"] == {}


def test_batch_statistics_of_one_site_are_those_of_the_run() -> None:
    config = config_with("norm=rmsnorm", "norm.at.final=batchnorm")
    assert config.batch_statistics
    assert config.measures_batches
    assert any("batchnorm" in text for text in config.warnings())
    assert not config_with("norm=batchnorm", "norm.at.input=rmsnorm", "norm.at.final=rmsnorm").batch_statistics


@pytest.mark.parametrize("placement", load_all())
def test_each_site_of_a_placement_is_in_the_table(placement: str) -> None:
    entry = load_all()[placement]
    sites = [*entry.end_sites()]
    for layer in range(3):
        sites += [*entry.wiring_sites(layer, 3), *entry.inner_sites(layer, 3)]
    # `input` is one norm for both sub-layers of a parallel block.
    assert set(sites) <= SITES.keys()
    assert all(parts_of(site) == [site] or site == "input" for site in sites)


@pytest.mark.exhaustive
def test_a_changed_site_changes_its_norms_only() -> None:
    """The logits change with each site of each placement, and the parameters of other sites keep their names."""
    for name, entry in load_all().items():
        if not entry.has_norms(3):
            continue
        plain = shrink(config_with("norm=rmsnorm", f"placement={name}", "model.depth=3"))
        for site in dict.fromkeys(placed.site for placed in plain.placed_norms):
            norm = dataclasses.replace(plain.norm, at={f"{site}.eps": 0.7})
            changed = dataclasses.replace(plain, norm=norm)
            logits = [build_small(config).gpt(tokens()) for config in (plain, changed)]
            assert not torch.equal(*logits), f"{name}: {site}"


SETTINGS = "at: {final.eps: 1e-3, input: layernorm, input.layers: '1:', output.eps: '${norm.eps}'}"
FILES = {
    "recipe/mine.yaml": (f"# @package _global_\nnorm: {{{SETTINGS}}}", ["recipe=mine"]),
    "experiment/mine.yaml": (f"# @package _global_\nnorm: {{{SETTINGS}}}", ["+experiment=mine"]),
    "norm/mine.yaml": (f"defaults: [rmsnorm, _self_]\npreset: mine\n{SETTINGS}", ["norm=mine"]),
    "train_mine.yaml": (f"defaults: [train, _self_]\nnorm: {{{SETTINGS}}}", []),
}
"""Config files of a user, and the overrides that choose them."""


def write_config(folder: Path, name: str, text: str) -> UserConfigs:
    """Write a config file into a folder; a file outside of a group is the primary config."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return UserConfigs(str(folder), "train" if "/" in name else path.stem)


@pytest.mark.parametrize("file", FILES)
def test_a_config_file_of_a_user_has_settings_by_site(file: str, tmp_path: Path) -> None:
    text, chosen = FILES[file]
    configs = write_config(tmp_path, file, text)
    at = {"final.eps": 1e-3, "input": "layernorm", "input.layers": "1:", "output.eps": 1e-6}
    command = [*chosen, "placement=peri"]
    assert compose_run(command, configs).norm.at == at
    # The command replaces a setting of the file, and adds one.
    more = ["norm.at.final.eps=1", "norm.at.output_mlp=none"]
    assert compose_run([*command, *more], configs).norm.at == at | {"final.eps": 1, "output_mlp": "none"}
    # The file's options and blocks of a site were for its norm.
    replaced = compose_run([*command, "norm.at.input=dyt"], configs).norm.at
    assert replaced == {"final.eps": 1e-3, "output.eps": 1e-6, "input": "dyt"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("{fnal.eps: 1}", "mine.yaml: norm.at.fnal.eps: unknown site 'fnal' (did you mean 'final'?): choose one of "),
        ("{fnal: none}", "mine.yaml: norm.at.fnal: unknown site 'fnal' (did you mean 'final'?): choose one of "),
        ("{1: none}", "mine.yaml: norm.at.1: unknown site '1'"),
        ("none", "mine.yaml: norm.at is a section; set its options one by one"),
        ("[final]", "mine.yaml: norm.at is a section; set its options one by one"),
        ("{final: {eps: 1}}", "mine.yaml: norm.at.final is no section; write one key for each option, as final.eps: 1"),
        ("{final.epz: 1}", "norm.at.final.epz=1: of norm=rmsnorm there: unknown option 'epz' (did you mean 'eps'?)"),
        ("{final.eps: null}", "norm.at.final.eps=null: Expected float, got null; set another value"),
        ("{final.eps: '???'}", "norm.at.final.eps"),
        ("{final.eps: '${norm.epz}'}", "this reference cannot be resolved; write ${model.width} for an option"),
        ("{output.eps: 1}", "norm.at.output.eps=1: the model has no norm at output, and norm"),
    ],
)
def test_a_wrong_setting_of_a_config_file_is_an_error_of_one_line(settings: str, said: str, tmp_path: Path) -> None:
    configs = write_config(tmp_path, "recipe/mine.yaml", f"# @package _global_\nnorm: {{at: {settings}}}")
    with pytest.raises(ConfigError) as error:
        compose_run(["recipe=mine", "norm=rmsnorm", "placement=pre"], configs)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        ("recipe=axk2 model.depth=1", "norm.at.input_mlp.layers"),
        ("recipe=muse_glimmer placement.embedding_norm=null", "norm.at.embedding.gain"),
        ("recipe=gemma4 model.qk_norm=off", "model.qk_scale"),
        ("recipe=zaya1 norm.at.k=rmsnorm model.qk_norm=off", "norm.at.qk"),
        ("recipe=hy4 placement=mhc", "placement.variant"),
        # The message is about the norm at a part of the site.
        ("recipe=muse_glimmer norm.at.output_mlp.gain=false", "norm.at.output.unit_offset"),
        # The message begins with an option of the command.
        ("recipe=gemma4 model.width=50 model.heads=2", "model.positions"),
    ],
)
def test_an_error_about_a_setting_of_a_recipe_names_it(overrides: str, setting: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_run(overrides.split())
    recipe = overrides.partition(" ")[0]
    assert str(error.value).count(recipe) == 1
    assert f" ({recipe} sets {setting}" in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ("recipe=zaya1 model.qk_norm=off", "norm.at.qk=null"),
        ("recipe=zaya1 model.qk_norm=off norm.at.qk=null", "norm.at.k=null"),
        ("recipe=hy4 model.positions=learned", "model.rope_theta=null"),
        ("recipe=hy4 model.positions=learned model.rope_theta=null", "model.rope_fraction=1.0"),
        ("recipe=muse_glimmer norm.at.output_mlp.gain=false", "norm.at.output=null"),
    ],
)
def test_an_error_about_a_setting_of_a_recipe_says_how_to_take_it_back(overrides: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_run(overrides.split())
    before = str(error.value)
    assert f"{remedy} takes back" in before or before.endswith(f"; the default is {remedy})")
    # With the remedy there is no error, or one about another setting.
    after = ""
    try:
        compose_run([*overrides.split(), remedy])
    except ConfigError as other:
        after = str(other)
    assert after != before


def test_null_takes_back_what_a_recipe_sets_at_a_site() -> None:
    plain = compose_run(["recipe=zaya1", "norm.at.qk=null", "norm.at.k=null"])
    assert plain.norm.at == {}
    assert compose_run(["norm.at.final=null"]).identity() == compose_run([]).identity()
    # An option may be null: this is no norm.
    assert (
        compose_run(["norm.at.qk=l2norm", "norm.at.qk.radius=null", "model.qk_norm=head"]).norm.at["qk.radius"] is None
    )


def test_an_error_names_the_recipe_of_a_user(tmp_path: Path) -> None:
    configs = write_config(tmp_path, "recipe/mine.yaml", "# @package _global_\nmodel: {value_residual: fixed}")
    with pytest.raises(ConfigError, match=r"^model\.value_residual=fixed: .* \(recipe=mine sets model\.value_resid"):
        compose_run(["recipe=mine", "model.depth=1"], configs)


@pytest.mark.parametrize(
    "overrides",
    [
        "recipe=axk2 norm.at.input_attn.layers=9:",
        "recipe=muse_glimmer norm.at.output={gain:false}",
        "recipe=muse_glimmer norm.at.output.gain=false norm.at.output_attn.unit_offset=true",
        "recipe=gemma4 model.qk_norm=off model.qk_scale=2",
        "recipe=olmo3 norm.eps=-1",
        "recipe=olmo3 norm={eps:-1}",
        "recipe=olmo3 placement=pre model.heads=5",
    ],
)
def test_an_error_about_a_setting_of_the_command_names_no_recipe(overrides: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_run(overrides.split())
    assert "recipe=" not in str(error.value)


def test_the_command_replaces_settings_of_a_recipe() -> None:
    at = compose_run(["recipe=muse_glimmer"]).norm.at
    changed = compose_run(["recipe=muse_glimmer", "norm.at.output.eps=1e-4", "norm.at.final.gain=false"]).norm.at
    assert changed == at | {"output.eps": 1e-4, "final.gain": False}
    replaced = compose_run(["recipe=muse_glimmer", "norm.at.output.gain=false", "norm.at.output=layernorm"]).norm.at
    kept = {key: value for key, value in at.items() if not key.startswith("output")}
    assert replaced == kept | {"output": "layernorm", "output.gain": False}
    assert compose_run(["recipe=axk2", "norm.at.input_mlp=none"]).norm.at == {
        "input_attn": "gatednorm", "input_mlp": "none",
    }  # fmt: skip
