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
    ("kind", "count"),
    [("overrides", 12), ("configs", 4), ("texts", 4), ("checkpoints", 2), ("records", 3), ("forged", 2)],
)
def test_mutated_inputs_are_refused_or_used_as_written(fuzz_inputs: ModuleType, kind: str, count: int) -> None:
    table, failures = fuzz_inputs.fuzz(1, {kind: count})
    assert not failures, "\n".join(failures)
    assert table[kind]["accepted"] + table[kind]["refused"] >= count


@pytest.mark.parametrize(
    ("code", "err", "raised", "problem"),
    [
        (1, "", "Traceback\nKeyError: 'x'", "traceback"),
        (3, "", "", "exit 3"),
        (2, "error: KeyError: 'files'; give another\n", "", "leaks"),
        (2, "error: a; give b\nerror: c; give d\n", "", "2 lines"),
        (2, "error: x=3: is wrong\n", "", "no advice"),
        (2, "error: y=3; give 4\n", "", "does not name"),
        (2, "error: x=3; give 4\n", "", ""),
    ],
)
def test_the_fuzzer_detects_exit_problems(
    fuzz_inputs: ModuleType, code: int, err: str, raised: str, problem: str
) -> None:
    found = fuzz_inputs.exit_problem(fuzz_inputs.Result(code, "", err, raised), ["x"])
    assert problem in found if problem else found == ""
