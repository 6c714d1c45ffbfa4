"""Recipes of conf/recipe against the public code that they are from: init, options and updates of each parameter.

Recipes of the blocks of decoders set no optimiser. `tests/model/test_recipe_blocks.py` compares them.

`scripts/prove/record_recipes.py` has run that code and written recipes.json, which names the commits.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from normlab.base.errors import ConfigError
from normlab.base.paths import config_dir
from normlab.config.compose import compose_run
from normlab.model.groups import groups_of
from normlab.model.init import build_model, drawn_weights, standard_deviation
from normlab.training.optim import Optimizer, hyperparameters_at
from support.architectures.recipes import RECIPES, recipe_of
from support.drawn_updates import STEPS, drawn_gradients, drawn_start, sums_of

RECORDED = json.loads((Path(__file__).parent / "recipes.json").read_text())
DEPTH, WIDTH, VOCAB = 2, 768, 60
LEFT_OUT = {"nanochat": set(), "modded_track3": {"proj.bias"}}
"""Parameters of the public code that our models do not have: the bias of the head."""
FROZEN = {"nanochat": set(), "modded_track3": {"attn.qk_norms.q.affine.gain", "attn.qk_norms.k.affine.gain"}}
"""Parameters of our models that the public code does not have. They start at 1, and stay there."""


@pytest.mark.parametrize("recipe", RECORDED)
def test_a_recipe_trains_each_parameter_as_its_source(recipe: str) -> None:
    config = compose_run([f"recipe={recipe}", f"model.depth={DEPTH}", "model.context=8"])
    assert (config.model.width, config.model.heads) == (WIDTH, 6)
    model = build_model(config, VOCAB)
    theirs = RECORDED[recipe]["parameters"]
    groups, weights, parameters = groups_of(model), drawn_weights(model), dict(model.named_parameters())
    frozen = {name for name in parameters if name.endswith(tuple(FROZEN[recipe]))}
    assert parameters.keys() - frozen == theirs.keys() - LEFT_OUT[recipe]
    for name in frozen:
        assert config.optim.of_group(groups[name]).lr == 0
        assert parameters[name].eq(1).all()
    for name in parameters.keys() - frozen:
        row, own, p = theirs[name], config.optim.of_group(groups[name]), parameters[name].detach()
        ours: dict[str, Any] = {
            "shape": list(p.shape), "update": own.name, "lr": pytest.approx(own.lr),
            "decay": pytest.approx(own.weight_decay),
        }  # fmt: skip
        if own.name == "adamw":
            ours |= {"betas": [own.beta1, own.beta2], "eps": own.eps}  # pyright: ignore[reportAttributeAccessIssue]
        else:
            ours["momentum"] = own.momentum  # pyright: ignore[reportAttributeAccessIssue]
        std = standard_deviation(config.init_rule, weights[name]) if name in weights else None
        # Theirs is that of the drawn numbers.
        ours["sd"] = pytest.approx(0 if std is None else std, rel=6 / math.sqrt(2 * p.numel()))
        ours["mean"] = pytest.approx(p.mean().item() if std is None else 0, abs=0.03)
        assert row == ours, name


@pytest.mark.parametrize("recipe", RECORDED)
def test_updates_of_a_recipe_are_those_of_its_source(recipe: str) -> None:
    recorded = RECORDED[recipe]
    constant = ["optim.schedule=constant", "optim.decay_fraction=null"]
    config = compose_run([f"recipe={recipe}", "model=llama_nano", f"model.depth={DEPTH}", *constant])
    groups = groups_of(build_model(config, VOCAB))
    start = drawn_start({name: row["shape"] for name, row in recorded["parameters"].items()})
    params = {name: p.clone() for name, p in start.items() if name not in LEFT_OUT[recipe]}
    optimizer = Optimizer([config.optim], params, {name: groups[name] for name in params})
    for step in range(STEPS):
        grads = drawn_gradients(start, step)
        own = [hyperparameters_at(family.options[0], STEPS, step) for family in optimizer.families]
        optimizer.update(params, {name: grads[name] for name in params}, own, torch.tensor(True))
    for name, sums in sums_of(start | params).items():
        if name not in LEFT_OUT[recipe]:
            assert sums == pytest.approx(recorded["updated"][name], rel=1e-11, abs=1e-11), name


def test_every_recipe_has_a_source() -> None:
    of_decoders = {recipe_of(row) for row in RECIPES}
    assert {path.stem for path in (config_dir() / "recipe").glob("*.yaml")} == {*RECORDED, *of_decoders}
    for name in of_decoders - RECORDED.keys():
        text = (config_dir() / "recipe" / f"{name}.yaml").read_text()
        assert "of transformers 5.23.0" in text
    for name, recorded in RECORDED.items():
        repository, _, commit = recorded["source"].partition(" at ")
        text = (config_dir() / "recipe" / f"{name}.yaml").read_text()
        assert f"{repository} at {commit}" in text


def test_options_of_the_command_are_stronger_than_a_recipe() -> None:
    config = compose_run(["recipe=nanochat", "norm=layernorm", "model=llama_nano", "optim.lr=0.01"])
    assert (config.norm.name, config.model.width, config.optim.lr) == ("layernorm", 32, 0.01)
    assert (config.model.mlp, config.optim.name, config.init) == ("relu2", "muon", "nanochat")
    with pytest.raises(ConfigError, match=r"recipe=nanochat: sets 'scale', which optim=adamw does not have"):
        compose_run(["recipe=nanochat", "optim=adamw"])
    known = "axk2, gemma4, gpt_oss, hy4, modded_track3, muse_glimmer, nanochat, olmo3, qwen3_8_flash, zaya1"
    with pytest.raises(ConfigError, match=f"unknown recipe 'nanogpt'.*choose one of {known}"):
        compose_run(["recipe=nanogpt"])
