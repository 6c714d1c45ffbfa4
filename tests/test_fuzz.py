"""A sample of scripts/prove/fuzz_inputs.py: mutated overrides and records."""

from __future__ import annotations

from pathlib import Path

import fuzz_inputs
import pytest


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "count", "seed"), [("overrides", 12, 1), ("records", 4, 2)])
def test_mutated_inputs_are_refused_or_used_as_written(kind: str, count: int, seed: int) -> None:
    table, failures = fuzz_inputs.fuzz(seed, {kind: count})
    assert not failures, "\n".join(failures)
    assert table[kind]["cases"] == count
    assert table[kind]["accepted"] + table[kind]["refused"] >= count


def test_the_fuzzer_detects_problems() -> None:
    result = fuzz_inputs.Result
    assert "traceback" in fuzz_inputs.exit_problem(result(1, "", "", "Traceback\nKeyError: 'x'"))
    assert "exit 3" in fuzz_inputs.exit_problem(result(3, "", ""))
    assert "leaks" in fuzz_inputs.exit_problem(result(2, "", "error: KeyError: 'files'; give another\n"))
    assert "2 lines" in fuzz_inputs.exit_problem(result(2, "", "error: a; give b\nerror: c; give d\n"))
    assert "does not name" in fuzz_inputs.exit_problem(result(2, "", "error: x=3; give 4\n"), ["y"])
    assert fuzz_inputs.exit_problem(result(2, "", "error: x=3; give 4\n"), ["x"]) == ""
    printed = result(0, "seed: 0\ntrain:\n  steps: 2\n", "")
    assert "config has 0" in fuzz_inputs.judge_overrides(Path(), printed, ["train", "seed=3"])
    assert "has no" in fuzz_inputs.judge_overrides(Path(), printed, ["train", "sede=3"])
    assert fuzz_inputs.judge_overrides(Path(), printed, ["train", "seed=0", "train.steps=2"]) == ""
    undamaged = dict.fromkeys(("run", "state", "note", "step"), "x") | {"step": 6, "state": "finished"}
    assert "shows step 5 for 6" in fuzz_inputs.wrong_row([undamaged | {"step": 5}], undamaged)
    assert "no note" in fuzz_inputs.wrong_row([undamaged | {"step": None, "note": ""}], undamaged)
