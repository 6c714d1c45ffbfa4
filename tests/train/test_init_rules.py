"""A run trains with an init rule other than that of its placement, and with a plugin's that divides by the block."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

PLUGIN = """
from normlab.catalogue.placements.init_rules import EMBEDDINGS, init_rule

@init_rule
def over_layer(weight):
    if weight.role in EMBEDDINGS:
        assert weight.layer == 0
        return 0.02
    return 0.02 / weight.layer
"""


@pytest.mark.parametrize("rule", ["tinyinit", "over_layer"])
def test_run_with_init_rule_trains(
    rule: str, overrides: list[str], run_command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(PLUGIN)
    plugin = [f"plugins=[{tmp_path / 'own.py'}]"] if rule == "over_layer" else []
    small = ["model.depth=2", "model.width=16", "model.heads=2", "model.context=8"]
    code, _, err = run_command("train", *overrides, *small, *plugin, f"init={rule}", "train.steps=2")
    assert code == 0, err
    (record,) = (tmp_path / "results" / "runs").glob("*/run.json")
    assert json.loads(record.read_text())["config"]["init"] == rule
