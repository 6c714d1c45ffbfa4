"""A command announces a model that takes long to build, because it is deep; the model's class prints nothing."""

from collections.abc import Callable

import pytest

from normlab.config.compose import compose_run
from normlab.model import init
from normlab.model.fingerprint import fingerprint
from normlab.model.init import build_model

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _small_depths_are_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "DEEP", 1)
    init.notify_of_depth.cache_clear()


def test_a_deep_model_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    config = compose_run(["model=llama_nano", "model.depth=2"])
    build_model(config, vocab_size=7)
    assert fingerprint(config)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [["--cfg", "optim"], ["train.steps=1"]])
def test_a_command_announces_a_deep_model_once(
    arguments: list[str], overrides: list[str], run_command: Command
) -> None:
    code, _, err = run_command("train", *overrides, "model.depth=2", *arguments)
    assert code == 0, err
    assert err.count("normlab: model.depth=2: building the blocks") == 1
