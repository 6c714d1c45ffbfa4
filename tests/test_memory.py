"""What a run is counted to need, before anything is made."""

from __future__ import annotations

import pytest

from normlab import memory
from normlab.errors import ConfigError
from normlab.launch import compose_run
from normlab.model.init import build_model


@pytest.mark.parametrize(
    ("words", "copies"),
    [
        ("model=gpt2_tiny", 5),
        ("model=gpt2_tiny stats=off", 4),
        ("model=llama_tiny stats.without=[update_norm,param_norm]", 4),
        ("model=llama_nano optim=sgd model.depth=3", 4),
    ],
)
def test_the_state_is_that_of_the_model_but_for_norms_and_biases(words: str, copies: int) -> None:
    config = compose_run(words.split())
    numbers = sum(p.numel() for p in build_model(config, memory.VOCAB_SIZE).parameters())
    counted = memory.estimate(config).state / 4 / copies
    assert 0.97 * numbers < counted <= numbers


def test_what_is_refused_says_what_to_lower() -> None:
    wide = compose_run(["model.width=4096", "model.heads=4"])
    memory.check_fits(wide, 2**40, "this machine")
    with pytest.raises(ConfigError, match=r"model.width=4096 .* this machine has 1 GiB; lower model.depth"):
        memory.check_fits(wide, 2**30, "this machine")
    tall = compose_run(["train.batch_size=65536", "model=gpt2_nano"])
    with pytest.raises(ConfigError, match=r"train.batch_size=65536 .* the GPU has 4 GiB; raise train.accumulation"):
        memory.check_fits(tall, 2**32, "the GPU")
    memory.check_fits(
        compose_run(["train.batch_size=65536", "model=gpt2_nano", "train.accumulation=64"]), 2**32, "the GPU"
    )


def test_this_machine_has_memory() -> None:
    assert memory.available_bytes() > 2**28
