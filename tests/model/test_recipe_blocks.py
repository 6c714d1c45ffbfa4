"""Recipes of the blocks of decoders: each of their settings changes what the model computes.

`test_architectures.py` compares the models of these recipes with the decoders of transformers. Here each setting is
left out or changed, one at a time, so that a setting which that comparison could not see would be found.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from normlab.base.paths import config_dir
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT
from support.architectures.architecture import DEPTH, STEPS, TERMS, Architecture
from support.architectures.recipes import RECIPES, recipe_of
from support.tolerance import rounding
from support.transformers_models import VOCAB, config_of, randomised

OTHER = {
    "rope": "learned", "swiglu": "gelu", "relu2": "gelu", "head": "full", "full": "head", "channel": "head",
    "gatednorm": "none", "1:": "0:",
}  # fmt: skip
"""Another value of each option that is a text."""
COMMUTES = {"nanochat": {"model.qk_norm_after_rope"}}
"""Settings of a recipe that change only the rounding: RoPE rotates, and the RMS norm there has no gain."""


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return OTHER[value]
    return 1.01 * value


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
            other: Any = dataclasses.replace(part, **{name: changed(getattr(part, name))})
            yield f"{section}.{name}", dataclasses.replace(config, **{section: other})


def with_weights(config: RunConfig, weights: dict[str, Tensor]) -> GPT:
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
        if (with_weights(other, weights)(tokens) - logits).abs().max() <= tolerance:
            unchanged.add(name)
    assert len(cases) > 3
    assert unchanged == COMMUTES.get(recipe_of(row), set())


def test_sites_of_recipes() -> None:
    """The settings by site, once more: a recipe that lost one would lose its mutant, too."""
    at = {recipe_of(row): compose_run([f"recipe={recipe_of(row)}"]).norm.at for row in RECIPES}
    assert {recipe: settings for recipe, settings in at.items() if settings} == {
        "muse_glimmer": {
            "input.unit_offset": True, "output.unit_offset": True, "output.eps": 1e-8, "qk.gain": False,
            "embedding.gain": False,
        },
        "axk2": {"input_attn": "gatednorm", "input_mlp": "gatednorm", "input_mlp.layers": "1:"},
    }  # fmt: skip


def test_factors_of_gemma_4_are_those_of_the_default_size() -> None:
    model = compose_run(["recipe=gemma4"]).model
    assert model.qk_scale == pytest.approx((model.width // model.heads) ** 0.25, rel=1e-15)
    assert model.embed_scale == pytest.approx(model.width**0.5, rel=1e-15)
