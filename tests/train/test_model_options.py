"""Every option of the model trains from the command's options on, and its block is identified."""

from typing import Any

import pytest

from normlab.config.compose import compose_run
from normlab.model.fingerprint import fingerprint
from normlab.training import start as training
from normlab.verify.selection import MODELS, SCALED


@pytest.mark.parametrize("model", [*MODELS, SCALED], ids=str)
def test_a_model_with_these_options_trains(model: dict[str, Any], overrides: list[str]) -> None:
    own = [f"model.{name}={value}" for name, value in model.items()]
    config = compose_run([*overrides, "model.depth=3", *own])
    outcome = training.train(config)
    assert outcome.state == "finished"
    assert outcome.folder.status()["val_loss"] is not None
    assert len(fingerprint(config)) == 16


def test_the_fingerprint_knows_where_values_come_from(overrides: list[str]) -> None:
    found = {
        fingerprint(compose_run([*overrides, "model.depth=3", *own]))
        for own in ([], ["model.value_residual=fixed"], ["model.value_embed=true"])
    }
    assert len(found) == 3
