"""The process with a pretended GPU, one for each worker of pytest."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from support.small_run import small_run

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent

TakeSteps = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the compiled guard; without a compiler skip, or fail if `NORMLAB_COMPILER=required` is set."""
    if torch.version.cuda is not None:
        pytest.skip("torch is built with CUDA: tests/train/test_gpu.py is for a GPU")
    if shutil.which("g++") is None:
        give_up = pytest.fail if os.environ.get("NORMLAB_COMPILER") == "required" else pytest.skip
        give_up("there is no g++ to compile the guard of the pretended GPU")
    library, libraries = tmp_path_factory.mktemp("guard") / "guard.so", TORCH / "lib"
    options = ["-std=c++20", "-shared", "-fPIC", f"-I{TORCH / 'include'}", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    subprocess.run(["g++", HERE / "guard.cpp", *options, "-lc10", "-ltorch_cpu", "-o", library], check=True)
    return library


@pytest.fixture(scope="session")
def pretended_gpu(guard: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that takes steps on a pretended GPU."""
    errors = tmp_path_factory.mktemp("pretended_gpu") / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, HERE / "pretended_gpu.py", guard],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
    assert process.returncode == 0, errors.read_text()


@pytest.fixture
def take_steps(pretended_gpu: subprocess.Popen[str]) -> TakeSteps:
    """Return a function that takes steps with some overrides and returns what each part does."""

    def call(
        *overrides: str, runs: int = 1, steps: Sequence[int] = (0, 1, 10), plant: str | None = None,
        between: bool = False, restored: bool = False, peak: bool = False,
    ) -> dict[str, dict[str, Any]]:  # fmt: skip
        case = {
            "overrides": [*small_run(Path("results")), *overrides],
            "runs": runs, "steps": [*steps], "plant": plant, "between": between,
            "restored": restored, "peak": peak,
        }  # fmt: skip
        return result_of(pretended_gpu, case)

    return call


@pytest.fixture
def use_loaded_run(pretended_gpu: subprocess.Popen[str]) -> Callable[[Path], dict[str, Any]]:
    """Return a function that loads a run and returns how its evaluation and its samples use the device."""
    return lambda folder: result_of(pretended_gpu, {"folder": str(folder)})


def result_of(process: subprocess.Popen[str], case: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps(case), file=process.stdin, flush=True)
    result = json.loads(process.stdout.readline())
    if "error" in result:
        pytest.fail(result["error"])
    return result
