"""A sample of scripts/mutate_catalogue.py: what is broken is seen, and what is said to be equivalent is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from normlab.verify.init_rules import BELONGS

SCRIPT = Path(__file__).parent.parent / "scripts" / "mutate_catalogue.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate_catalogue", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate_catalogue"] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def catalogue(script: ModuleType) -> dict[str, Any]:
    return script.catalogue()


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("rmsnorm", "self.eps = options.eps  ->  pass"),
        ("crmsnorm", "(torch.sqrt(squares / (x_D.shape[-1] + 1)) + self.eps).reciprocal()"),
        ("batchnorm", "self.unbiased = options.running_var != 'unbiased'"),
        ("batchnorm", "buffer: BatchNorm.running_var is all zeros"),
        ("minmax", "high = (work_D.amin(-1, keepdim=True), work_D.amin(-1, keepdim=True))"),
        ("deepnorm", "row: attn skip=L ** (1/4)"),
        ("deepnorm", "buffer: Residual.skip is all zeros"),
        ("lns", "row: mlp shrink=sqrt(l + 1)"),
        ("rezero", "row: shared_scale=False"),
        ("hybridnorm_star", "row: one more is early"),
        ("post", "row: attn has out for res"),
        ("post", "row: init=gpt2"),
        ("peri", "row: init=gpt2_scaled"),
        ("parallel/parallel_two_norms", "parallel_two_norms: init=gpt2"),
        ("gpas", "return x_BTD - F.silu(self.gate) * x_BTD"),
        ("ngpt", "'mlp.up.weight')"),
        ("init deepnorm", "(8 * weight.depth) ** (--0.25)"),
    ],
)
def test_what_is_broken_is_seen(script: ModuleType, catalogue: dict[str, Any], entry: str, text: str) -> None:
    mutants, checks = catalogue[entry]
    chosen = [mutant for mutant in mutants if text in mutant.text.partition("  ->  ")[2] or text in mutant.text][:1]
    assert chosen, text
    assert all(script.judge([(mutant, checks) for mutant in chosen]))


def test_each_placement_is_given_a_wrong_init_once(script: ModuleType, catalogue: dict[str, Any]) -> None:
    texts = [(entry, mutant.text) for entry, (mutants, _) in catalogue.items() for mutant in mutants]
    found = [
        entry if text.startswith("row: ") else text.partition(":")[0] for entry, text in texts if ": init=" in text
    ]
    assert sorted(found) == sorted(BELONGS)


def test_no_process_but_the_mutants_own_is_changed(script: ModuleType, catalogue: dict[str, Any]) -> None:
    mutants, checks = catalogue["crmsnorm"]
    sound = script.Mutant("crmsnorm", "nothing", lambda: None)
    assert script.judge([(mutants[0], checks), (sound, checks)])[1] == ""


def test_a_reason_is_for_a_mutant_that_is_there_and_unseen(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    mutants = [script.Mutant("some", text, lambda: None) for text in ("one", "other")]
    monkeypatch.setattr(script, "EQUIVALENT", {("some", "one"): "it is", ("some", "third"): "it was"})
    told = script.verdict("some", mutants, ["", "seen"])
    assert (told["killed"], told["survived"], told["equivalent"]) == (1, 0, 1)
    assert told["stale"] == ["third"]
    assert script.verdict("some", mutants, ["seen", ""])["survivors"] == ["other"]
    assert script.verdict("some", mutants, ["seen", ""])["stale"] == ["one", "third"]


def test_every_reason_is_for_a_mutant_that_there_is(script: ModuleType, catalogue: dict[str, Any]) -> None:
    for entry, part in script.EQUIVALENT:
        assert any(part in mutant.text for mutant in catalogue[entry][0]), (entry, part)


def test_a_mutant_that_never_answers_is_seen(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> None:
        while True:
            pass

    monkeypatch.setattr(script, "SECONDS", 1)
    assert "no answer" in script.judge([(script.Mutant("some", "loops", never), lambda: iter(()))])[0]
