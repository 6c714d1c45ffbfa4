"""`normlab doctor`: each test takes away what a check looks for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch

from normlab.cli import doctor
from normlab.config.compose import compose_run
from normlab.errors import ConfigError
from normlab.training.machine import resolve

Command = Callable[..., tuple[int, str, str]]


def check(name: str, results: Path | str = "results") -> dict[str, str]:
    return {result["check"]: result for result in doctor.checks(str(results))}[name]


def test_doctor_reports_this_machine(run_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no compiler")  # a compilation takes seconds
    code, out, err = run_command("doctor")
    assert (code, err) == (0, "")
    assert f"torch {torch.__version__}" in out
    assert f"{torch.get_num_threads()} thread" in out
    code, text, _ = run_command("doctor", "--json")
    results = json.loads(text)
    assert code == 0
    assert {result["state"] for result in results} <= {"ok", "note"}
    # A check says what to do exactly if something is not in order.
    assert all(bool(result["remedy"]) == (result["state"] != "ok") for result in results)
    assert [line.split()[0] for line in out.splitlines() if "->" not in line] == [row["check"] for row in results]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("versions", "state", "finding", "remedy"),
    [
        ({}, "ok", "", ""),
        ({"datasets": "3.6.0"}, "bad", "datasets should be ", "pip install 'datasets"),
        ({"tokenizers": None, "wandb": "1.0"}, "bad", "wandb should be ", "'wandb"),
        ({"tokenizers": None, "wandb": "1.0"}, "bad", "tokenizers is missing", "'tokenizers>="),
    ],
)
def test_versions(
    versions: dict[str, str | None], state: str, finding: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.version

    def version(name: str) -> str:
        installed = versions[name] if name in versions else real(name)
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(metadata, "version", version)
    result = check("normlab")
    assert result["state"] == state
    assert finding in result["finding"]
    assert remedy in result["remedy"]


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = check("compile")
    assert (result["state"], result["finding"]) == (
        "note",
        "the C++ compiler 'g++' was not found, so compile=on does not work",
    )


def test_a_compiler_that_does_not_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho fatal error: cmath: No such file or directory >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    result = check("compile")
    assert result["state"] == "note"
    assert "cmath: No such file" in result["finding"]


@pytest.mark.parametrize("compiler", ["env g++", "no_such_compiler", ""])
def test_a_compiler_that_torch_does_not_find(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert f"the C++ compiler {compiler!r} was not found" in check("compile")["finding"]
    with pytest.raises(ConfigError, match=r"compile=on: the C.. compiler .* was not found; install"):
        resolve(compose_run(["compile=on", "device=cpu"]))


def test_a_compiler_outside_of_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch compiles with $CXX, so doctor and a run use it too."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in ("as", "ld"):
        (tmp_path / tool).symlink_to(shutil.which(tool, path=os.defpath) or "")
    assert check("compile") == {"check": "compile", "state": "ok", "finding": compiler, "remedy": ""}
    assert resolve(compose_run(["compile=on", "device=cpu"])).compile == "on"


def test_more_threads_than_cores() -> None:
    cores, before = len(os.sched_getaffinity(0)), torch.get_num_threads()
    torch.set_num_threads(cores + 1)
    try:
        result = check("threads")
    finally:
        torch.set_num_threads(before)
    assert result["state"] == "note"
    assert f"{cores + 1} threads on " in result["finding"]
    assert f"OMP_NUM_THREADS={cores}" in result["remedy"]


@pytest.mark.parametrize(
    ("threads", "cores", "text"),
    [(1, 2, "1 thread on 2 cores, "), (2, 1, "2 threads on 1 core, "), (4, 8, "4 threads on 8 cores, ")],
)
def test_threads_and_cores_are_counted(threads: int, cores: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normlab.training.machine.num_threads", lambda: threads)
    monkeypatch.setattr(doctor, "allowed_cores", lambda: cores)
    assert check("threads")["finding"].startswith(text)


@pytest.mark.process
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("note", "no login")),
        ({"WANDB_API_KEY": "a" * 40}, ("ok", "online at")),
        ({"WANDB_MODE": "offline"}, ("ok", "offline (set by the user)")),
        ({"WANDB_MODE": "disabled"}, ("ok", "disabled (set by the user)")),
        ({"WANDB_MODE": "foo"}, ("note", "invalid W&B settings (mode")),
    ],
)
def test_wandb(variables: dict[str, str], expected: tuple[str, str], tmp_path: Path) -> None:
    # In a process of its own: W&B reads its variables once.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    done = subprocess.run(
        [sys.executable, "-m", "normlab", "doctor", "--json"],
        env=kept | {"CXX": "no compiler"} | variables, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (result,) = [check for check in json.loads(done.stdout) if check["check"] == "W&B"]
    assert result["state"] == expected[0]
    assert expected[1] in result["finding"]
    assert done.stderr == ""


def test_results_that_cannot_be_written(tmp_path: Path, run_command: Command) -> None:
    (tmp_path / "file").touch()
    result = check("results", tmp_path / "file" / "results")
    assert (result["state"], result["finding"]) == ("bad", f"{tmp_path / 'file'}: is a file")
    code, out, _ = run_command("doctor", "--results-dir", "/proc/results")
    assert code == 1
    assert "cannot be written" in out


def test_a_file_name_that_is_too_long(tmp_path: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 300)
    code, out, _ = run_command("doctor", "--results-dir", str(long))
    assert code == 1
    assert "cannot be accessed (File name too long)" in out
    assert check("results", long)["remedy"] == "choose another results_dir=..."
    monkeypatch.setenv("NORMLAB_CACHE", str(long))
    result = check("cache")
    assert (result["state"], result["remedy"]) == ("bad", "set NORMLAB_CACHE to another folder")


def test_a_disk_that_is_nearly_full(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        result = check("results", tmp_path / "results")
        assert result["state"] == "note"
        assert "nearly full" in result["finding"]
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


@pytest.mark.process
def test_a_compiler_that_fails_is_a_one_line_error(tmp_path: Path, overrides: list[str]) -> None:
    """A compiler that exists and fails is only found by torch, at the first step."""
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho no assembler >&2\nexit 1\n")
    broken.chmod(0o755)
    environment = {**os.environ, "CXX": str(broken), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = subprocess.run(
        [sys.executable, "-m", "normlab", "train", *overrides, "compile=on", "device=cpu"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert "error: compile=on: torch's compiler failed (" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("or train with compile=off")
    assert "Traceback" not in done.stderr
