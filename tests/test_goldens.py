"""Golden losses: a refactor must reproduce them bit for bit, and a change of maths must refresh and explain them.

Bits hold with the recorded torch, CPU, instructions and number of threads. The test makes torch use the recorded
instructions, but MKL chooses its matrix products by the CPU. Elsewhere rounding grows from step to step, to 6e-5
between two CPUs: the losses must agree to 1e-3, a fiftieth of the change in one step, and the first loss, before any
update, to 1e-5. `scripts/prove/refresh_goldens.py` writes the files.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import golden_losses
from support.golden_losses import GOLDEN
from support.small_run import small_run

PATHS = sorted(GOLDEN.glob("*.json"))
INSTRUCTIONS = ["DEFAULT", "AVX2", "AVX512"]
"""The instruction sets of torch's kernels on x86, smallest first; a CPU has those up to its own."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[str]], dict[str, object]]:
    """Return the losses by golden file, and the environment; one process trains all, with the recorded instructions.

    A CPU that lacks these instructions trains with its own.
    """
    files = {path.stem: json.loads(path.read_text()) for path in PATHS}
    (instructions,) = {golden["environment"]["instructions"] for golden in files.values()}
    small = small_run(tmp_path_factory.mktemp("golden"))
    overrides = [[*small, *golden["overrides"]] for golden in files.values()]
    own = torch.backends.cpu.get_cpu_capability()
    has_them = own in INSTRUCTIONS and instructions in INSTRUCTIONS[: INSTRUCTIONS.index(own) + 1]
    chosen = {"ATEN_CPU_CAPABILITY": instructions.lower()} if has_them else {}
    done = subprocess.run(
        [sys.executable, golden_losses.__file__, json.dumps(overrides)],
        env={**os.environ, **chosen}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found, environment = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(files, found, strict=True)), environment


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_losses_equal_golden_losses(path: Path, runs: tuple[dict[str, list[str]], dict[str, object]]) -> None:
    golden, (losses, environment) = json.loads(path.read_text()), runs
    run_losses = losses[path.stem]
    if golden["environment"] == environment:
        assert run_losses == golden["losses"]
    else:
        values = [[float.fromhex(loss) for loss in side] for side in (run_losses, golden["losses"])]
        torch.testing.assert_close(torch.tensor(values[0]), torch.tensor(values[1]), atol=1e-3, rtol=0)
        assert abs(values[0][0] - values[1][0]) <= 1e-5


def test_there_are_goldens() -> None:
    assert len(PATHS) >= 4
