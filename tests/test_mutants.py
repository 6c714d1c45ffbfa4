"""A sample of scripts/prove/mutate_catalogue.py: mutants are detected, and equivalent mutants have a reason."""

import os
from typing import Any

import pytest
from mutants import entries, judging
from mutants.equivalent import EQUIVALENT
from mutants.mutant import Mutant


@pytest.fixture(scope="module")
def catalogue() -> dict[str, Any]:
    return entries.catalogue()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("affine", "self.eps = getattr(options, 'eps', 0.0)  ->  pass"),
        ("crmsnorm", "(torch.sqrt(squares / (x_D.shape[-1] + 1)) + self.eps).reciprocal()"),
        ("batchnorm", "buffer: BatchNorm.running_var is all zeros"),
        ("minmax", "high = (x_D.amin(-1, keepdim=True), x_D.amin(-1, keepdim=True))"),
        ("deepnorm", "row: attn skip=L ** (1/4)"),
        ("lns", "row: mlp shrink=sqrt(l + 1)"),
        ("hybridnorm_star", "row: one more is early"),
        ("post", "row: attn has output for residual"),
        ("post", "row: init=gpt2"),
        ("peri", "row: init=gpt2_scaled"),
        ("b2t/gpas/norm_preserving/parallel/parallel_two_norms", "return x_BTD - F.silu(self.gate) * x_BTD"),
        ("ngpt", "'mlp.up.weight')"),
        ("init deepnorm", "(8 * weight.depth) ** 0.25"),
    ],
)
def test_mutants_are_detected(catalogue: dict[str, Any], entry: str, text: str) -> None:
    mutants, checks = catalogue[entry]
    chosen = [mutant for mutant in mutants if text in mutant.text.partition("  ->  ")[2] or text in mutant.text][:1]
    assert chosen, text
    assert all(judging.judge([(mutant, checks) for mutant in chosen]))


def test_a_reason_without_a_surviving_mutant_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    mutants = [Mutant("some", text, lambda: None) for text in ("one", "other")]
    monkeypatch.setattr(judging, "EQUIVALENT", {("some", "one"): "it is", ("some", "third"): "it was"})
    result = judging.summarise("some", mutants, ["", "detected"])
    assert (result["killed"], result["survived"], result["equivalent"]) == (1, 0, 1)
    assert result["stale"] == ["third"]
    assert judging.summarise("some", mutants, ["detected", ""])["survivors"] == ["other"]
    assert judging.summarise("some", mutants, ["detected", ""])["stale"] == ["one", "third"]


def test_mutants_killed_by_no_check_are_counted_apart() -> None:
    mutants = [Mutant("some", text, lambda: None) for text in "abcd"]
    result = judging.summarise(
        "some", mutants, [f"no answer in {judging.TIMEOUT_S} s", "its process ended", "a check", ""]
    )
    assert (result["killed"], result["no_answer"], result["died"]) == (3, 1, 1)
    assert "(killed by a timeout of 60 s: 1, by a dead process: 1)" in judging.table_line(result)
    assert "timeout" not in judging.table_line(judging.summarise("some", mutants, ["a check"] * 4))


@pytest.mark.exhaustive
def test_every_reason_names_an_existing_mutant(catalogue: dict[str, Any]) -> None:
    for entry, text in EQUIVALENT:
        assert [mutant.text for mutant in catalogue[entry][0]].count(text) == 1, (entry, text)


def test_a_mutant_that_never_answers_or_dies_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> None:
        while True:
            pass

    def results_of(mutant: Mutant) -> dict[str, Any]:
        return judging.summarise("some", [mutant], judging.judge([(mutant, lambda: iter(()))]))

    died = results_of(Mutant("some", "dies", lambda: os._exit(1)))
    assert (died["killed"], died["no_answer"], died["died"]) == (1, 0, 1)
    monkeypatch.setattr(judging, "TIMEOUT_S", 1)
    looped = results_of(Mutant("some", "loops", never))
    assert (looped["killed"], looped["no_answer"], looped["died"]) == (1, 1, 0)
