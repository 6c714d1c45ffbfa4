"""The memory estimate of a run."""

from __future__ import annotations

import pytest

from normlab.config import memory
from normlab.config.compose import compose_run
from normlab.errors import ConfigError
from normlab.model.init import build_model


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        ("model=gpt2_tiny", 5),
        ("model=gpt2_tiny stats=off", 4),
        ("model=llama_tiny stats.without=[update_norm,param_norm]", 4),
        ("model=llama_nano optim=sgd model.depth=3", 4),
    ],
)
def test_state_counts_the_weights_without_norms_and_biases(overrides: str, copies: int) -> None:
    config = compose_run(overrides.split())
    parameters = sum(p.numel() for p in build_model(config, memory.VOCAB_SIZE).parameters())
    estimated = memory.estimate(config)[0] / 4 / copies
    assert 0.97 * parameters < estimated <= parameters


def test_error_names_the_options_to_lower() -> None:
    large_model = compose_run(["model.width=4096", "model.heads=4"])
    memory.check_fits(large_model, 2**40, "this machine")
    with pytest.raises(ConfigError, match=r"model.width=4096 .* this machine has 1 GiB; lower model.depth"):
        memory.check_fits(large_model, 2**30, "this machine")
    large_batch = compose_run(["train.batch_size=65536", "model=gpt2_nano"])
    with pytest.raises(ConfigError, match=r"train.batch_size=65536 .* the GPU has 4 GiB; raise train.accumulation"):
        memory.check_fits(large_batch, 2**32, "the GPU")
    accumulated = compose_run(["train.batch_size=65536", "model=gpt2_nano", "train.accumulation=64"])
    memory.check_fits(accumulated, 2**32, "the GPU")


def test_this_machine_has_memory() -> None:
    assert memory.available_bytes() > 2**28
