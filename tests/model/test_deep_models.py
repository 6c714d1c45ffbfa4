"""A model that takes long to build, because it is deep, is announced before."""

import pytest

from normlab.config.compose import compose_run
from normlab.model import gpt
from normlab.model.fingerprint import fingerprint


def test_a_deep_model_is_announced_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "DEEP", 2)
    gpt.notify_of_depth.cache_clear()
    for depth in (2, 3, 3):
        assert fingerprint(compose_run(["model=llama_nano", f"model.depth={depth}"]))
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("normlab: model.depth=3: building the blocks")
