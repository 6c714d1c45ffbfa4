"""Recipes of the blocks of decoders: each of their settings changes what the model computes.

`test_architectures.py` compares the models of these recipes with the decoders of transformers. Here each setting is
left out or changed, one at a time, so that a setting which that comparison could not see would be found.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch import Tensor

from normlab.base.errors import ConfigError
from normlab.base.paths import config_dir
from normlab.config.compose import compose_run
from normlab.config.references import divide, power
from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT
from support.architectures.architecture import DEPTH, STEPS, TERMS, Architecture
from support.architectures.recipes import RECIPES, recipe_of
from support.tolerance import assert_equal, rounding
from support.transformers_models import VOCAB, config_of, randomised

OTHER = {
    "rope": "learned", "swiglu": "gelu", "relu2": "gelu", "head": "full", "full": "head", "channel": "head",
    "gatednorm": "none", "1:": "0:", "hy4": "marin", "l2norm": "scalenorm",
}  # fmt: skip
"""Another value of each option that is a text."""
UNCHANGED = {"nanochat": {"model.qk_norm_after_rope"}, "zaya1": {"qk.eps", "no qk.eps"}}
"""Settings of a recipe that change only the rounding here.

RoPE rotates, and the RMS norm of nanochat has no gain. The smallest divisor of ZAYA1 is for queries and keys that are
shorter, which `test_queries_and_keys_of_zaya1` has.
"""


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if value is None:  # a radius of sqrt(K)
        return 1.0
    if isinstance(value, str):
        return OTHER[value]
    return value + 1 if isinstance(value, int) else 1.01 * value


def changed_sites(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield the config without each setting of `norm.at`, and with another value of it."""
    for key, value in config.norm.at.items():
        fewer = {name: each for name, each in config.norm.at.items() if name != key}
        for name, at in ((f"no {key}", fewer), (key, config.norm.at | {key: changed(value)})):
            yield name, dataclasses.replace(config, norm=dataclasses.replace(config.norm, at=at))


def changed_options(config: RunConfig, recipe: str) -> Iterator[tuple[str, RunConfig]]:
    """Yield the config with another value of each option of the block that the recipe sets."""
    sets = yaml.safe_load((config_dir() / "recipe" / f"{recipe}.yaml").read_text())
    for section in ("norm", "placement", "model"):
        part = getattr(config, section)
        for name in sets.get(section, {}).keys() - {"at"}:
            value = changed(getattr(part, name))
            if name == "rope_fraction":
                value = 2 * getattr(part, name)  # a hundredth more rounds to the same number of channels
            other: Any = dataclasses.replace(part, **{name: value})
            yield f"{section}.{name}", dataclasses.replace(config, **{section: other})


def with_weights(config: RunConfig, weights: Mapping[str, Tensor]) -> GPT:
    """Return the model with these weights; those that it has in addition are random."""
    model = randomised(config, torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in weights and weights[name].shape == parameter.shape:
                parameter.copy_(weights[name])
    return model


@pytest.mark.parametrize("row", RECIPES, ids=recipe_of)
def test_each_setting_of_a_recipe_changes_the_logits(row: Architecture) -> None:
    config = config_of(f"model.depth={DEPTH}", *row.overrides.split())
    model, tokens = randomised(config, torch.float64), torch.arange(STEPS)[None] % VOCAB
    weights, logits = dict(model.named_parameters()), model(tokens)
    tolerance = rounding(torch.float64, TERMS, DEPTH + 1) * logits.abs().max()
    cases = [*changed_sites(config), *changed_options(config, recipe_of(row))]
    unchanged: set[str] = set()
    for name, other in cases:
        try:
            others = with_weights(other, weights)(tokens)
        except ConfigError:
            # Another setting of the site is an option of the norm that is left out.
            assert name.startswith("no ")
            continue
        if (others - logits).abs().max() <= tolerance:
            unchanged.add(name)
    assert len(cases) > 3
    assert unchanged == UNCHANGED.get(recipe_of(row), set())


def test_the_table_of_decoders_has_each_recipe() -> None:
    table = (Path(__file__).parents[2] / "results" / "decoders.md").read_text()
    for row in RECIPES:
        assert f"| {row.name} | {row.transformers_class} | `normlab train recipe={recipe_of(row)}` |" in table
    differences = [float(text) for text in re.findall(r"\d\.\de-\d+", table)]
    assert len(differences) == 2 * len(RECIPES)
    assert max(differences) < 1e-10


def test_sites_of_recipes() -> None:
    """The settings by site, once more: a recipe that lost one would lose its mutant, too."""
    at = {recipe_of(row): compose_run([f"recipe={recipe_of(row)}"]).norm.at for row in RECIPES}
    assert {recipe: settings for recipe, settings in at.items() if settings} == {
        "muse_glimmer": {
            "input.unit_offset": True, "output.unit_offset": True, "output.eps": 1e-8, "qk.gain": False,
            "embedding.gain": False,
        },
        "axk2": {"input_attn": "gatednorm", "input_mlp": "gatednorm", "input_mlp.layers": "1:"},
        "zaya1": {"qk": "l2norm", "qk.radius": None, "qk.eps": 2**-23, "k.learn_radius": True},
    }  # fmt: skip


def test_numbers_of_recipes_are_those_of_the_classes() -> None:
    """The rows of `support.architectures.recipes` give the classes these numbers, which are their defaults."""
    for recipe, kind in (("qwen3_8_flash", "Qwen4ExpTextConfig"), ("hy4", "HYV4Config"), ("zaya1", "ZayaConfig")):
        if not hasattr(transformers, kind):
            pytest.skip(f"transformers {transformers.__version__} has no {kind}")
        ours, theirs = compose_run([f"recipe={recipe}"]), getattr(transformers, kind)()
        assert ours.norm.eps == theirs.rms_norm_eps  # pyright: ignore[reportAttributeAccessIssue]
        assert ours.model.tie_embeddings == theirs.tie_word_embeddings
        assert ours.model.bias == theirs.attention_bias
        assert theirs.hidden_act == "silu"
        match recipe:
            case "qwen3_8_flash":
                assert ours.placement.streams == theirs.hc_count  # pyright: ignore[reportAttributeAccessIssue]
            case "hy4":
                assert ours.placement.streams == theirs.hc_mult  # pyright: ignore[reportAttributeAccessIssue]
                assert ours.model.rope_fraction == theirs.qk_rope_head_dim / theirs.qk_head_dim
            case _:
                rotation = theirs.rope_parameters["hybrid"]
                assert ours.model.rope_theta == rotation["rope_theta"]
                assert ours.model.rope_fraction == rotation["partial_rotary_factor"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_queries_and_keys_of_zaya1(dtype: torch.dtype) -> None:
    """Outputs and gradients, also of vectors shorter than the smallest divisor, which in theirs is by dtype."""
    zaya = pytest.importorskip("transformers.models.zaya.modeling_zaya", reason="transformers has no ZAYA")
    heads, width = 2, 16
    eps = torch.finfo(dtype).eps
    overrides = ["recipe=zaya1"]
    if dtype != torch.float32:  # for which the recipe has it
        overrides.append(f"norm.at.qk.eps={eps}")
    config = compose_run(overrides)
    norms = {site: config.norm_at(site).build(width).to(dtype) for site in ("q", "k")}
    theirs = zaya.ZayaQKNorm(zaya.ZayaConfig(head_dim=width, num_key_value_heads=heads)).to(dtype)
    radius = norms["k"].get_parameter("radius")
    assert radius.item() == width**0.5
    with torch.no_grad():
        radius.mul_(0.7)
        theirs.temp.fill_(0.7)
    generator = torch.Generator().manual_seed(0)
    lengths_T = torch.tensor([0, 1e-3, 0.5, 1.5, 1e3, 1 / eps], dtype=torch.float64) * eps
    x_BTHK = torch.randn(3, len(lengths_T), heads, width, dtype=torch.float64, generator=generator)
    x_BTHK = (x_BTHK / x_BTHK.norm(dim=-1, keepdim=True) * lengths_T[:, None, None]).to(dtype).requires_grad_()
    weights_BTHK = torch.randn(x_BTHK.shape, generator=generator).to(dtype)
    ours = {site: norm(x_BTHK) for site, norm in norms.items()}
    expected = dict(zip(("q", "k"), theirs(x_BTHK, x_BTHK), strict=True))
    for site in ("q", "k"):
        assert_equal(ours[site], expected[site], terms=width)
        grads = [
            torch.autograd.grad((y[site] * weights_BTHK).sum(), x_BTHK, retain_graph=True) for y in (ours, expected)
        ]
        # Each length has gradients of its own size.
        for step in range(len(lengths_T)):
            assert_equal(grads[0][0][:, step], grads[1][0][:, step], terms=width, layers=2)
    (of_radius,) = torch.autograd.grad((ours["k"] * weights_BTHK).sum(), radius)
    (of_heads,) = torch.autograd.grad((expected["k"] * weights_BTHK).sum(), theirs.temp)
    # One radius is in place of the temperatures of all heads.
    assert_equal(of_radius * width**0.5, of_heads.sum(), terms=x_BTHK.numel())


@pytest.mark.parametrize(("width", "heads"), [(128, 4), (640, 10), (2560, 8)])
def test_recipes_follow_the_size_of_the_model(width: int, heads: int) -> None:
    size = [f"model.width={width}", f"model.heads={heads}"]
    model = compose_run(["recipe=gemma4", *size]).model
    assert model.qk_scale == pytest.approx((width // heads) ** 0.25, rel=1e-15)
    assert model.embed_scale == pytest.approx(width**0.5, rel=1e-15)
    placement = compose_run(["recipe=qwen3_8_flash", *size]).placement
    assert placement.rank == {128: 16, 640: 80, 2560: 320}[width]  # pyright: ignore[reportAttributeAccessIssue]
    # The command's own value is stronger, also where the size is one that has no factor.
    assert compose_run(["recipe=gemma4", *size, "model.embed_scale=2"]).model.embed_scale == 2


def test_functions_of_references_give_a_number_that_no_option_takes_where_they_have_none() -> None:
    assert (power(9, 0.5), power(4, -1), divide(20, 8), divide(7, 2), divide(3, 8)) == (3.0, 0.25, 2, 3, 1)
    for base, exponent in ((10, 10**9), (-8, 0.5), (0, -1), ("x", 2), (None, 2), ([], 2)):
        assert math.isnan(power(base, exponent))  # pyright: ignore[reportArgumentType]
    assert divide(-8, 8) == 1
    for number, divisor in ((8, 0), ("x", 2), (8, None), (float("inf"), 1)):
        assert divide(number, divisor) == 0  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        ("gemma4", "model.width=0", "model.width=0: must be at least 1"),
        ("gemma4", "model.width=-8", "model.width=-8: must be at least 1"),
        ("gemma4", "model.heads=0", "model.heads=0: must be at least 1"),
        ("gemma4", "model.heads=3", "model.heads=3: does not divide model.width=128"),
        ("gemma4", "model.width=x", "model.width=x: must be a whole number"),
        ("qwen3_8_flash", "model.width=-8", "model.width=-8: must be at least 1"),
    ],
)
def test_errors_of_a_size_are_those_without_a_recipe(recipe: str, overrides: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_run([f"recipe={recipe}", *overrides.split()])
    assert str(error.value).startswith(said)
    assert "recipe=" not in str(error.value)
