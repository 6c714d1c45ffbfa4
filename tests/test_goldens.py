"""Golden losses: a refactor must reproduce them bit for bit, and a change of maths must refresh and explain them.

Bits hold with the recorded torch, CPU, instructions and number of threads. The test makes torch use the recorded
instructions, but MKL chooses its matrix products by the CPU. Elsewhere rounding grows from step to step, to 6e-5
between two CPUs: the losses must agree to 1e-3, a fiftieth of the change in one step, and the first loss, before any
update, to 1e-5. `scripts/refresh_goldens.py` writes the files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normlab.config.compose import compose_run
from normlab.train.run import train

GOLDEN = Path(__file__).with_name("golden")


def cpu() -> str:
    """Return the CPU's vendor, family and model, by which MKL chooses its kernels; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    fields = dict(line.split("\t", 1) for line in lines if "\t" in line)
    return " ".join(fields.get(name, ":").strip("\t: ") for name in ("vendor_id", "cpu family", "model"))


def environment() -> dict[str, object]:
    return {
        "cpu": cpu(),
        "torch": torch.__version__.partition("+")[0],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def losses(overrides: list[str]) -> list[str]:
    """Return the losses of a run in the order of its record, as exact hexadecimal floats."""
    rows = train(compose_run(overrides), trackers=[]).folder.rows().rows
    return [row["loss"].hex() for row in rows if "loss" in row]


def losses_by(instructions: str, overrides: list[str]) -> tuple[list[str], dict[str, object]]:
    """Return the losses with these CPU instructions, if the CPU has them, and the environment of the run."""
    code = (
        "import json, sys; from tests import test_goldens as t; "
        "print(json.dumps([t.losses(json.loads(sys.argv[1])), t.environment()]))"
    )
    environment_variables = {
        **os.environ,
        "ATEN_CPU_CAPABILITY": instructions.lower(),
        "PYTHONPATH": str(GOLDEN.parent.parent),
    }
    command = [sys.executable, "-c", code, json.dumps(overrides)]
    out = subprocess.run(command, env=environment_variables, capture_output=True, text=True, check=True).stdout
    run_losses, where = json.loads(out.splitlines()[-1])
    return run_losses, where


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_losses_equal_golden_losses(path: Path, overrides: list[str]) -> None:
    golden = json.loads(path.read_text())
    run_losses, where = losses_by(golden["environment"]["instructions"], [*overrides, *golden["overrides"]])
    if golden["environment"] == where:
        assert run_losses == golden["losses"]
    else:
        values = [[float.fromhex(loss) for loss in side] for side in (run_losses, golden["losses"])]
        torch.testing.assert_close(torch.tensor(values[0]), torch.tensor(values[1]), atol=1e-3, rtol=0)
        assert abs(values[0][0] - values[1][0]) <= 1e-5


def test_there_are_goldens() -> None:
    assert len(list(GOLDEN.glob("*.json"))) >= 4
