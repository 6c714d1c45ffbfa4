"""`normlab doctor`: each test takes away what a check looks for."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from normlab.base.errors import ConfigError
from normlab.cli import doctor
from normlab.config.compose import compose_run
from normlab.training.machine import resolve

Command = Callable[..., tuple[int, str, str]]


def check(name: str, results: Path | str = "results") -> dict[str, str]:
    return {result["check"]: result for result in doctor.checks(str(results))}[name]


def test_doctor_reports_this_machine(run_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no compiler")  # a compilation takes seconds
    code, out, err = run_command("doctor")
    assert (code, err) == (0, "")
    assert f"torch {torch.__version__}" in out
    results = list(doctor.checks("results"))
    assert {result["state"] for result in results} <= {"ok", "note"}
    # A check says what to do exactly if something is not in order.
    assert all(bool(result["remedy"]) == (result["state"] != "ok") for result in results)
    assert [line.split()[0] for line in out.splitlines() if "->" not in line] == [row["check"] for row in results]
    assert list(tmp_path.iterdir()) == []


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = check("compile")
    assert (result["state"], result["finding"]) == (
        "note",
        "the C++ compiler 'g++' was not found, so compile=on does not work",
    )


@pytest.mark.parametrize("compiler", ["env g++", "no_such_compiler", ""])
def test_a_compiler_that_torch_does_not_find(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert f"the C++ compiler {compiler!r} was not found" in check("compile")["finding"]
    with pytest.raises(ConfigError, match=r"compile=on: the C.. compiler .* was not found; install"):
        resolve(compose_run(["compile=on", "device=cpu"]))


@pytest.mark.process
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "W&B      note no login"),
        ({"WANDB_API_KEY": "a" * 40}, "W&B      ok   online at"),
        ({"WANDB_MODE": "offline"}, "W&B      ok   offline (set by the user)"),
        ({"WANDB_MODE": "foo"}, "W&B      note the check failed: ValidationError"),
    ],
)
def test_wandb(variables: dict[str, str], expected: str, tmp_path: Path) -> None:
    # In a process of its own: W&B reads its variables once.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    done = subprocess.run(
        [sys.executable, "-m", "normlab", "doctor"],
        env=kept | {"CXX": "no compiler"} | variables, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert expected in done.stdout
    assert done.stderr == ""


def test_folders_that_cannot_be_written(tmp_path: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "results", tmp_path / ("x" * 300), Path("/proc/results")):
        result = check("results", folder)
        assert (result["state"], result["remedy"]) == ("bad", "choose another results_dir=...")
        assert "cannot be written and locked" in result["finding"]
    assert run_command("doctor", "--results-dir", "/proc/results")[0] == 1
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "file"))
    assert check("cache")["state"] == "bad"
