"""A norm with `causal = False` causes a warning, printed once and recorded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from normlab.catalogue.norms.base import NORMS
from normlab.config.compose import compose_run
from support.small_run import without_replaced

Command = Callable[..., tuple[int, str, str]]
WARNING = "norm={}: in training, each token's statistics include later tokens, so the training loss uses the future"


@pytest.mark.parametrize("name", ["batchnorm", "batchnorm_past", "batchnorm_position", "rmsnorm", "layernorm"])
def test_warning_follows_the_declaration(name: str) -> None:
    warnings = [line for line in compose_run([f"norm={name}"]).warnings() if "later tokens" in line]
    assert [line.startswith(WARNING.format(name)) for line in warnings] == [True] * (not NORMS[name].causal)


def test_warning_covers_every_norm_that_declares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_run(["norm=layernorm"])
    monkeypatch.setattr(type(config.norm), "causal", False)
    assert config.warnings() == [WARNING.format("layernorm") + "; the validation loss does too"]


def test_warning_is_printed_once_and_recorded(overrides: list[str], run_command: Command, tmp_path: Path) -> None:
    line = WARNING.format("batchnorm") + "; the validation loss uses running statistics and does not"
    code, _, err = run_command("train", *without_replaced([*overrides, "norm=batchnorm", "train.steps=2"]))
    assert (code, err.splitlines()[0], err.count("later tokens")) == (0, f"warning: {line}", 1)
    (record,) = tmp_path.rglob("run.json")
    assert json.loads(record.read_text())["warnings"] == [line]
    err = run_command("sweep", *overrides, "norm=batchnorm,rmsnorm", "seed=0,1", "--dry-run")[2]
    assert err == f"warning: {line}\n"
