"""A sample of scripts/fuzz_inputs.py: mutated overrides, configs, texts, checkpoints and records."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "fuzz_inputs.py"


@pytest.fixture(scope="module")
def fuzz_inputs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_inputs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_inputs"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "count", "seed"),
    [
        ("overrides", 12, 1),
        ("configs", 4, 1),
        ("texts", 4, 2),
        ("checkpoints", 2, 3),
        ("records", 3, 2),
        ("forged", 2, 1),
    ],
)
def test_mutated_inputs_are_refused_or_used_as_written(
    fuzz_inputs: ModuleType, kind: str, count: int, seed: int
) -> None:
    table, failures = fuzz_inputs.fuzz(seed, {kind: count})
    assert not failures, "\n".join(failures)
    assert table[kind]["cases"] == count
    assert table[kind]["accepted"] + table[kind]["refused"] >= count


def test_the_fuzzer_detects_exit_problems(fuzz_inputs: ModuleType) -> None:
    result = fuzz_inputs.Result
    assert "traceback" in fuzz_inputs.exit_problem(result(1, "", "", "Traceback\nKeyError: 'x'"))
    assert "exit 3" in fuzz_inputs.exit_problem(result(3, "", ""))
    assert "leaks" in fuzz_inputs.exit_problem(result(2, "", "error: KeyError: 'files'; give another\n"))
    assert "2 lines" in fuzz_inputs.exit_problem(result(2, "", "error: a; give b\nerror: c; give d\n"))
    assert "no advice" in fuzz_inputs.exit_problem(result(2, "", "error: x=3: is wrong\n"))
    assert "does not name" in fuzz_inputs.exit_problem(result(2, "", "error: x=3; give 4\n"), ["y"])
    assert fuzz_inputs.exit_problem(result(2, "", "error: x=3; give 4\n"), ["x"]) == ""
    judged = result(0, "", "", "", ({"seed": 0, "train": {"steps": 2}},))
    assert "config has 0" in fuzz_inputs.judge_overrides(Path(), judged, ["train", "seed=3"])
    assert "has no" in fuzz_inputs.judge_overrides(Path(), judged, ["train", "sede=3"])
    assert fuzz_inputs.judge_overrides(Path(), judged, ["train", "seed=0", "train.steps=2"]) == ""
    undamaged = dict.fromkeys(("run", "state", "note", "step"), "x") | {"step": 6, "state": "finished"}
    assert "shows step 5 for 6" in fuzz_inputs.wrong_row([undamaged | {"step": 5}], undamaged)
    assert "no note" in fuzz_inputs.wrong_row([undamaged | {"step": None, "note": ""}], undamaged)
