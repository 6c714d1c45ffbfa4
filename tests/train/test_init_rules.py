"""Every init rule can be trained with, one that counts blocks from 1 too, and says nothing new of older runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from normlab.init_rules import INIT_RULES, numbers_of

PLUGIN = """
from normlab.init_rules import EMBEDDINGS, init_rule

@init_rule
def over_layer(weight):
    if weight.role in EMBEDDINGS:
        assert weight.layer == 0
        return 0.02
    return 0.02 / weight.layer
"""


@pytest.mark.parametrize("rule", [*INIT_RULES, "over_layer"])
def test_it_trains(
    rule: str, words: list[str], run_command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(PLUGIN)
    plugin = [f"plugins=[{tmp_path / 'own.py'}]"] if rule == "over_layer" else []
    small = ["model.depth=2", "model.width=16", "model.heads=2", "model.context=8"]
    code, _, err = run_command("train", *words, *small, *plugin, f"init={rule}", "train.steps=2")
    assert code == 0, err
    (record,) = (tmp_path / "results" / "runs").glob("*/run.json")
    assert json.loads(record.read_text())["config"]["init"] == rule


def test_what_is_hashed_of_rules_that_ask_for_no_layer_is_as_it_was() -> None:
    """Hashes of before layers were told apart, so that runs of then keep their ids."""
    before = {"gpt2_scaled": "4d1617e343", "deepnorm": "b479e36eb9"}
    for rule, digest in before.items():
        drawn = repr(numbers_of(rule, depth=4, width=128, mlp_width=512, vocab_size=256))
        assert hashlib.sha256(drawn.encode()).hexdigest()[:10] == digest
