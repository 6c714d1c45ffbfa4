"""Reading the config of run.json: complete configs round-trip, damaged ones are rejected."""

from __future__ import annotations

from typing import Any

import pytest

from normlab.config.compose import compose_run
from normlab.config.schema import config_from_record
from normlab.errors import ConfigError
from normlab.options import plain_tree


@pytest.fixture
def tree() -> dict[str, Any]:
    return plain_tree(compose_run(["norm=batchnorm", "optim=sgd", "data=files", "data.path=[a,b]", "run.name=x"]))


def test_record_round_trips(tree: dict[str, Any]) -> None:
    assert plain_tree(config_from_record(tree)) == tree


@pytest.mark.parametrize("option", ["norm", "placement", "optim", "data"])
def test_a_part_that_has_a_name_is_required(tree: dict[str, Any], option: str) -> None:
    del tree[option]
    with pytest.raises(ConfigError):
        config_from_record(tree)


@pytest.mark.parametrize("option", ["new", "model.new", "norm.new", "placement.new", "optim.new", "data.new"])
def test_an_unknown_option_is_rejected(tree: dict[str, Any], option: str) -> None:
    group, _, name = option.partition(".")
    (tree[group] if name else tree)[name or group] = 1
    with pytest.raises(ConfigError, match="has no option new"):
        config_from_record(tree)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("norm.name", -1.5), ("norm.eps", "x"), ("norm.gain", 1), ("norm.gain", [[]]), ("model", []), ("model", "x"),
        ("model.context", None), ("model.depth", 2.0), ("model.depth", True), ("data.name", {}), ("init", -1.5),
        ("plugins", "x"), ("placement", []), ("seed", None), ("optim.lr", True),
    ],
)  # fmt: skip
def test_value_of_another_type_is_rejected(tree: dict[str, Any], option: str, value: Any) -> None:
    group, _, name = option.partition(".")
    (tree[group] if name else tree)[name or group] = value
    with pytest.raises(ConfigError):
        config_from_record(tree)
